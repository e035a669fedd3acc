"""A training from Python: a run is a value, `train` is a function of it, and the folder it leaves tells the rest.

    python examples/train_from_python.py

Three epochs of a tiny ViT on the digits that come with vitrail, in runs/from-python. A second call finds it done; one
that was killed in between goes on where it was, to the same bits.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.distributed.world import joined
from vitrail.recipes.registry import recipe
from vitrail.train.config import Evaluation
from vitrail.train.loop import train

OUT = Path("runs/from-python")


class Told:
    """Who is told how it goes; leave `observer` out and nobody is."""

    def told(self, text: str) -> None:
        print(text)

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] == "watch":
            print(f"step {row['step']}: {row['accuracy']:.1%} of {row['count']} held-out digits right")


def main() -> None:
    base = recipe("digits")  # frozen dataclasses: one derives, and never changes
    run = replace(
        base,
        epochs=3,
        schedule=replace(base.schedule, warmup=10),
        optim=replace(base.optim, lr=2e-3),
        evaluation=Evaluation(every=22),
    )
    with joined("cpu") as world:  # of one process, or of all that torchrun started
        result = train(run, out=OUT, world=world, observer=Told())
    rows = [json.loads(line) for line in (OUT / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    print(f"{result.state} at step {result.step}; loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    print(f"open {OUT / 'report.html'}, or:  vitrail predict {OUT} PICTURE")


if __name__ == "__main__":
    main()
