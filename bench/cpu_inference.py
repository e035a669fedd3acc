"""Inference on a CPU: vitrail next to timm, each eager, compiled, and in ONNX Runtime, with the same weights.

    python -m bench.cpu_inference                                   # ViT-Ti/16, S/16 and B/16
    python -m bench.cpu_inference --models vit_b_16 --batches 1 8 --threads 4 --turns 20

Each runner has its own process, so that no thread pool spins while another one works. The processes take turns; a turn
is a few batches, the first of which does not count. A ratio is the runner's median time divided by that of timm
compiled, and by that of timm in ONNX Runtime: below 1, the runner is faster. Weights are random and imported from timm;
images are crops of the bundled one. The ONNX files are vitrail's own export, which `vitrail predict` and `vitrail
serve` run instead of weights, and torch's export of timm's network. Like vitrail's commands, runners keep freed memory.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.inference import TIMM, own_network, pictures, timm_network, write_weights
from vitrail.checkpoint.onnx_network import OnnxSession
from vitrail.core.processes import keep_freed_memory
from vitrail.export.torch_export import silence_exporter

RUNNERS = ("vitrail", "vitrail compiled", "vitrail onnx", "timm", "timm compiled", "timm onnx")
PEERS = ("timm compiled", "timm onnx")
SIDE = 224
Runner = Callable[[Tensor], Any]


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_ti_16", "vit_s_16", "vit_b_16"], choices=TIMM)
    parser.add_argument("--runners", nargs="+", default=list(RUNNERS), choices=RUNNERS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of each process")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of a turn")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    return parser.parse_args(words)


def build_runner(name: str, model: str, folder: Path, threads: int) -> Runner:
    library, _, how = name.partition(" ")
    if how == "onnx":
        return OnnxSession(folder / f"{library}.onnx", threads=threads)
    network = (
        own_network(model, folder / f"{model}.safetensors", SIDE) if library == "vitrail" else timm_network(model, SIDE)
    )
    return torch.compile(network) if how == "compiled" else network


def export_files(model: str, folder: Path) -> None:
    """Both networks as ONNX files, for 224 px and any batch."""
    from vitrail import export

    network = own_network(model, folder / f"{model}.safetensors", SIDE)
    export.to_onnx(network, folder / "vitrail.onnx", export.OnnxOptions(fixed_size=True))
    other, images = timm_network(model, SIDE).eval(), pictures(2, SIDE)
    shapes: Any = {"x": {0: torch.export.Dim.DYNAMIC}}
    with silence_exporter():
        torch.onnx.export(
            other, (images,), str(folder / "timm.onnx"), dynamo=True, dynamic_shapes=shapes, verbose=False
        )


def serve_turns(pipe: Connection, name: str, model: str, folder: Path, threads: int) -> None:
    """In a process of its own: (batch, seconds) in, seconds of each batch and the largest output out."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    runner = build_runner(name, model, folder, threads)
    while (order := pipe.recv()) is not None:
        batch, seconds = order
        images = pictures(batch, SIDE).contiguous()
        with torch.inference_mode():
            output = runner(images)
            times: list[float] = []
            start = time.perf_counter()
            while len(times) < 2 or time.perf_counter() - start < seconds:
                begun = time.perf_counter()
                runner(images)
                times.append(time.perf_counter() - begun)
        pipe.send((times[1:], output.float().numpy()))


def measure(model: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes: list[Any] = []
    for name in args.runners:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_turns, args=(theirs, name, model, folder, args.threads), daemon=True)
        process.start()
        pipes[name] = ours
        processes.append(process)
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        times: dict[str, list[float]] = {name: [] for name in pipes}
        outputs: dict[str, Any] = {}
        for turn in range(-1, args.turns):  # in the turn before the first, compilers work
            for name in list(pipes) if turn % 2 else list(pipes)[::-1]:
                pipes[name].send((batch, 0.0 if turn < 0 else args.seconds))
                some, outputs[name] = pipes[name].recv()
                times[name] += some if turn >= 0 else []
        largest = abs(outputs["vitrail"]).max() if "vitrail" in outputs else 1.0
        for name in pipes:
            off = abs(outputs[name] - outputs.get("vitrail", outputs[name])).max() / largest
            rows.append({"model": model, "batch": batch, "runner": name, "ms": statistics.median(times[name]) * 1e3})
            rows[-1]["difference"] = float(off)
        report(rows[-len(pipes) :])
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    times = {row["runner"]: row["ms"] for row in rows}
    for row in rows:
        speed = f"{row['batch'] / row['ms'] * 1e3:9.2f} img/s {row['ms']:9.1f} ms"
        ratios = " ".join(f"{row['ms'] / times[peer]:8.3f}" if peer in times else " " * 8 for peer in PEERS)
        print(
            f"{row['model']:10} {row['batch']:4} {row['runner']:17} {speed} {ratios} {row['difference']:9.0e}",
            flush=True,
        )


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    import onnxruntime
    import timm

    versions = f"torch {torch.__version__}, timm {timm.__version__}, onnxruntime {onnxruntime.__version__}"
    print(f"{versions}, {platform.machine()}, {args.threads} threads")
    heads = f"{'speed':>15} {'median':>12} {'compiled':>8} {'onnx':>8} {'difference':>9}"
    print(f"{'network':10} {'batch':>4} {'runner':17} {heads}")
    rows: list[dict[str, Any]] = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_weights(model, folder / f"{model}.safetensors", SIDE)
            if any(runner.endswith("onnx") for runner in args.runners):
                export_files(model, folder)
            rows += measure(model, folder, args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
