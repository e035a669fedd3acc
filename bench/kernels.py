"""vitrail's own kernels one by one: milliseconds, bytes and operations per second, next to the machine's best rates.

    python -m bench.kernels                                     # at the sizes of ViT-B/16, L/16 and H/14, on a GPU
    python -m bench.kernels --models B/16 --batch 128 --tokens 145
    TRITON_INTERPRET=1 python -m bench.kernels --device cpu --models tiny --batch 1 --tokens 5     # do they run?

A kernel that only moves data is judged by its share of the machine's bandwidth, measured with a copy. Bytes are those
that it must read and write once. For attention, operations are those of its products over the actual tokens, five
products in the backward pass, as a share of a square product's rate. `ratio` compares the kernel that writes fp8 (in
attention's forward pass, in addition to its output) with the one that does not; those of GELU's gradient, and those
called transposed, also write it as columns.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.limit import Rates, measure_rates, time_call
from vitrail.models.kernels import fused_ops as fused
from vitrail.models.kernels.float8_ops import pad_rows, rows_per_sum

SHAPES = {
    "tiny": (32, 2),
    "B/16": (768, 12),
    "L/16": (1024, 16),
    "H/14": (1280, 0),
}  # width, heads of a width that they take
BATCHES = {"tiny": 1, "B/16": 256, "L/16": 256, "H/14": 128}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Calls of one kernel without and with fp8 output, and how many more or fewer bytes the latter writes."""

    name: str
    plain: Callable[[], Any]
    eight: Callable[[], Any] | None
    bytes: int
    more: int = 0
    flops: int = 0


def list_kernels(width: int, heads: int, batch: int, tokens: int, device: str) -> Iterator[Kernel]:
    from vitrail.models.kernels import attention_kernels, float8_kernels, gelu_kernels, norm_kernels

    kind = torch.bfloat16 if device == "cuda" else torch.float32
    size, rows = kind.itemsize, batch * tokens

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    z, branch, normed = draw(batch, tokens, width), draw(batch, tokens, width), draw(batch, tokens, width)
    weight, shift = draw(width), draw(width)
    one = float8_kernels.sample_scale(fused.flat(z), 28.0, 32, 512)
    _, _, stats = norm_kernels.add_norm(z, branch, shift, weight, shift, 1e-6)
    each = fused.norm_rows(z)
    yield Kernel(
        name="sum and norm",
        plain=lambda: norm_kernels.add_norm(z, branch, shift, weight, shift, 1e-6),
        eight=lambda: norm_kernels.add_norm_float8(z, branch, shift, weight, shift, 1e-6, one),
        bytes=4 * z.numel() * size,
        more=z.numel() * (1 - size),
    )
    yield Kernel(
        name="its gradient",
        plain=lambda: norm_kernels.add_norm_backward(branch, normed, z, stats, weight, each),
        eight=None,
        bytes=4 * z.numel() * size,
    )
    pre, grad = draw(rows, 4 * width), draw(rows, 4 * width)
    part, padded = fused.rows_per_program(*pre.shape), pad_rows(pre)
    yield Kernel(
        name="GELU",
        plain=lambda: gelu_kernels.gelu(pre, False),
        eight=lambda: gelu_kernels.gelu_float8(pre, False, one),
        bytes=2 * pre.numel() * size,
        more=pre.numel() * (1 - size),
    )
    yield Kernel(
        name="and transposed",
        plain=lambda: gelu_kernels.gelu(pre, False),
        eight=lambda: gelu_kernels.gelu_turned_float8(pre, False, one, padded),
        bytes=2 * pre.numel() * size,
        more=pre.numel() * (2 - size),
    )
    yield Kernel(
        name="its gradient",
        plain=lambda: gelu_kernels.gelu_backward(grad, pre, False, part),
        eight=lambda: gelu_kernels.gelu_backward_float8(grad, pre, False, rows_per_sum(pre), one, padded),
        bytes=3 * pre.numel() * size,
        more=pre.numel() * (2 - size),
    )
    flat = fused.flat(z)
    yield Kernel(name="rounding", plain=lambda: float8_kernels.round_scaled(flat, one, torch.float8_e5m2),
                 eight=None, bytes=z.numel() * (size + 1))  # fmt: skip
    yield Kernel(name="and transposed", plain=lambda: float8_kernels.round_turned(flat, one, torch.float8_e5m2, padded),
                 eight=None, bytes=z.numel() * (size + 2))  # fmt: skip
    low = torch.empty(rows, 4 * width, device=device, dtype=torch.float8_e4m3fn)
    yield Kernel(name="rows to columns", plain=lambda: float8_kernels.turn(low, padded),
                 eight=None, bytes=2 * low.numel())  # fmt: skip
    yield Kernel(name="a scale", plain=lambda: float8_kernels.sample_scale(pre, 28.0, 32, 512), eight=None, bytes=0)
    if tokens > fused.TOKENS or not heads:
        return
    qkv, of_out = draw(batch, tokens, 3 * width), draw(batch, tokens, width)
    out, logs = attention_kernels.attention(qkv, heads)
    product = 2 * batch * tokens**2 * width
    yield Kernel(
        name="attention",
        plain=lambda: attention_kernels.attention(qkv, heads),
        eight=lambda: attention_kernels.attention_float8(qkv, heads, one),
        bytes=4 * z.numel() * size,
        more=z.numel(),
        flops=2 * product,
    )
    yield Kernel(
        name="its gradient",
        plain=lambda: attention_kernels.attention_backward(qkv, out, of_out, logs, heads),
        eight=lambda: attention_kernels.attention_backward_float8(qkv, out, of_out, logs, heads, one),
        bytes=8 * z.numel() * size,
        more=3 * z.numel() * (1 - size),
        flops=5 * product,
    )


def measure(kernel: Kernel, rates: Rates, device: str) -> dict[str, Any]:
    plain = time_call(kernel.plain, device)
    eight = None if kernel.eight is None else time_call(kernel.eight, device)
    return {
        "name": kernel.name,
        "ms": plain * 1e3,
        "bandwidth": kernel.bytes / plain / rates.bytes,
        "ceiling": kernel.flops / plain / rates.flops,
        "ms_eight": None if eight is None else eight * 1e3,
        "bandwidth_eight": None if eight is None else (kernel.bytes + kernel.more) / eight / rates.bytes,
    }


def show(row: dict[str, Any]) -> str:
    ceiling = f"{row['ceiling']:8.0%}" if row["ceiling"] else " " * 8
    line = f"{row['name']:16} {row['ms']:9.4f} {row['bandwidth']:10.0%} {ceiling}"
    if row["ms_eight"] is None:
        return line
    return f"{line} {row['ms_eight']:11.4f} {row['bandwidth_eight']:10.0%} {row['ms_eight'] / row['ms']:6.2f}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["B/16", "L/16", "H/14"], choices=SHAPES)
    parser.add_argument("--batch", type=int, help=f"images (default: {BATCHES})")
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--side", type=int, default=8192, help="side of the square product that gives the ceiling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write the numbers to this file, as JSON")
    args = parser.parse_args(words)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rates = measure_rates(args.device, args.side if args.device == "cuda" else 64)
    print(f"torch {torch.__version__}, {name}; {rates.flops / 1e12:.1f} TFLOP/s, {rates.bytes / 1e9:,.0f} GB/s")
    results: dict[str, Any] = {"torch": torch.__version__, "device": name, "rates": asdict(rates), "kernels": {}}
    for model in args.models:
        (width, heads), batch = SHAPES[model], args.batch or BATCHES[model]
        print(f"\n{model}, {batch} images of {args.tokens} tokens")
        print(
            f"{'kernel':16} {'ms':>9} {'bandwidth':>10} {'ceiling':>8} {'eight, ms':>11} {'bandwidth':>10} {'ratio':>6}"
        )
        rows: list[dict[str, Any]] = []
        for kernel in list_kernels(width, heads, batch, args.tokens, args.device):
            rows.append(measure(kernel, rates, args.device))
            print(show(rows[-1]), flush=True)
        results["kernels"][model] = rows
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
