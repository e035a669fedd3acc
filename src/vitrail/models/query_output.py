"""What a network with queries gives for each image: one class and one mask per query."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class QueryOutput(NamedTuple):
    """Q queries, each with a class and a mask, for each of B images."""

    classes: Tensor  # logits [B, Q, K + 1]; the last class is "no object"
    masks: Tensor  # logits [B, Q, h, w], at a fraction of the image's size


Output: TypeAlias = Tensor | QueryOutput  # what the networks of the package give


def map_output(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """The output with each of its tensors changed."""
    return change(output) if isinstance(output, Tensor) else QueryOutput(*map(change, output))


def output_tensors(output: Output) -> tuple[Tensor, ...]:
    """The tensors of an output, in order."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def flatten_output(output: Output) -> Tensor:
    """The output as one tensor, [B, ...]; that of queries side by side, classes first."""
    return output if isinstance(output, Tensor) else torch.cat([part.flatten(1) for part in output], dim=1)
