"""The optimiser: groups of parameters, their moments, and a step that never asks the device for a number."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.optim.config import Optim
from vitrail.optim.foreach import Tensors, local
from vitrail.optim.groups import Group
from vitrail.optim.rules import Work, update
from vitrail.optim.state import refill

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}


class Optimiser:
    """Adam with decoupled decay or SGD with momentum, over float32 parameters, sharded or whole. The state is there
    from the start, as zeros, so that a checkpoint before the first step is like any other. Masked steps do not count
    in `count`, the number of updates, from which Adam corrects its moments."""

    def __init__(self, groups: Sequence[Group], optim: Optim) -> None:
        self.groups, self.optim = list(groups), optim
        self.params = {
            name: parameter for group in groups for name, parameter in zip(group.names, group.params, strict=True)
        }
        if not self.params:
            raise ConfigError(f"nothing to train; optim.freeze={optim.freeze!r} leaves no parameter")
        for name, parameter in self.params.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}; the optimiser keeps float32 masters"
        first = torch.bfloat16 if optim.momentum_type == "bfloat16" else torch.float32
        self._moments = {
            kind: {
                name: torch.zeros_like(parameter, dtype=torch.float32 if kind == "exp_avg_sq" else first)
                for name, parameter in self.params.items()
            }
            for kind in MOMENTS[optim.kind]
        }
        self._count = torch.zeros((), device=next(iter(self.params.values())).device)

    @torch.no_grad()
    def step(self, lr: float | Tensor, *, divisor: Tensor, ok: Tensor) -> None:
        """One update by the gradients over `divisor`, or, where `ok` is false, no change at all, to the bit, whatever
        the gradients hold. Both are 0-dim and on the device. Gradients are spent: call `zero_grad` next. A parameter
        without a gradient is left alone, decay included."""
        skip = 1 - ok.float()
        # The kernels want a count of its own for each tensor, and raise it.
        counts = list(self._count.expand(len(self.params)).clone().unbind())
        for group in self.groups:
            names = [name for name in group.names if self.params[name].grad is not None]
            if names:
                work = Work(
                    params=[local(self.params[name]) for name in names],
                    grads=[local(gradient) for name in names if (gradient := self.params[name].grad) is not None],
                    moments=tuple([local(moment[name]) for name in names] for moment in self._moments.values()),
                    counts=[counts.pop() for _ in names],
                    lr=lr * group.rate,
                    weight_decay=group.weight_decay,
                    divisor=divisor,
                    skip=skip,
                )
                update(work, self.optim)
        self._count.add_(ok)

    def zero_grad(self) -> None:
        for parameter in self.params.values():
            parameter.grad = None

    def gradients(self) -> Tensors:
        """Those that are there, for the norm."""
        return [parameter.grad for parameter in self.params.values() if parameter.grad is not None]

    def state(self) -> dict[str, Tensor]:
        """All that a resume needs, under names like "exp_avg/blocks.0.mlp.expand.weight"; the tensors themselves, not
        copies, sharded as the parameters are."""
        moments = {
            f"{kind}/{name}": tensor for kind, tensors in self._moments.items() for name, tensor in tensors.items()
        }
        return {"count": self._count, **moments}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        refill(self.state(), tensors, "state of the optimiser")
