"""Where the time of a step goes: the least that its products and memory traffic need, and what the kernels took.

    python -m bench.limit                                     # B/16, L/16 and H/14, training and inference, on a GPU
    python -m bench.limit --models L/16 --only training --batch 128 --precision fp8
    python -m bench.limit --device cpu --models Ti/16 --depth 2 --image-size 32 --batch 4 --compile off --side 512

Prints three tables. The machine: its rate for a square bfloat16 product (the ceiling) and its bandwidth, from a copy;
with --precision fp8 also its rate for the same product in fp8, which then counts as the least that products need.
The step, by kind of kernel: operations and bytes, the milliseconds that they need at those two rates, whichever is
longer, and the milliseconds that the kernels of that kind took, from torch's profiler. The products, shape by shape:
the share of the ceiling that each reaches in the forward pass, and for the gradients of its input and its weight.

Operations are those of vitrail's own step, which computes only the class token in the last layer. Bytes are what a
kernel of that kind must read and write once if nothing else is fused into it; a step may need fewer. In training,
attention computes its logits twice, which the least does not count. bench/training.py describes how a step is built.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.training import BATCHES, OPTIM, TIMM, Setting, machine, own_network, pictures, runner, timm_network, wait
from bench.turns import add_lock, take_turn
from vitrail.evaluation.speed import silence_profiler
from vitrail.models.kernels.float8_ops import ACTIVATIONS, multiply
from vitrail.models.vit_config import ViTConfig

PRODUCTS, ATTENTION, NORMS, GELU, QUANTISE, UPDATE, OTHER = (
    "products",
    "attention",
    "norms, sums",
    "GELU",
    "quantise",
    "clip, update",
    "other",
)
# Parts of kernels' names, the first that fits; a product of attention written out is attention only on a GPU.
KINDS: Final = (
    (QUANTISE, ("_scale_kernel", "_round_kernel", "_round_turned_kernel", "_turn_kernel")),
    (ATTENTION, ("attention", "attn", "flash", "fmha", "sdpa", "concat_kernel")),
    (PRODUCTS, ("gemm", "nvjet", "cutlass", "cublas", "splitk", "addmm", "aten::mm", "aten::bmm", "linear")),
    (GELU, ("gelu",)),
    (NORMS, ("add_norm", "shifted_norm", "layer_norm", "aten::add")),
    (UPDATE, ("adam", "multi_tensor", "foreach", "copy_kernel", "lpnorm")),
)
WIDTH: Final = 2  # bytes of bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """[rows, inner] x [inner, columns], so many times in a pass."""

    name: str
    rows: int
    inner: int
    columns: int
    times: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.times


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What the machine does at best: operations and bytes a second."""

    flops: float
    bytes: float
    product_flops: float  # in the precision of the step

    def least_ms(self, kind: str, flops: float, moved: float) -> float:
        return max(flops / (self.product_flops if kind == PRODUCTS else self.flops), moved / self.bytes) * 1e3


def list_products(c: ViTConfig, batch: int) -> list[Product]:
    """Products of one forward pass with weights; the last layer works for the class token alone."""
    rows, few, d, m, deep = batch * c.tokens, batch, c.width, c.mlp_width, c.depth - 1
    inside = c.patch[0] * c.patch[1] * c.channels
    found = [
        Product(name="patches", rows=batch * c.patches, inner=inside, columns=d, times=1),
        Product(name="q k v", rows=rows, inner=d, columns=3 * d, times=deep),
        Product(name="out", rows=rows, inner=d, columns=d, times=deep),
        Product(name="expand", rows=rows, inner=d, columns=m, times=deep),
        Product(name="contract", rows=rows, inner=m, columns=d, times=deep),
        Product(name="k v, last layer", rows=rows, inner=d, columns=2 * d, times=1),
        Product(name="q, out, last layer", rows=few, inner=d, columns=d, times=2),
        Product(name="expand, last layer", rows=few, inner=d, columns=m, times=1),
        Product(name="contract, last layer", rows=few, inner=m, columns=d, times=1),
        Product(name="head", rows=few, inner=d, columns=c.classes, times=1),
    ]
    return [one for one in found if one.times]


def count_work(c: ViTConfig, batch: int, parameters: int, *, training: bool) -> dict[str, tuple[float, float]]:
    """Operations and bytes of each kind of kernel in a step."""
    tokens, deep = batch * c.tokens, c.depth - 1
    times = 3 if training else 1  # forward, gradient of the input, gradient of the weight
    products = list_products(c, batch)
    operands = sum(
        one.times * (one.rows * one.inner + one.inner * one.columns + one.rows * one.columns) for one in products
    )
    pairs = c.heads * c.head_size * (deep * batch * c.tokens**2 + batch * c.tokens)
    q_k_v_out, residual, hidden = 4 * tokens * c.width, tokens * c.width, tokens * c.mlp_width
    norms = 2 * deep + 1
    return {
        PRODUCTS: (times * sum(one.flops for one in products), times * operands * WIDTH),
        # Backward: reads q, k, v, what came out and its gradient, writes three gradients.
        ATTENTION: (times * 4 * pairs, deep * q_k_v_out * WIDTH * (3 if training else 1)),
        # Forward: reads stream and branch, writes sum and norm. Backward: reads both gradients and the sum, writes one.
        NORMS: (0, norms * residual * WIDTH * (8 if training else 3)),
        GELU: (0, deep * hidden * WIDTH * (5 if training else 2)),
        QUANTISE: (0, 0),
        # Clipping reads gradients; AdamW reads those, weights and two moments and writes three; the copy for the pass.
        UPDATE: (0, parameters * (4 * (1 + 7) + 4 + WIDTH) if training else 0),
        OTHER: (0, 0),
    }


def measure_rates(device: str, side: int, precision: str = "bfloat16") -> Rates:
    kind = torch.bfloat16
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    source = torch.empty(side * side * 8, device=device, dtype=kind)
    target = torch.empty_like(source)
    product = time_call(lambda: a @ b, device)
    copy = time_call(lambda: target.copy_(source), device)
    step = product
    if precision == "fp8":
        left, right, one = a.to(ACTIVATIONS), b.to(ACTIVATIONS), torch.ones((), device=device)
        step = time_call(lambda: multiply(left, right, one, one, None, kind, fast=True), device)
    return Rates(flops=2 * side**3 / product, bytes=2 * source.nbytes / copy, product_flops=2 * side**3 / step)


def time_call(call: Callable[[], Any], device: str, rounds: int = 5, each: float = 0.05) -> float:
    """Seconds, the median of some rounds."""
    call()
    wait(device)
    begun = time.perf_counter()
    call()
    wait(device)
    repeats = max(1, min(200, int(each / max(time.perf_counter() - begun, 1e-6))))
    found: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        wait(device)
        found.append((time.perf_counter() - begun) / repeats)
    return sorted(found)[rounds // 2]


def measure_products(c: ViTConfig, batch: int, rates: Rates, device: str) -> Iterator[dict[str, Any]]:
    """Each product alone: its share of the ceiling forward and for both gradients."""
    for one in list_products(c, batch):
        x = torch.randn(one.rows, one.inner, device=device, dtype=torch.bfloat16)
        weight = torch.randn(one.columns, one.inner, device=device, dtype=torch.bfloat16)
        grad = torch.randn(one.rows, one.columns, device=device, dtype=torch.bfloat16)
        calls: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, weight=weight: x @ weight.t(),
            "of input": lambda grad=grad, weight=weight: grad @ weight,
            "of weight": lambda x=x, grad=grad: grad.t() @ x,
        }
        flops = one.flops / one.times
        shares = {name: flops / time_call(call, device) / rates.flops for name, call in calls.items()}
        yield asdict(one) | {"share": shares, "gflop": flops / 1e9}


def name_kind(kernel: str) -> str:
    lower = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in lower for part in parts)), OTHER)


def measure_kernels(call: Callable[[], Any], device: str) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of one call, by kind of kernel, and the longest kernels that were given to no kind."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with silence_profiler(), profile(activities=[activity], acc_events=True) as profiled:
        call()
        wait(device)
    kinds: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    for row in profiled.key_averages():
        ms = (row.self_device_time_total if device == "cuda" else row.self_cpu_time_total) / 1e3
        kinds[name_kind(row.key)] += ms
        if name_kind(row.key) == OTHER:
            others[row.key[:70]] += ms
    return dict(kinds), dict(sorted(others.items(), key=lambda item: -item[1])[:6])


def build_call(setting: Setting, *, training: bool) -> tuple[ViTConfig, int, Callable[[], Any]]:
    """The network's config and parameters, and what is timed: a whole step, or one batch through the network."""
    network = own_network(setting, timm_network(setting))
    config, parameters = network.config, sum(one.numel() for one in network.parameters())
    assert isinstance(config, ViTConfig)
    inputs = pictures(setting)
    network.float8 = setting.precision == "fp8"
    if training:
        return config, parameters, runner(setting, network, inputs)
    network.eval().to(torch.bfloat16)
    images = (inputs[0].float() / 127.5 - 1).to(torch.bfloat16)
    compiled = network if setting.compile == "off" else torch.compile(network, dynamic=False, mode=setting.compile)

    def infer() -> Tensor:
        with torch.inference_mode():
            return compiled(images)

    return config, parameters, infer


def measure(setting: Setting, rates: Rates, seconds: float, lock: Path | None, *, training: bool) -> dict[str, Any]:
    torch.compiler.reset()
    config, parameters, call = build_call(setting, training=training)
    call()
    with take_turn(lock):
        for _ in range(2):
            call()
        whole = time_call(call, setting.device, each=seconds)
        took, others = measure_kernels(call, setting.device)
    work = count_work(config, setting.batch, parameters, training=training)
    parts = [
        {
            "kind": kind,
            "tflop": flops / 1e12,
            "gb": moved / 1e9,
            "least_ms": rates.least_ms(kind, flops, moved),
            "ms": took.get(kind, 0.0),
        }
        for kind, (flops, moved) in work.items()
    ]
    return {
        "model": setting.model,
        "batch": setting.batch,
        "kind": "training" if training else "inference",
        "ms": whole * 1e3,
        "parts": parts,
        "others": others,
    }


def report(found: dict[str, Any], rates: Rates) -> None:
    rate = found["batch"] / found["ms"] * 1e3
    share = sum(part["tflop"] for part in found["parts"]) * 1e12 / (found["ms"] / 1e3) / rates.flops
    head = f"{found['model']}, {found['kind']}, batch {found['batch']}: {found['ms']:.2f} ms, {rate:,.0f} img/s"
    print(f"\n{head}, {share:.0%} of the ceiling")
    print(f"{'kernels':14} {'TFLOP':>8} {'GB':>8} {'least ms':>9} {'took ms':>9} {'above':>8}")
    for part in found["parts"]:
        numbers = f"{part['tflop']:8.3f} {part['gb']:8.3f} {part['least_ms']:9.3f} {part['ms']:9.3f}"
        print(f"{part['kind']:14} {numbers} {part['ms'] - part['least_ms']:8.3f}")
    idle = found["ms"] - sum(part["ms"] for part in found["parts"])
    print(f"{'no kernel':14} {'':8} {'':8} {'':9} {idle:9.3f} {idle:8.3f}")
    for name, ms in found["others"].items():
        print(f"  other: {ms:8.3f} ms {name}")


def report_products(rows: list[dict[str, Any]]) -> None:
    print(f"{'product alone':22} {'rows':>8} {'inner':>6} {'columns':>7} {'times':>5} {'GFLOP':>8} ", end="")
    print(" ".join(f"{name:>9}" for name in ("forward", "of input", "of weight")))
    for row in rows:
        sizes = f"{row['rows']:8} {row['inner']:6} {row['columns']:7} {row['times']:5} {row['gflop']:8.1f}"
        print(f"{row['name']:22} {sizes} " + " ".join(f"{share:9.0%}" for share in row["share"].values()), flush=True)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["B/16", "L/16", "H/14"], choices=TIMM)
    parser.add_argument("--only", choices=("training", "inference"))
    parser.add_argument("--batch", type=int, help=f"images per step (default: {BATCHES}, twice that in inference)")
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "fp8"))
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--depth", type=int, help="number of layers, instead of the network's own")
    parser.add_argument("--compile", default="default", help="a mode of torch.compile, or off")
    parser.add_argument("--side", type=int, default=8192, help="side of the square product that gives the ceiling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each of five measurements of a step")
    add_lock(parser)
    parser.add_argument("--out", type=Path, help="also write the numbers to this file, as JSON")
    args = parser.parse_args(words)
    print(f"{machine(args.device)}; AdamW with clipping at {OPTIM.clip:g}")
    with take_turn(args.lock):
        rates = measure_rates(args.device, args.side, args.precision)
    print(f"ceiling {rates.flops / 1e12:.1f} TFLOP/s, bandwidth {rates.bytes / 1e9:,.0f} GB/s", end="")
    print("" if args.precision == "bfloat16" else f", fp8 {rates.product_flops / 1e12:,.1f} TFLOP/s")
    results: dict[str, Any] = {"machine": machine(args.device), "rates": asdict(rates), "steps": [], "products": {}}
    for model in args.models:
        for training in (True, False):
            if args.only not in (None, "training" if training else "inference"):
                continue
            batch = args.batch or BATCHES[model] * (1 if training else 2)
            shape: dict[str, Any] = {"image": args.image_size, "depth": args.depth, "compile": args.compile}
            shape["precision"] = args.precision
            setting = Setting(model=model, batch=batch, device=args.device, **shape)
            found = measure(setting, rates, args.seconds, args.lock, training=training)
            report(found, rates)
            results["steps"].append(found)
        config = own_network(setting, timm_network(setting)).config
        assert isinstance(config, ViTConfig)
        with take_turn(args.lock):
            rows = list(measure_products(config, args.batch or BATCHES[model], rates, args.device))
        report_products(rows)
        results["products"][model] = rows
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
