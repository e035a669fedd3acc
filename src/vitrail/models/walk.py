"""A tensor's walk through a network in closed form: shape, parameters and multiply-accumulates, line by line. No torch.

The sums of a walk are the model table. MACs count matrix products and convolutions, padded taps included (the paper's
exaFLOPs leave those out: `padding_macs`); normalisation, softmax and GELU are left out.
"""

from collections.abc import Iterable

from vitrail.models.family import ModelConfig, Step


def walk(config: ModelConfig) -> list[Step]:
    """The steps of one image through the network, from pixels to logits."""
    return list(config.walk())


def parameters(config: ModelConfig) -> int:
    return sum(step.params for step in walk(config))


def macs(config: ModelConfig) -> int:
    """Multiply-accumulates for one image; a FLOP count is twice this."""
    return sum(step.macs for step in walk(config))


def summed(steps: Iterable[Step]) -> Step:
    """All steps as one line; the shape is the last one's."""
    rows = list(steps)
    return Step("total", rows[-1].shape, sum(s.params for s in rows), sum(s.macs for s in rows))
