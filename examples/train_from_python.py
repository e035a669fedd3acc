"""A training from Python: `vitrail.train` is a call, and the folder it leaves tells the rest.

    python examples/train_from_python.py

Three epochs of a tiny ViT on the digits that come with vitrail, in runs/from-python. A second call finds it done; one
that was killed in between goes on where it was, to the same bits.
"""

from pathlib import Path
from typing import Any

import vitrail

OUT = Path("runs/from-python")


class Told:
    """Who is told how it goes; leave `observer` out and nobody is."""

    def told(self, text: str) -> None:
        print(text)

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] == "watch":
            print(f"step {row['step']}: {row['accuracy']:.1%} of {row['count']} held-out digits right")


def main() -> None:
    settings = {"schedule.warmup": 10, "evaluation.every": 22}  # what --set takes
    run = vitrail.train("digits", out=OUT, epochs=3, lr=2e-3, settings=settings, observer=Told(), device="cpu")
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    print(f"{run.state} at step {run.step}; loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    print(f"open {OUT / 'report.html'}, or:  vitrail predict {OUT} PICTURE")


if __name__ == "__main__":
    main()
