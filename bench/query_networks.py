"""EoMT compared with transformers' own: the same weights, alternating in one process, inference and complete steps.

    python -m bench.query_networks                                # S, B and L at 640 px, patch 16, 200 queries
    python -m bench.query_networks --sizes S --inference-batch 8 --train-batch 8
    python -m bench.query_networks --device cpu --sizes tiny --image-size 64 --turns 1 --steps 1 --compile off

Both are DINOv2-type ViTs with four registers and four query blocks, compiled. Inference runs annealed networks, in
bfloat16 without gradients. A step is forward, matching and loss at every query block, backward and fused AdamW in
bfloat16 (autocast for both), on images of about ten segments each that are on the device; masked attention is on, as
at the start of training. `difference` is the largest relative difference between the two networks' masks, in float32
and uncompiled. transformers matches on the host, with scipy.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from bench.turns import add_lock, take_turn
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.segment_targets import pack_masks
from vitrail.data.targets import TargetSegments
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.parallel import Parallel, parallelise
from vitrail.distributed.process_group import World
from vitrail.objectives.objective import Objective, ObjectiveContext
from vitrail.tasks.mask_queries.objective import PanopticQueries

SIZES = {"tiny": (48, 4, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16)}  # width, depth, heads
CLASSES, QUERIES, SEGMENTS = 133, 200, 10


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "B", "L"], choices=SIZES)
    parser.add_argument("--image-size", type=int, default=640)
    parser.add_argument("--inference-batch", type=int, default=32)
    parser.add_argument("--train-batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps per turn")
    parser.add_argument("--only", choices=("inference", "training"))
    parser.add_argument("--profile", action="store_true", help="also print the slowest kernels of one call")
    parser.add_argument("--compile", default="default", help="a mode of torch.compile, or off")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_lock(parser)
    parser.add_argument("--out", type=Path, help="also write the numbers to this file, as JSON")
    return parser.parse_args(words)


def build_pair(size: str, args: argparse.Namespace) -> tuple[Any, Any]:
    """transformers' network with drawn weights, and ours with the same."""
    from transformers import EomtConfig, EomtForUniversalSegmentation

    width, depth, heads = SIZES[size]
    torch.manual_seed(0)
    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    config = EomtConfig(**shape, image_size=args.image_size, num_queries=QUERIES, num_labels=CLASSES, num_blocks=4)
    theirs = EomtForUniversalSegmentation(config)
    theirs.attn_mask_probs.zero_()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = vitrail.load(folder)
    return theirs.eval(), ours.eval()


def compare_masks(theirs: Any, ours: Any, args: argparse.Namespace) -> float:
    images = torch.randn(1, 3, args.image_size, args.image_size)
    with torch.inference_mode():
        a, b = theirs(pixel_values=images).masks_queries_logits, ours(images).masks
    return float((a - b).abs().max() / a.abs().max())


def compile_with(part: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return part if mode == "off" else torch.compile(part, dynamic=False, mode=mode)


def time_in_turns(runners: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of each; the first to go changes every turn."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values():
        run()
    with take_turn(args.lock):
        for run in runners.values():
            for _ in range(3):
                run()
        for turn in range(args.turns):
            for name in list(runners) if turn % 2 else list(runners)[::-1]:
                wait(args.device)
                begun = time.perf_counter()
                for _ in range(args.steps):
                    runners[name]()
                wait(args.device)
                times[name].append((time.perf_counter() - begun) * 1e3 / args.steps)
        if args.profile and args.device == "cuda":
            for name, run in runners.items():
                print_kernels(name, run)
    return {name: statistics.median(some) for name, some in times.items()}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_inference(theirs: nn.Module, ours: nn.Module, args: argparse.Namespace) -> dict[str, float]:
    kind = torch.bfloat16 if args.device == "cuda" else torch.float32
    images = torch.randn(args.inference_batch, 3, args.image_size, args.image_size, device=args.device, dtype=kind)
    networks = {"transformers": theirs, "vitrail": ours}
    runners: dict[str, Callable[[], Any]] = {}
    for name, network in networks.items():
        compiled = compile_with(network.to(args.device, kind), args.compile)

        def run(compiled: Callable[[Tensor], Any] = compiled) -> Any:
            with torch.inference_mode():
                return compiled(images)

        runners[name] = run
    return time_in_turns(runners, args)


def print_kernels(name: str, run: Callable[[], Any], most: int = 20) -> None:
    """Milliseconds by kernel, of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
    print(f"{name}: {sum(row.self_device_time_total for row in rows) / 1e3:.1f} ms")
    for row in rows[:most]:
        print(f"  {row.self_device_time_total / 1e3:8.3f} ms {row.count:5} x {row.key[:60]}")


def draw_batch(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes [B, 3, H, W], masks of rectangles [B, N, H, W] and their classes [B, N]."""
    draw = torch.Generator().manual_seed(1)
    count, side = args.train_batch, args.image_size
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draw)
    masks = torch.zeros(count, SEGMENTS, side, side, dtype=torch.bool)
    corners = (torch.rand(count, SEGMENTS, 2, generator=draw) * side * 0.7).int().tolist()
    for image, row in enumerate(corners):
        for at, (top, left) in enumerate(row):
            masks[image, at, top : top + side // 4, left : left + side // 3] = True
    classes = torch.randint(0, CLASSES, (count, SEGMENTS), generator=draw)
    return pixels.to(args.device), masks.to(args.device), classes.to(args.device)


def measure_training(theirs: Any, ours: Any, args: argparse.Namespace) -> dict[str, float]:
    pixels, masks, classes = draw_batch(args)
    images = Preprocessing(image=(args.image_size, args.image_size)).normalise(pixels)
    theirs = theirs.float().to(args.device).train()
    theirs.attn_mask_probs.fill_(1.0)
    compiled = compile_with(theirs, args.compile)
    optimiser = torch.optim.AdamW(theirs.parameters(), lr=1e-5, fused=args.device == "cuda")
    labels, targets = list(classes), list(masks.float())

    def step_theirs() -> Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = compiled(pixel_values=images, mask_labels=targets, class_labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    step_ours = make_own_step(ours.float().train(), pixels, masks, classes, args)
    return time_in_turns({"transformers": step_theirs, "vitrail": step_ours}, args)


def make_own_step(
    network: Any, pixels: Tensor, masks: Tensor, classes: Tensor, args: argparse.Namespace
) -> Callable[[], Tensor]:
    """A step of the package's objective, with torch's optimiser as the other has it."""
    count, device = len(pixels), torch.device(args.device)
    places = -(-SEGMENTS // 8) * 8
    padded = torch.cat([masks, masks.new_zeros(count, places - SEGMENTS, *masks.shape[2:])], 1)
    numbers = torch.cat([classes, classes.new_full((count, places - SEGMENTS), -1)], 1)
    segments = TargetSegments(pack_masks(padded), numbers, torch.zeros_like(numbers, dtype=torch.bool))
    samples = torch.arange(count, device=device)
    there = torch.ones(count, dtype=torch.bool, device=device)
    batch = Batch(step=0, views=(pixels,), targets=(segments,), sample=samples, epoch=samples * 0, valid=there)
    preprocessing = Preprocessing(image=(args.image_size, args.image_size))
    context = ObjectiveContext(CLASSES, preprocessing, Mix(), 1000, World(device=device))
    objective: Objective = PanopticQueries().build(network, context)
    precision = "autocast" if args.device == "cuda" else "float32"
    parallel: Parallel = parallelise(
        objective, world=World(device=device), precision=precision, compile=args.compile != "off"
    )
    optimiser = torch.optim.AdamW(objective.parameters(), lr=1e-5, fused=args.device == "cuda")

    def step() -> Tensor:
        inputs = objective.inputs(batch, seed=0, step=0)
        sums = objective.normalisers(inputs)
        if sums is not None:
            inputs = (*inputs, sums.expand(count, -1))
        output = parallel(*inputs)
        (output.total / output.count).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return output.total.detach()

    return step


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    import transformers

    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}, {args.image_size} px")
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        for kind, measure, batch in (
            ("inference", measure_inference, args.inference_batch),
            ("training", measure_training, args.train_batch),
        ):
            if args.only not in (None, kind):
                continue
            torch.compiler.reset()
            theirs, ours = build_pair(size, args)
            difference = compare_masks(theirs, ours, args)
            found = measure(theirs, ours, args)
            ratio = found["transformers"] / found["vitrail"]
            speeds = {name: batch / ms * 1e3 for name, ms in found.items()}
            rows.append({"size": size, "kind": kind, "batch": batch, "ms": found, "ratio": ratio})
            numbers = f"vitrail {speeds['vitrail']:8,.1f} img/s, transformers {speeds['transformers']:8,.1f} img/s"
            print(
                f"{size:5} {kind:9} batch {batch:3}: {numbers}, ratio {ratio:.2f}; difference {difference:.0e}",
                flush=True,
            )
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
