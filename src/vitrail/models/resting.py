"""A network in evaluation mode for a while."""

import contextlib
from collections.abc import Generator

from torch import nn


@contextlib.contextmanager
def resting(model: nn.Module) -> Generator[None]:
    """In evaluation mode; every part goes back to the mode it was in. Part by part: a run may hold frozen layers in
    evaluation mode while the rest trains."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode
