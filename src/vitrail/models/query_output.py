"""The output of a network with queries: a class and a mask for each query of each image."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class QueryOutput(NamedTuple):
    """Q queries for each of B images, each with a class and a mask."""

    classes: Tensor  # logits [B, Q, K + 1]; the last class is "no object"
    masks: Tensor  # logits [B, Q, h, w], at a fraction of the image's size


Output: TypeAlias = Tensor | QueryOutput  # the output of any network of the package


def map_output(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Applies a function to each tensor of an output."""
    return change(output) if isinstance(output, Tensor) else QueryOutput(*map(change, output))


def output_tensors(output: Output) -> tuple[Tensor, ...]:
    """The tensors of an output, in order."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def flatten_output(output: Output) -> Tensor:
    """Flattens an output to one tensor, [B, ...]. For queries, classes and then masks are concatenated."""
    return output if isinstance(output, Tensor) else torch.cat([part.flatten(1) for part in output], dim=1)
