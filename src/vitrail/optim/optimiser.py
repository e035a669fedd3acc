"""The optimiser: groups of parameters, their moments, and a step that never waits for the device.

The rules are Adam with decoupled weight decay (Section 4.1) and SGD with momentum (fine-tuning). torch's fused kernels
apply them in one pass: they divide the gradient, and leave everything bit-identical if the step is skipped. They only
support float32, so an accumulator in bfloat16 is widened for the update and rounded when it is stored; the update
itself sees the sum before rounding, as in the reference. optax also multiplies such an accumulator by the decay in its
own type: 0.9 is 0.8984375 there, and here too.

Everything works element by element on lists of tensors, so it works on shards: `local` is what this process holds of
a sharded tensor, and writing to it changes the sharded tensor.

Polyak averaging of the weights (Section 4.1, with a factor of 0.9999).
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitrail.core.errors import ConfigError
from vitrail.optim.config import Optim
from vitrail.optim.groups import ParameterGroup
from vitrail.optim.schedules import Rates


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, over all shards: 0-dim, float32, on the device."""
    norm = torch.nn.utils.get_total_norm(list(gradients))
    whole = getattr(norm, "full_tensor", None)
    return (norm if whole is None else cast(Tensor, whole())).float()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor that scales gradients of this norm down to the limit: min(1, limit / (norm + 1e-6)), exactly as in
    torch. A limit of 0 clips nothing."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)


Tensors: TypeAlias = list[Tensor]

aten: Any = torch.ops.aten  # torch._foreach_* are these


def local(tensor: Tensor) -> Tensor:
    """The shard that this process holds, or the tensor itself if it is not sharded. Only without gradients."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(Tensor, to_local())


def chunk(tensors: Sequence[Tensor], limit: int = 1 << 26) -> Iterator[slice]:
    """Slices of about `limit` elements each, so that temporary copies stay small compared with the network."""
    start = size = 0
    for at, tensor in enumerate(tensors, start=1):
        size += tensor.numel()
        if size >= limit or at == len(tensors):
            yield slice(start, at)
            start, size = at, 0


def apply_update(
    tensors: Sequence[Tensors], optim: Optim, lr: float | Tensor, weight_decay: float, divisor: Tensor, skip: Tensor
) -> None:
    """Applies the optimiser's rule once to tensors as this process holds them: parameters, gradients, the number of
    earlier updates of each parameter, and Adam's two moments or SGD's one. If `skip`, 0-dim and float32, is 1 instead
    of 0, nothing changes. Modifies gradients and counts in place."""
    kind = _adamw if optim.kind == "adamw" else _sgd
    rule = partial(kind, lr=lr, weight_decay=weight_decay, divisor=divisor, skip=skip)
    if optim.momentum_type == "float32":
        rule(*tensors, optim=optim)
        return
    decay = float(torch.tensor(optim.momentum, dtype=torch.bfloat16))
    for where in chunk(tensors[0]):
        params, grads, counts, narrow, *others = (part[where] for part in tensors)
        wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in narrow]
        aten._foreach_copy_(wide, narrow)
        if optim.kind == "adamw" and optim.momentum:  # the kernel uses one β for both the gradient and the correction
            aten._foreach_mul_.Tensor(wide, 1 + (decay / optim.momentum - 1) * (1 - skip))
            rule(params, grads, counts, wide, *others, optim=optim)
        else:
            rule(params, grads, counts, wide, *others, optim=replace(optim, momentum=decay))
        aten._foreach_copy_(narrow, wide)


def _adamw(
    params: Tensors, grads: Tensors, counts: Tensors, first: Tensors, second: Tensors, optim: Optim, **step: Any
) -> None:
    """θ ← θ - lr·λ·θ - lr·m̂/(√v̂ + ε)."""
    rule: dict[str, Any] = {"beta1": optim.momentum, "beta2": optim.second, "eps": optim.eps, "amsgrad": False}
    rule |= {"lr": step["lr"], "weight_decay": step["weight_decay"], "maximize": False}
    kernel: dict[str, Any] = {"fused": True, "grad_scale": step["divisor"], "found_inf": step["skip"]}
    adamw(params, grads, first, second, [], counts, **kernel, **rule)


def _sgd(params: Tensors, grads: Tensors, counts: Tensors, moment: Tensors, optim: Optim, **step: Any) -> None:
    """m ← μ·m + g, θ ← θ - lr·λ·θ - lr·m: no Nesterov, and weight decay that bypasses m."""
    if step["weight_decay"]:
        aten._foreach_mul_.Tensor(params, 1 - (1 - step["skip"]) * (step["lr"] * step["weight_decay"]))
    rule: dict[str, Any] = {"momentum": optim.momentum, "lr": step["lr"], "weight_decay": 0.0, "dampening": 0.0}
    kernel: dict[str, Any] = {"fused": True, "grad_scale": step["divisor"], "found_inf": step["skip"]}
    sgd(params, grads, list(moment), nesterov=False, maximize=False, **kernel, **rule)


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}


class Optimiser:
    """Adam with decoupled weight decay or SGD with momentum, over float32 parameters, sharded or whole. The state
    exists from the start, as zeros, so that a checkpoint before the first step is like any other. Skipped steps do not
    add to `count`, the number of updates, by which Adam corrects its moments."""

    def __init__(self, groups: Sequence[ParameterGroup], optim: Optim) -> None:
        self.groups, self.optim = list(groups), optim
        self.params = {name: parameter for group in groups for name, parameter in group.params.items()}
        if not self.params:
            raise ConfigError(f"nothing to train; optim.freeze={optim.freeze!r} leaves no parameter")
        for name, parameter in self.params.items():
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}; the optimiser keeps float32 masters"
        first = torch.bfloat16 if optim.momentum_type == "bfloat16" else torch.float32
        types = {kind: torch.float32 if kind == "exp_avg_sq" else first for kind in MOMENTS[optim.kind]}
        self._moments = {
            kind: {name: torch.zeros_like(parameter, dtype=dtype) for name, parameter in self.params.items()}
            for kind, dtype in types.items()
        }
        self._count = torch.zeros((), device=next(iter(self.params.values())).device)

    @torch.no_grad()
    def step(self, lr: float | Tensor | Rates, *, divisor: Tensor, ok: Tensor) -> None:
        """Updates once, with the gradients divided by `divisor`. If `ok` is false, every bit stays as it is, whatever
        the gradients hold. Both are 0-dim and on the device. Modifies the gradients: call `zero_grad` next. Parameters
        without a gradient stay as they are and do not decay either."""
        rates = lr if isinstance(lr, Rates) else Rates(lr, lr)
        skip = 1 - ok.float()
        # The kernels increment the counts, and want one per tensor.
        counts = list(self._count.expand(len(self.params)).clone().unbind())
        for group in self.groups:
            names = [name for name in group.params if self.params[name].grad is not None]
            if names:
                tensors = [
                    [local(self.params[name]) for name in names],
                    [local(gradient) for name in names if (gradient := self.params[name].grad) is not None],
                    [counts.pop() for _ in names],
                    *([local(moment[name]) for name in names] for moment in self._moments.values()),
                ]
                rate = (rates.encoder if group.is_encoder else rates.head) * group.rate
                apply_update(tensors, self.optim, rate, group.weight_decay, divisor, skip)
        self._count.add_(ok)

    def zero_grad(self) -> None:
        for parameter in self.params.values():
            parameter.grad = None

    def gradients(self) -> Tensors:
        """The gradients that exist, for the norm."""
        return [parameter.grad for parameter in self.params.values() if parameter.grad is not None]

    def state(self) -> dict[str, Tensor]:
        """Everything a resume needs, under names like "exp_avg/blocks.0.mlp.expand.weight"; the tensors themselves, not
        copies, sharded as the parameters are."""
        moments = ((f"{kind}/{name}", one) for kind, named in self._moments.items() for name, one in named.items())
        return {"count": self._count, **dict(moments)}


@contextmanager
def swap_tensors(tensors: Sequence[Tensor], values: Iterable[Tensor]) -> Generator[None]:
    """Replaces the values that this process holds inside the block, and restores them bit for bit however the block
    ends."""
    kept = [tensor.detach().clone() for tensor in tensors]
    try:
        _copy(values, tensors)
        yield
    finally:
        _copy(kept, tensors)


@torch.no_grad()
def _copy(values: Iterable[Tensor], into: Sequence[Tensor]) -> None:
    for tensor, value in zip(into, values, strict=True):
        tensor.copy_(value)


class Average:
    """e ← f·e + (1 - f)·w after every step, from e = w at the start, over parameters sharded or whole.

    The average remembers about 1/(1 - f) steps. In a run that is not much longer than that, the initial weights still
    count for f^steps: 37% after 10,000 steps at 0.9999, 95% after 500. A skipped update leaves the parameters as they
    are, but the average still moves towards them.
    """

    def __init__(self, params: Mapping[str, Tensor], factor: float) -> None:
        if not 0 <= factor < 1:
            raise ConfigError(f"average={factor} must be at least 0 and below 1")
        self.factor = factor
        self._params = dict(params)
        self._averages = {name: parameter.detach().clone() for name, parameter in self._params.items()}
        self._follow = get_ema_multi_avg_fn(factor)

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages one step towards the parameters."""
        if self._params:
            params = [local(parameter) for parameter in self._params.values()]
            self._follow([local(average) for average in self._averages.values()], params, None)

    def swap_in(self) -> AbstractContextManager[None]:
        """Replaces the parameters by the averages inside the block. Do not update the averages inside."""
        return swap_tensors(list(map(local, self._params.values())), map(local, self._averages.values()))

    def state(self) -> dict[str, Tensor]:
        """The averages under names like "average/blocks.0.mlp.expand.weight"; the tensors themselves, not copies."""
        return {f"average/{name}": tensor for name, tensor in self._averages.items()}
