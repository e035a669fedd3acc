"""Inference speed and memory compared with the same network in timm: the ratio of medians in one run.

    python -m bench.inference                       # ViT-Ti/16, S/16, B/16, B/32, R50+ViT-B/16 and BiT-R50x1, batch 8
    python -m bench.inference --models vit_b_16 --batch 1 --rounds 30
    python -m bench.inference --device cuda --dtype bfloat16 --batch 256 --compile
    python -m bench.inference --models vit_b_16 --device cuda --dtype bfloat16 --batch 1 --graphs
    python -m bench.inference --models vit_b_16 --image-size 384 --device cuda --dtype bfloat16 --batch 128 --compile
    python -m bench.inference --models vit_b_16 --device cuda --dtype bfloat16 --batch 512 --compile --fp8
    python -m bench.inference --models dinov2_reg_b_14 dinov3_l_16 --device cuda --dtype bfloat16 --batch 256 --compile

Both networks have the same weights (imported from timm) and process the same images (crops of the bundled one),
alternating batch by batch, so that other load on the machine affects both. Memory is the increase in peak memory of a
fresh process that only builds one network and runs one batch. With --fp8, the products of vitrail's layers run in
fp8, those of timm's do not, and memory is measured in the type given. With --graphs, both are compiled and run as CUDA
graphs (mode="reduce-overhead"), and vitrail's network is timed once more as `Predictor` runs it: recorded, not
compiled.
A ratio below 1 means that vitrail is faster or smaller.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from bench.turns import add_lock, take_turn

TIMM = {
    "vit_ti_16": "vit_tiny_patch16_224",
    "vit_s_16": "vit_small_patch16_224",
    "vit_b_16": "vit_base_patch16_224",
    "vit_b_32": "vit_base_patch32_224",
    "vit_l_16": "vit_large_patch16_224",
    "vit_h_14": "vit_huge_patch14_224",
    "r50_vit_b_16": "vit_base_r50_s16_224",
    "bit_r50x1": "resnetv2_50x1_bit",
    "dinov2_reg_b_14": "vit_base_patch14_reg4_dinov2",
    "dinov3_l_16": "vit_large_patch16_dinov3",
}
SIDES = {"dinov3_l_16": 256}  # pixels of the images, where they are not 224
DEFAULT = ("vit_ti_16", "vit_s_16", "vit_b_16", "vit_b_32", "r50_vit_b_16", "bit_r50x1")


def pictures(batch: int, side: int) -> Tensor:
    """A batch of real crops: [B, 3, side, side] in [-1, 1]."""
    from torchvision.transforms.v2 import functional as F

    with resources.files("vitrail").joinpath("assets", "window.png").open("rb") as file:
        whole = F.pil_to_tensor(Image.open(file).convert("RGB")).float() / 127.5 - 1
    if side + 200 > whole.shape[1]:
        whole = F.resize(whole, [side + 200, side + 200])
    crops = [whole[:, 7 * i % 200 :, 11 * i % 200 :][:, :side, :side] for i in range(batch)]
    return torch.stack([crop.flip(-1) if i % 2 else crop for i, crop in enumerate(crops)])


def timm_network(name: str, side: int) -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    args = {} if name.startswith("bit") else {"img_size": side}
    return timm.create_model(TIMM[name], num_classes=1000, **args).eval()


def own_network(name: str, file: Path, side: int) -> torch.nn.Module:
    import vitrail

    facts = {"image": (side, side)} if name in SIDES else {}  # of files that do not tell
    return vitrail.load(file, **facts).eval()


def write_weights(name: str, file: Path, side: int) -> None:
    from safetensors.torch import save_file

    save_file(timm_network(name, side).state_dict(), file)


def find_side(name: str, args: argparse.Namespace) -> int:
    """Pixels of a side of the images."""
    return args.image_size or SIDES.get(name, 224)


def timed(model: Any, images: Tensor) -> float:
    if images.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def speed(name: str, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over several pairs of networks, each built again: where a tensor happens to lie in memory moves single
    pairs by several per cent either way."""
    dtype = getattr(torch, args.dtype)
    images = pictures(args.batch, find_side(name, args)).to(args.device, dtype)
    times: dict[str, list[float]] = {way: [] for way in ("vitrail", "timm", *["recorded"] * args.graphs)}
    difference = 0.0
    for pair in range(args.pairs):
        networks = pair_of(name, file, args, first="vitrail" if pair % 2 else "timm")
        with torch.inference_mode():
            outputs = {library: network(images).clone() for library, network in networks.items()}
            with take_turn(args.lock):
                for _ in range(args.warmup):
                    for network in networks.values():
                        network(images)
                start, done = time.perf_counter(), 0
                while done < args.rounds or time.perf_counter() - start < args.seconds:
                    for library in list(networks) if done % 2 else list(networks)[::-1]:
                        times[library].append(timed(networks[library], images))
                    done += 1
        worst = (outputs["vitrail"] - outputs["timm"]).abs().max() / outputs["timm"].abs().max()
        difference = max(difference, float(worst))
    median = {library: statistics.median(values) for library, values in times.items()}
    return {
        "images/s": {library: args.batch / value for library, value in median.items()},
        "ratio": median["vitrail"] / median["timm"],
        "difference": difference,
    }


def pair_of(name: str, file: Path, args: argparse.Namespace, first: str) -> dict[str, Any]:
    """Both networks, in the order in which they are to be built."""
    networks: dict[str, Any] = {}
    for library in (first, "timm" if first == "vitrail" else "vitrail"):
        side = find_side(name, args)
        network = own_network(name, file, side) if library == "vitrail" else timm_network(name, side)
        network.to(args.device, getattr(torch, args.dtype))
        network.float8 = args.fp8 and library == "vitrail"
        networks[library] = network
    recorded = {"recorded": record(networks["vitrail"], args.device)} if args.graphs else {}
    if args.compile or args.graphs:
        mode = "reduce-overhead" if args.graphs else None
        networks = {library: torch.compile(network, mode=mode) for library, network in networks.items()}
    return networks | recorded


def record(network: torch.nn.Module, device: str) -> Any:
    """As predictors run it on few images."""
    from vitrail.predict.recordings import RecordedCalls

    calls = RecordedCalls(network, torch.device(device))
    return lambda images: calls.run("outputs", network, images, torch.clone)


def memory(name: str, file: Path, args: argparse.Namespace) -> dict[str, int]:
    """Peak memory in bytes that each network adds, each in a process of its own."""
    out: dict[str, int] = {}
    for library in ("vitrail", "timm"):
        command = [sys.executable, "-m", "bench.inference", "--child", library]
        command += ["--models", name, "--weights", str(file)]
        command += ["--batch", str(args.batch), "--device", args.device, "--dtype", args.dtype]
        command += [] if args.image_size is None else ["--image-size", str(args.image_size)]
        out[library] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return out


def child(args: argparse.Namespace) -> None:
    """Prints what building one network from the file and running one batch adds to the peak."""
    import timm

    import vitrail

    (name,), file = args.models, Path(args.weights)
    dtype = getattr(torch, args.dtype)
    images = pictures(args.batch, find_side(name, args)).to(args.device, dtype)
    nano = file.with_name("nano.safetensors")  # both libraries imported and warm, so that only the network counts
    vitrail.save(vitrail.create_model("vit_nano_4"), nano)
    vitrail.load(nano)(torch.zeros(1, 3, 32, 32))
    timm.create_model("vit_tiny_patch16_224", embed_dim=32, depth=1, num_heads=2)(torch.zeros(1, 3, 224, 224))
    before = peak(args.device)
    if args.child == "vitrail":
        network = own_network(name, file, find_side(name, args))
    else:
        network = timm_network(name, find_side(name, args))
        from safetensors.torch import load_file

        network.load_state_dict(load_file(file))
    network.to(args.device, dtype)
    with torch.inference_mode():
        network(images)
    print(peak(args.device) - before)


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # rusage carries the parent's peak across exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT), choices=TIMM)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, help="pixels of a side (default: 224, or the weights' own)")
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs of networks, each newly built")
    parser.add_argument("--rounds", type=int, default=5, help="minimum number of batches per network of a pair")
    parser.add_argument("--seconds", type=float, default=6, help="minimum time per pair")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="compile to CUDA graphs; also record uncompiled")
    parser.add_argument("--fp8", action="store_true", help="run the products of vitrail's layers in fp8, on a GPU")
    add_lock(parser)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    import timm

    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, timm {timm.__version__}, {machine}, ", end="")
    compiled = ", compiled to CUDA graphs" if args.graphs else ", compiled" if args.compile else ""
    print(
        f"{args.device} {args.dtype}, batch {args.batch}, {args.pairs} pairs of at least {args.rounds} rounds{compiled}"
    )
    rates = f"{'vitrail img/s':>14} {'timm img/s':>12}"
    print(f"{'network':14} {rates} {'time ratio':>11} {'memory ratio':>13} {'difference':>11}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            file = Path(folder) / f"{name}.safetensors"
            write_weights(name, file, find_side(name, args))
            added = memory(name, file, args)  # before the turn, so that it disturbs no other benchmark's
            row = speed(name, file, args) | {"memory": added}
            row["memory ratio"] = row["memory"]["vitrail"] / max(row["memory"]["timm"], 1)
            rate = row["images/s"]
            print(f"{name:14} {rate['vitrail']:14.2f} {rate['timm']:12.2f} {row['ratio']:11.3f} ", end="")
            print(f"{row['memory ratio']:13.3f} {row['difference']:11.1e}", flush=True)
            if args.graphs:
                ratio = rate["timm"] / rate["recorded"]
                print(f"{'  recorded':14} {rate['recorded']:14.2f} {'':12} {ratio:11.3f}", flush=True)
            results[name] = row
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
