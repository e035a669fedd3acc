"""The attention explorer of some pictures."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.inspection.explorer import Explored, Explorer, packed, plan
from vitrail.inspection.page import small
from vitrail.inspection.parts.given import DOWN, Given, numpy, prefix_names
from vitrail.inspection.stream import stream
from vitrail.inspection.tokens import reads_token

EXPLORED: Final = 4_500_000  # bytes of attention in a page, where one picture does not take more by itself


def explorer_of(given: Given) -> Explorer:
    """The explorer for the first pictures, as many as keep the page small."""
    config: Any = given.model.config
    asked = plan(given.depth, config.heads, given.tokens.grid, given.tokens.prefix)
    pictures = [
        Explored(
            name=given.names[at], picture=small(given.pixels[at]),
            weights=packed(asked, attention_of(given.model, given.images[at : at + 1])),
        )
        for at in range(min(len(given.names), max(EXPLORED // asked.size, 1), DOWN))
    ]  # fmt: skip
    rows, columns = asked.shown
    middle = given.tokens.prefix + rows // 2 * columns + columns // 2
    whose = "the class token" if reads_token(given.model) else "the mean of all patches"
    return Explorer(
        plan=asked, pictures=pictures, prefix=prefix_names(given), start=0 if reads_token(given.model) else middle,
        lead="Pick a patch and see where it looks: its row of the attention matrix, for one head, the mean of all "
        f"heads, or rolled out through the layers below. The network's answer is read from {whose}. From dark, the "
        "patch with the least weight, to bright, the one with the most, the asking patch itself aside.",
    )  # fmt: skip


def attention_of(model: nn.Module, image: Tensor) -> Iterator[NDArray[np.float32]]:
    """Layer by layer [k, T, T]."""
    for view in stream(model, image):
        yield numpy(view.attention[0])
        del view
