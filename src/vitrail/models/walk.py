"""A tensor's walk through a network in closed form: shape, parameters and multiply-accumulates, line by line. No torch.

The sums of a walk are the model table; `config.parameters` and `config.macs` are two of them.
"""

from collections.abc import Iterable

from vitrail.models.family import ModelConfig, Step


def walk(config: ModelConfig) -> list[Step]:
    """The steps of one image through the network, from pixels to logits."""
    return list(config.walk())


def summed(steps: Iterable[Step]) -> Step:
    """All steps as one line; the shape is the last one's."""
    rows = list(steps)
    return Step("total", rows[-1].shape, sum(s.params for s in rows), sum(s.macs for s in rows))
