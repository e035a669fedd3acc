"""Oxford-IIIT Pets, pet and border against background: EoMT fine-tuned from ViT weights, next to an FPN-ResNet34.

    python bench/pets_segmentation.py --data FOLDER --weights deit_tiny_patch16_224.safetensors --out runs/pets
    python bench/pets_segmentation.py ... --seeds 0 --steps 20 --images 64 --device cpu       # a CPU, a few minutes

FOLDER holds pets_trainval.tar and pets_test.tar: KEY.webp (or .jpg) and KEY.trimap.png, where 1 is the pet, 2 the
background and 3 the border. Every seed is a plain `vitrail finetune --decoder eomt` in its own process, all of
them at once on one GPU. The other network, trained at the same time, is FPN-ResNet34 of segmentation_models_pytorch,
where that is installed, with the settings of its own example (Adam at 2e-4, cosine decay, Dice loss, batch 32, images
at 256 px) and flips; its encoder starts from random values, since public weights would have to be downloaded. Both are
scored alike: the IoU of the pet over all pixels of the test images, at the size of the files. Writes results.json.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import vitrail

SPLITS = {"train": "pets_trainval.tar", "test": "pets_test.tar"}
BACKGROUND = 2  # of a trimap; the pet is 1, the border 3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "pets"
    write_masks(args.data, folder, args.images)
    results: dict[str, Any] = {"torch": torch.__version__, "device": name_device(args.device), "eomt": [], "fpn": []}

    def record(kind: str, name: str, row: dict[str, Any]) -> None:
        print(f"{name}: IoU {row['iou']:.4f} after {row['seconds']:.0f} s", flush=True)
        results[kind].append(row)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))

    with ProcessPoolExecutor(len(args.seeds), get_context("spawn")) as pool:
        trained = [pool.submit(train_and_score, args, folder, seed) for seed in args.seeds]
        with contextlib.suppress(ImportError):
            for epochs in args.fpn_epochs:
                record("fpn", f"FPN-ResNet34, {epochs} epochs", train_fpn(args, folder, epochs))
        for future in as_completed(trained):
            row = future.result()
            record("eomt", f"EoMT, seed {row['seed']}", row)
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with the two tar files")
    parser.add_argument("--weights", required=True, help="a ViT: a file, or NAME:TAG")
    parser.add_argument("--out", type=Path, required=True, help="where masks, runs and results go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=0, help="steps of fine-tuning; 0 for the recipe's own")
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the runs")
    parser.add_argument("--fpn-epochs", type=int, nargs="*", default=[10, 30])
    parser.add_argument("--images", type=int, default=0, help="images of each split; 0 for all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(words)


def name_device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def write_masks(data: Path, folder: Path, most: int) -> None:
    """Images and class-index masks, 0 background and 1 pet with its border."""
    if (folder / "classes.txt").exists():
        return
    for split, name in SPLITS.items():
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
        with tarfile.open(data / name) as tar:
            members = {member.name: member for member in tar.getmembers()}
            keys = sorted(key.removesuffix(".trimap.png") for key in members if key.endswith(".trimap.png"))
            for key in keys[:: max(len(keys) // most, 1)][:most] if most else keys:
                suffix = next(end for end in (".webp", ".jpg") if key + end in members)
                content = tar.extractfile(members[key + suffix])
                trimap = tar.extractfile(members[f"{key}.trimap.png"])
                assert content is not None
                assert trimap is not None
                (folder / split / "images" / f"{key}{suffix}").write_bytes(content.read())
                mask = np.asarray(Image.open(io.BytesIO(trimap.read()))) != BACKGROUND
                Image.fromarray(mask.astype(np.uint8)).save(folder / split / "masks" / f"{key}.png")
    (folder / "classes.txt").write_text("background\npet\n")


def train_and_score(args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    row = train_seed(args, folder, seed)
    return {**row, "iou": round(score_run(args, Path(row["run"]), folder), 5)}


def train_seed(args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """One run, and how long its command took from start to end."""
    out = args.out / f"eomt-{seed}"
    command = [sys.executable, "-m", "vitrail", "finetune", args.weights, str(folder), "--out", str(out)]
    command += ["--decoder", "eomt", "--image-size", str(args.image_size), "--device", args.device]
    command += ["--set", f"seed={seed}"]
    for setting in [*([f"steps={args.steps}"] if args.steps else []), *args.set]:
        command += ["--set", setting]
    begun = time.perf_counter()
    with (args.out / f"eomt-{seed}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return {"seed": seed, "run": str(out), "seconds": round(time.perf_counter() - begun, 1)}


def list_pairs(folder: Path, split: str) -> list[tuple[Path, Path]]:
    images = sorted((folder / split / "images").iterdir())
    return [(path, folder / split / "masks" / f"{path.stem}.png") for path in images]


def score_run(args: argparse.Namespace, run: Path, folder: Path) -> float:
    """The IoU of the pet over all test images."""
    predictor: vitrail.Predictor[Any] = vitrail.Predictor(run, device=args.device, batch=64)
    pairs = list_pairs(folder, "test")
    both = either = 0
    for (_, mask), found in zip(pairs, predictor.stream([image for image, _ in pairs]), strict=True):
        truth = np.asarray(Image.open(mask)) == 1
        said = found.mask == 1
        both, either = both + int((truth & said).sum()), either + int((truth | said).sum())
    return both / either


def read_tensors(folder: Path, split: str, device: str) -> tuple[Tensor, Tensor]:
    """All images [N, 3, H, W] and masks [N, 1, H, W] of a split, as bytes."""
    pixels: list[NDArray[np.uint8]] = []
    masks: list[NDArray[np.uint8]] = []
    for image, mask in list_pairs(folder, split):
        pixels.append(np.asarray(Image.open(image).convert("RGB")).transpose(2, 0, 1))
        masks.append(np.asarray(Image.open(mask))[None])
    return torch.from_numpy(np.stack(pixels)).to(device), torch.from_numpy(np.stack(masks)).to(device)


def train_fpn(args: argparse.Namespace, folder: Path, epochs: int, batch: int = 32) -> dict[str, Any]:
    """FPN-ResNet34 from random values, on the same images."""
    import segmentation_models_pytorch as smp

    torch.manual_seed(0)
    device = args.device
    pixels, masks = read_tensors(folder, "train", device)
    network: Any = smp.FPN("resnet34", encoder_weights=None, in_channels=3, classes=1).to(device)
    loss: Any = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-4)
    steps = epochs * (len(pixels) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=steps, eta_min=1e-5)
    begun = time.perf_counter()
    for step in range(steps):
        if step % (len(pixels) // batch) == 0:
            order = torch.randperm(len(pixels), device=device)
        at = step % (len(pixels) // batch) * batch
        chosen = order[at : at + batch]
        flip = torch.rand(batch, device=device)[:, None, None, None] < 0.5
        images, truth = prepare(pixels[chosen]), F.interpolate(masks[chosen].float(), (256, 256))
        images, truth = torch.where(flip, images.flip(-1), images), torch.where(flip, truth.flip(-1), truth)
        with torch.autocast(device, torch.bfloat16):
            logits = network(images)
        value = loss(logits.float(), truth)
        optimiser.zero_grad(set_to_none=True)
        value.backward()
        optimiser.step()
        schedule.step()
    seconds = time.perf_counter() - begun if device == "cpu" else synchronise(begun)
    network.eval()
    pixels, masks = read_tensors(folder, "test", device)
    both = either = 0
    with torch.inference_mode():
        for some, truth in zip(pixels.split(64), masks.split(64), strict=True):
            said = F.interpolate(network(prepare(some)), some.shape[-2:], mode="bilinear") > 0
            both += int((said & (truth == 1)).sum())
            either += int((said | (truth == 1)).sum())
    return {"epochs": epochs, "encoder": "random", "iou": round(both / either, 5), "seconds": round(seconds, 1)}


def synchronise(begun: float) -> float:
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def prepare(pixels: Tensor) -> Tensor:
    """Bytes to normalised images of 256 x 256 pixels."""
    mean, std = (torch.tensor(values, device=pixels.device).view(-1, 1, 1) for values in (MEAN, STD))
    return (F.interpolate(pixels.float(), (256, 256), mode="bilinear", antialias=True) / 255 - mean) / std


if __name__ == "__main__":
    raise SystemExit(main())
