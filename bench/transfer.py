"""How resolution affects transfer: `vitrail finetune` at several image sizes, compared with the closed-form classifier.

    python bench/transfer.py --from deit_tiny_patch16_224.safetensors --data PETS --out runs/transfer

PETS is a folder with a train and a test split. Each fine-tuning is the plain command with weights, data, --image-size
and --seed, in its own process; --at-once sets how many run at a time. The closed form is ridge regression on the frozen
features at the same size (positions resized, nothing trained), with the penalty chosen on a tenth of train.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import vitrail
from vitrail.data.collection import open_collection
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.splits import dev_split
from vitrail.evaluation.frozen.features import extract_features
from vitrail.evaluation.frozen.fewshot import PENALTIES, fit_ridge

HELD_OUT = 0.1


def finetuned(args: argparse.Namespace, size: int, seed: int) -> dict[str, float]:
    """The test score of one run."""
    out = args.out / f"{size}px-seed{seed}"
    command = [sys.executable, "-m", "vitrail", "finetune", "--from", str(args.weights), "--data", str(args.data)]
    command += ["--image-size", str(size), "--seed", str(seed), "--out", str(out), *args.more]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{size}px-seed{seed}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    accuracy = next(row["accuracy"] for row in reversed(rows) if row["kind"] == "test")
    print(f"{size} px, seed {seed}: {accuracy:.2%} in {time.monotonic() - begun:.0f} s", flush=True)
    return {"size": size, "seed": seed, "accuracy": accuracy, "seconds": time.monotonic() - begun}


def closed_form(args: argparse.Namespace, size: int) -> float:
    """The test accuracy of ridge regression on frozen features."""
    network = vitrail.load(args.weights, image_size=size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepare = network.card.preprocessing  # type: ignore[union-attr]
    assert isinstance(prepare, Preprocessing)
    network.to(device)
    data = open_collection(args.data)
    found = {
        split: extract_features(
            network, eval_batches(data.split(split), prepare, batch=128, workers=args.workers), prepare, device
        )
        for split in ("train", "test")
    }
    rest, held = (part.indices for part in dev_split(data.split("train"), HELD_OUT))
    x, y = found["train"].features, found["train"].labels
    classes = len(data.classes)
    dev = {penalty: fit_ridge(x[rest], y[rest], classes, penalty).accuracy(x[held], y[held]) for penalty in PENALTIES}
    best = max(dev, key=lambda penalty: dev[penalty])
    accuracy = fit_ridge(x, y, classes, best).accuracy(found["test"].features, found["test"].labels)
    print(f"{size} px, closed form: {accuracy:.2%} (penalty {best:g})", flush=True)
    return accuracy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="weights", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 224, 288])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("more", nargs="*", help="more arguments for vitrail finetune, after --")
    args = parser.parse_args()
    points = [(size, seed) for size in args.sizes for seed in args.seeds]
    with ThreadPoolExecutor(args.at_once) as pool:
        runs = list(pool.map(lambda point: finetuned(args, *point), points))
    frozen = {size: closed_form(args, size) for size in args.sizes}
    print("| image size | fine-tuned, mean ± std | closed form on frozen features |\n|---|---|---|")
    for size in args.sizes:
        scores = [100 * run["accuracy"] for run in runs if run["size"] == size]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(f"| {size} | {statistics.mean(scores):.2f} ± {spread:.2f} | {100 * frozen[size]:.2f} |")
    (args.out / "transfer.json").write_text(json.dumps({"runs": runs, "closed form": frozen}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
