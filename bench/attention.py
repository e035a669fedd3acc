"""Attention over short sequences on a GPU, forward and backward, compared with torch's own kernel (cuDNN on Hopper).

    python bench/attention.py                                   # the sizes of ViT-B/16, ViT-L/16 and a ViT at 32 px
    TRITON_INTERPRET=1 python bench/attention.py --device cpu --sizes 2x9x2 --passes 1     # the times mean nothing here

A size is images x tokens x heads, with heads of width 64, in bfloat16. Torch's backward pass returns three gradients,
which must be concatenated for the qkv product: `join` is our fastest way to do that. Errors are those of the gradients
relative to float64, on the first images.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.models.kernels import attention_kernels
from vitrail.models.kernels.fused_ops import concat_qkv_grad

HEAD = 64
JUDGED = 8  # images


def by_head(qkv: Tensor, heads: int) -> list[Tensor]:
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)]


def flat(z: Tensor) -> Tensor:
    return z.transpose(1, 2).flatten(2).flatten(0, 1).contiguous()


def microseconds(work: Callable[[], object], passes: int, device: str) -> float:
    """The median of five turns of `passes`, after a warm-up."""
    turns: list[float] = []
    for turn in range(6):
        start = time.perf_counter()
        for _ in range(passes):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        turns += [(time.perf_counter() - start) / passes * 1e6] if turn else []
    return statistics.median(turns)


def exact(qkv: Tensor, grad: Tensor, heads: int) -> Tensor:
    """The gradient in float64."""
    x = qkv[:JUDGED].double().requires_grad_()
    F.scaled_dot_product_attention(*by_head(x, heads)).transpose(1, 2).flatten(2).backward(grad[:JUDGED].double())
    assert x.grad is not None
    return x.grad


def compare(pictures: int, tokens: int, heads: int, passes: int, device: str) -> str:
    draw = torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(pictures, tokens, 3 * heads * HEAD, generator=draw).to(device, kind)
    grad = torch.randn(pictures, tokens, heads * HEAD, generator=draw).to(device, kind)
    q, k, v = (part.detach().requires_grad_() for part in by_head(qkv, heads))
    theirs = F.scaled_dot_product_attention(q, k, v)
    of_theirs = by_head(torch.cat([grad] * 3, -1), heads)[0]

    def their_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(theirs, (q, k, v), of_theirs, retain_graph=True)

    def their_forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v)

    parts = [flat(part) for part in their_backward()]
    out, logs = attention_kernels.attention(qkv, heads)
    works: tuple[Callable[[], object], ...] = (
        lambda: attention_kernels.attention(qkv, heads),
        lambda: attention_kernels.attention_backward(qkv, out, grad, logs, heads),
        their_forward,
        their_backward,
        lambda: concat_qkv_grad(parts[0], parts[1], parts[2]),
    )
    times = [microseconds(work, passes, device) for work in works]
    wanted = exact(qkv, grad, heads)
    found = (
        attention_kernels.attention_backward(qkv, out, grad, logs, heads)[0],
        concat_qkv_grad(parts[0], parts[1], parts[2])[0].view_as(qkv),
    )
    errors = [float((one[:JUDGED].double() - wanted).norm() / wanted.norm()) for one in found]
    size = f"{pictures}x{tokens}x{heads}"
    return f"{size:14}" + "".join(f"{one:10.0f}" for one in times) + "".join(f"{one:10.1e}" for one in errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["256x197x12", "256x197x16", "512x64x6"], metavar="BxTxK")
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    heads = ("forward", "backward", "torch's", "backward", "join", "error", "torch's")
    print(f"{'size, µs':14}" + "".join(f"{head:>10}" for head in heads))
    for size in args.sizes:
        pictures, tokens, heads_ = (int(part) for part in size.split("x"))
        print(compare(pictures, tokens, heads_, args.passes, args.device), flush=True)


if __name__ == "__main__":
    main()
