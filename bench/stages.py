"""Training in stages, few tokens first, next to the plain run: accuracy, minutes and exaFLOPs of the same recipe.

    python -m bench.stages --data cifar10:FOLDER --out runs/stages                  # CIFAR-10, 40 epochs, three seeds
    python -m bench.stages --sizes 16,24,32 --patches 8,4 --epochs 100
    python -m bench.stages --smoke --out /tmp/stages                                # a CPU, a minute

Every entry of --sizes and --patches is a run like the plain one, but in these stages, each for an equal share of the
steps. The plain run is also trained with fewer steps (the shares in --fewer), so that it costs about as much as the
stages do. Every training is a plain `vitrail pretrain` in its own process, --at-once of them at a time on one GPU, so
minutes are comparable only within one call; running the same command again resumes them. Writes results.json and
table.md next to the runs.
"""

import argparse
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.flexible_patches import has_sheets, pretrain, read_sheets
from vitrail.distributed.process_group import join_world, name_device


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One training: its stages, and what came of it."""

    name: str
    settings: tuple[str, ...]
    epochs: float
    seed: int
    seconds: float = 0.0
    exaflops: float = 0.0
    accuracy: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])  # step, accuracy


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--data", default="", help="a source, or a folder of sheets; by default the recipe's own")
    parser.add_argument("--out", type=Path, default=Path("runs/stages"))
    parser.add_argument("--sizes", nargs="*", default=["16,24,32", "16,32"], help="comma-separated image sizes")
    parser.add_argument("--patches", nargs="*", default=["8,4"], help="comma-separated patch sizes")
    parser.add_argument("--fewer", type=float, nargs="*", default=[0.6], help="shares of the steps, for plain runs")
    parser.add_argument("--epochs", type=float, default=40)
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=0, help="trainings at a time; 0 for all")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every run")
    parser.add_argument("--smoke", action="store_true", help="bundled digits, a tiny network, a few steps")
    args = parser.parse_args(words)
    if args.smoke:
        args.data, args.sizes, args.patches, args.epochs, args.warmup = "digits", ["16,32"], ["8,4"], 0.2, 1
        args.seeds, args.at_once = [0], 1
        tiny = ["model=ViT-Nano/4", "model.depth=1", "model.width=48", "batch=32", "augmentation.policy=none"]
        args.set = [*tiny, "average=0", "data.workers=0", *args.set]
    return args


def list_runs(args: argparse.Namespace) -> list[Outcome]:
    kinds: list[tuple[str, tuple[str, ...], float]] = [("plain", (), args.epochs)]
    kinds += [(f"plain, {share:.0%} of the steps", (), args.epochs * share) for share in args.fewer]
    kinds += [(f"images of {sizes} px", (f"sizes={sizes}",), args.epochs) for sizes in args.sizes]
    listed = "patch_order=listed"
    kinds += [(f"patches of {patches} px", (f"patches={patches}", listed), args.epochs) for patches in args.patches]
    return [
        Outcome(name=name, settings=settings, epochs=epochs, seed=seed)
        for name, settings, epochs in kinds
        for seed in args.seeds
    ]


def train(args: argparse.Namespace, run: Outcome) -> str:
    """Trains, or finds the run done; what went wrong, if anything."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in run.name)
    out = args.out / f"{slug}-seed{run.seed}"
    settings = [f"schedule.warmup={args.warmup}", f"epochs={run.epochs}", "keep.minutes=2", *args.set, *run.settings]
    rows, error = pretrain(args.recipe, args.data, out, run.seed, settings)
    if error:
        return error
    run.exaflops, hours = next((row["exaflops"], row["device_hours"]) for row in reversed(rows) if "exaflops" in row)
    run.seconds = 3600 * hours  # without what came before the first step
    scored = [row for row in rows if row["kind"] in ("test", "watch")]
    run.accuracy = scored[-1]["accuracy"] if scored else None
    run.curve = [(row["step"], row["accuracy"]) for row in scored]
    print(f"{run.name}, seed {run.seed}: {run.accuracy or 0:.2%}, {run.seconds / 60:.1f} minutes", flush=True)
    return ""


def make_table(runs: list[Outcome]) -> str:
    lines = ["| training | test accuracy | exaFLOPs | minutes |", "|---|---|---|---|"]
    for name in dict.fromkeys(run.name for run in runs):
        some = [run for run in runs if run.name == name]
        scores = [100 * (run.accuracy or 0) for run in some]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        minutes = statistics.mean(run.seconds for run in some) / 60
        lines.append(f"| {name} | {statistics.mean(scores):.2f}{spread} | {some[0].exaflops:.4f} | {minutes:.1f} |")
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    args.data = read_sheets(Path(args.data), args.out) if args.data and has_sheets(Path(args.data)) else args.data
    runs = list_runs(args)
    with ThreadPoolExecutor(args.at_once or len(runs)) as pool:
        errors = [text for text in pool.map(lambda run: train(args, run), runs) if text]
    done = [run for run in runs if run.accuracy is not None]
    with join_world() as world:
        device = name_device(world.device)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    body = {"device": device, "settings": settings, "runs": [asdict(run) for run in done], "errors": errors}
    (args.out / "results.json").write_text(json.dumps(body, indent=1) + "\n")
    table = make_table(done)
    (args.out / "table.md").write_text(table)
    print(table)
    print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
