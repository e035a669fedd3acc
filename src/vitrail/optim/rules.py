"""One update of a list of parameters: Adam with decoupled decay (Section 4.1), and SGD with momentum (fine-tuning).

torch's fused kernels do it, in one pass: they divide the gradient and leave everything as it is, to the bit, where told
to. They know nothing but float32, so an accumulator in bfloat16 is widened for the update, which therefore sees the
sum before it is rounded, and rounded when it is put back; that is how the reference does it. optax multiplies such an
accumulator by the decay in its own type too: 0.9 is 0.8984375 there, and so it is here.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from vitrail.optim import foreach
from vitrail.optim.config import Optim
from vitrail.optim.foreach import Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an update is made on, as this process holds it. `moments` are Adam's two or SGD's one; `counts` holds, for
    each parameter, the updates made before; where `skip`, 0-dim and float32, is 1 and not 0, nothing may change."""

    params: Tensors
    grads: Tensors
    moments: tuple[Tensors, ...]
    counts: Tensors
    lr: float | Tensor  # a tensor is 0-dim and on the device
    weight_decay: float
    divisor: Tensor
    skip: Tensor

    def part(self, where: slice) -> "Work":
        return replace(
            self,
            params=self.params[where],
            grads=self.grads[where],
            moments=tuple(moment[where] for moment in self.moments),
            counts=self.counts[where],
        )


def update(work: Work, optim: Optim) -> None:
    """One step of the optimiser's rule. Gradients are spent, and so are the counts."""
    rule = _adamw if optim.kind == "adamw" else _sgd
    if optim.momentum_type == "float32":
        rule(work, optim)
        return
    for where in foreach.parts(work.params):
        part = work.part(where)
        narrow, *others = part.moments
        wide = foreach.copies(narrow, torch.float32)
        decay = float(torch.tensor(optim.momentum, dtype=torch.bfloat16))
        if optim.kind == "adamw" and optim.momentum:  # its kernel takes the same β for the gradient and the correction
            foreach.scale_(wide, 1 + (decay / optim.momentum - 1) * (1 - work.skip))
            rule(replace(part, moments=(wide, *others)), optim)
        else:
            rule(replace(part, moments=(wide, *others)), replace(optim, momentum=decay))
        foreach.copy_(narrow, wide)


def _adamw(work: Work, optim: Optim) -> None:
    """θ ← θ - lr·λ·θ - lr·m̂/(√v̂ + ε)."""
    first, second = work.moments
    adamw(
        work.params,
        work.grads,
        first,
        second,
        [],
        work.counts,
        fused=True,
        grad_scale=work.divisor,
        found_inf=work.skip,
        amsgrad=False,
        beta1=optim.momentum,
        beta2=optim.second,
        lr=work.lr,
        weight_decay=work.weight_decay,
        eps=optim.eps,
        maximize=False,
    )


def _sgd(work: Work, optim: Optim) -> None:
    """m ← μ·m + g, θ ← θ - lr·λ·θ - lr·m: no Nesterov, and decay that does not go through m as the kernel's would."""
    if work.weight_decay:
        foreach.scale_(work.params, 1 - (1 - work.skip) * (work.lr * work.weight_decay))
    sgd(
        work.params,
        work.grads,
        list(work.moments[0]),
        fused=True,
        grad_scale=work.divisor,
        found_inf=work.skip,
        weight_decay=0.0,
        momentum=optim.momentum,
        lr=cast(float, work.lr),  # tensors too, whatever its annotation says
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
