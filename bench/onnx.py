"""Inference speed of ONNX Runtime compared with torch, in float32 and int8, in one run.

    python -m bench.onnx                                     # ViT-Ti/16, ViT-S/16 and BiT-R50x1, batches 1 and 16
    python -m bench.onnx --models vit_b_16 --batches 1 8 --threads 4 --seconds 20

Run it as a module: by its path, it would shadow the library of the same name.

Each network gets random weights from one seed and is exported and checked by `vitrail.export`. Then the network in
torch, the float file and the int8 file alternate batch by batch, with the same number of threads, so that other load on
the machine affects all of them. A ratio above 1 means that the runtime is faster than torch. The images are crops of
the bundled one; int8 is calibrated on such crops, too, because its speed does not depend on them.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image
from torch import Tensor

import vitrail
from vitrail import export
from vitrail.data.dataset import ArrayDataset
from vitrail.export.onnx_file import OnnxSession

DEFAULT = ("vit_ti_16", "vit_s_16", "bit_r50x1")


def crops(count: int, size: int) -> Any:
    """uint8 [N, H, W, 3]."""
    with resources.files("vitrail").joinpath("assets", "window.png").open("rb") as file:
        whole = np.asarray(Image.open(file).convert("RGB"))
    room = min(whole.shape[:2]) - size
    return np.stack([whole[7 * i % room :, 11 * i % room :][:size, :size] for i in range(count)])


def network(name: str) -> Any:
    torch.manual_seed(0)
    model = vitrail.create_model(name)
    torch.nn.init.normal_(model.get_classifier().weight, std=0.02)  # a fresh head is zero
    return model.eval()


def runners(model: Any, folder: Path, threads: int) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, int]]:
    """The three that take turns, and how large their files are."""
    size = model.config.image[0]
    pictures = export.ExportImages(source=ArrayDataset(crops(16, size)))
    plain = export.to_onnx(model, folder / "float.onnx", export.OnnxOptions(fixed_size=True))
    small = export.to_onnx(
        model,
        folder / "int8.onnx",
        export.OnnxOptions(fixed_size=True, int8=True, least_agreement=0),
        scoring_images=pictures,
    )
    sessions = {
        "onnxruntime": OnnxSession(plain.target, threads=threads),
        "onnxruntime int8": OnnxSession(small.target, threads=threads),
    }
    print(f"    float32 {plain.report.worst:.1e} off the network", flush=True)
    return {"torch": model, **sessions}, {"float32": plain.bytes, "int8": small.bytes}


@torch.inference_mode()
def timed(which: dict[str, Callable[[Tensor], Tensor]], images: Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds a batch, in turns; every second round goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in which}
    for run in which.values():
        run(images)
    start, done = time.perf_counter(), 0
    while done < args.rounds or time.perf_counter() - start < args.seconds:
        for name in list(which) if done % 2 else list(which)[::-1]:
            begun = time.perf_counter()
            which[name](images)
            times[name].append(time.perf_counter() - begun)
        done += 1
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=0, help="threads for each of them (default: as torch)")
    parser.add_argument("--rounds", type=int, default=5, help="minimum number of batches for each")
    parser.add_argument("--seconds", type=float, default=20, help="minimum time per network and batch size")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, {platform.machine()}, {threads} threads")
    heads = f"{'torch img/s':>12} {'ort img/s':>10} {'ratio':>6} {'int8 img/s':>11} {'ratio':>6}"
    print(f"{'network':12} {'batch':>5} {heads}")
    results: list[dict[str, Any]] = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            model = network(name)
            which, sizes = runners(model, Path(folder), threads)
            for batch in args.batches:
                pixels = torch.from_numpy(crops(batch, model.config.image[0])).permute(0, 3, 1, 2)
                images = model.card.preprocessing.normalise(pixels).contiguous()
                took = timed(which, images, args)
                rate = {runner: batch / seconds for runner, seconds in took.items()}
                plain, small = (rate[runner] / rate["torch"] for runner in ("onnxruntime", "onnxruntime int8"))
                print(f"{name:12} {batch:5} {rate['torch']:12.2f} {rate['onnxruntime']:10.2f} {plain:6.2f} ", end="")
                print(f"{rate['onnxruntime int8']:11.2f} {small:6.2f}", flush=True)
                results.append({"network": name, "batch": batch, "images/s": rate, "bytes": sizes})
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
