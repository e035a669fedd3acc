"""The same training in several precisions: final loss, test accuracy and images per second, seed by seed.

    python -m bench.precisions --data pets:FOLDER                            # ViT-S/16, 2,000 steps, three seeds
    python -m bench.precisions --data pets:FOLDER --recipe cifar10 --model ViT-L/16 --steps 300 --seeds 0
    python -m bench.precisions --smoke --out /tmp/precisions                 # a CPU, a minute

A seed has the same initial weights, images and augmentation in every precision. The loss is the mean over the last
tenth of the steps. Every training is a plain `vitrail pretrain` in its own process, --at-once of them at a time on one
GPU, so images per second are comparable only with --at-once 1; running the same command again resumes them. Writes
results.json and table.md next to the runs.
"""

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.flexible_patches import pretrain
from vitrail.distributed.process_group import join_world, name_device


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One training, and what came of it."""

    precision: str
    seed: int
    loss: float = 0.0
    accuracy: float | None = None
    images_per_s: float = 0.0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="plain-vit-s16-90ep")
    parser.add_argument("--data", default="", help="a source; by default the recipe's own")
    parser.add_argument("--model", default="", help="a network by name; by default the recipe's")
    parser.add_argument("--precisions", nargs="+", default=["bfloat16", "fp8"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=0, help="trainings at a time; 0 for all")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every run")
    parser.add_argument("--out", type=Path, default=Path("runs/precisions"))
    parser.add_argument("--smoke", action="store_true", help="bundled digits, a tiny network, a few steps")
    args = parser.parse_args(words)
    if args.smoke:
        args.recipe, args.data, args.precisions, args.seeds = "digits", "", ["float32", "bfloat16"], [0]
        args.steps, args.batch, args.at_once = 20, 32, 1
        args.set = ["data.workers=0", *args.set]
    return args


def train(args: argparse.Namespace, run: Outcome) -> str:
    """Trains, or finds the run done; what went wrong, if anything."""
    settings = [f"steps={args.steps}", f"batch={args.batch}", f"precision={run.precision}"]
    settings += [f"schedule.warmup={args.steps // 10}", f"log={max(args.steps // 100, 1)}"]
    settings += [*([f"model={args.model}"] if args.model else []), *args.set]
    rows, error = pretrain(args.recipe, args.data, args.out / f"{run.precision}-seed{run.seed}", run.seed, settings)
    if error:
        return error
    steps = [row for row in rows if row["kind"] == "train"]
    run.loss = statistics.mean(row["loss"] for row in steps if row["step"] > 0.9 * args.steps)
    run.images_per_s = statistics.median(row["images_per_s"] for row in steps[len(steps) // 2 :])
    scored = [row for row in rows if row["kind"] in ("test", "watch")]
    run.accuracy = scored[-1]["accuracy"] if scored else None
    print(f"{run.precision}, seed {run.seed}: loss {run.loss:.4f}, accuracy {run.accuracy or 0:.2%}", flush=True)
    return ""


def make_table(runs: list[Outcome]) -> str:
    lines = ["| precision | loss at the end | test accuracy | images a second |", "|---|---|---|---|"]
    for name in dict.fromkeys(run.precision for run in runs):
        some = [run for run in runs if run.precision == name]
        cells = [f"{statistics.mean(values):.{digits}f}{spread(values, digits)}" for values, digits in columns(some)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def columns(runs: list[Outcome]) -> list[tuple[list[float], int]]:
    scores = [100 * (run.accuracy or 0) for run in runs]
    return [([run.loss for run in runs], 4), (scores, 2), ([run.images_per_s for run in runs], 0)]


def spread(values: list[float], digits: int) -> str:
    return f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [Outcome(precision=name, seed=seed) for seed in args.seeds for name in args.precisions]
    with ThreadPoolExecutor(args.at_once or len(runs)) as pool:
        errors = [text for text in pool.map(lambda run: train(args, run), runs) if text]
    done = [run for run in runs if run.images_per_s]
    with join_world() as world:
        device = name_device(world.device)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    body = {"device": device, "settings": settings, "runs": [asdict(run) for run in done], "errors": errors}
    (args.out / "results.json").write_text(json.dumps(body, indent=1) + "\n")
    table = make_table(sorted(done, key=lambda run: args.precisions.index(run.precision)))
    (args.out / "table.md").write_text(table)
    print(table)
    print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
