"""Training from Python: `vitrail.train` runs a recipe and returns a summary; the run folder has everything else.

    python examples/train_from_python.py

Trains a tiny ViT for three epochs on the bundled digits, in runs/from-python. If you call it again, it finds the run
complete. If it was killed halfway, it resumes from the last checkpoint and ends with exactly the same weights.
"""

from pathlib import Path
from typing import Any

import vitrail

OUT = Path("runs/from-python")


class Printer:
    """Prints what the run reports. Without an `observer`, training is silent."""

    def log(self, text: str) -> None:
        print(text)

    def progress(self, row: dict[str, Any]) -> None:
        if row["kind"] == "watch":
            print(f"step {row['step']}: {row['accuracy']:.1%} of {row['count']} held-out digits right")


def main() -> None:
    settings = {"schedule.warmup": 10, "evaluation.every": 22}  # the same names as for --set
    run = vitrail.train("digits", out=OUT, epochs=3, lr=2e-3, settings=settings, observer=Printer(), device="cpu")
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    print(f"{run.state} at step {run.step}; loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
    print(f"open {OUT / 'report.html'}, or:  vitrail predict {OUT} IMAGE")


if __name__ == "__main__":
    main()
