"""Work on lists of tensors, element by element, in a few kernels for a whole network.

As nothing here looks beyond an element, it works on shards: `local` gives what this process holds of a sharded tensor,
and the sharded tensor sees what is written there.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Tensors: TypeAlias = list[Tensor]

aten: Any = torch.ops.aten  # torch._foreach_* are these


def local(tensor: Tensor) -> Tensor:
    """The shard that this process holds; a tensor that is not sharded is its own. Only where gradients are off."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(Tensor, to_local())


def parts(tensors: Sequence[Tensor], limit: int = 1 << 26) -> Iterator[slice]:
    """Stretches of about `limit` elements, so that what is allocated along the way stays small beside the network."""
    start = size = 0
    for at, tensor in enumerate(tensors, start=1):
        size += tensor.numel()
        if size >= limit or at == len(tensors):
            yield slice(start, at)
            start, size = at, 0


def copies(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    fresh = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    copy_(fresh, tensors)
    return fresh


def copy_(into: Tensors, tensors: Tensors) -> None:
    if into:
        aten._foreach_copy_(into, tensors)


def scale_(tensors: Tensors, factor: Tensor) -> None:
    aten._foreach_mul_.Tensor(tensors, factor)
