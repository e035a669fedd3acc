"""The formulas one number at a time, in Python's float64, and small things that several tests start from."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitrail.optim.config import Optim, Schedule
from vitrail.optim.groups import ParameterGroup

SHAPES = ((5, 3), (7,), (), (2, 3, 2, 2))


def schedule(config: Schedule, base: float, total: int) -> list[float]:
    rates: list[float] = []
    for t in range(total):
        p = max(0, t - config.warmup) / (total - config.warmup)
        value = base
        if config.decay == "linear":
            value = config.end * p + base * (1 - p)
        elif config.decay == "cosine":
            value = config.end + (base - config.end) * math.cos(math.pi * p / 2) ** 2
        elif config.decay == "poly":
            value = config.end + (base - config.end) * math.exp(config.power * math.log(1 - p))
        elif config.decay == "steps":
            for milestone in config.milestones:
                if t * 1000 >= round(milestone * 1000) * total:
                    value /= 10
        rates.append(value * t / config.warmup if t < config.warmup else value)
    return rates


def params(seed: int = 0, device: str = "cpu") -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    made[1][3] = -0.0
    return [nn.Parameter(tensor.to(device)) for tensor in made]


def gradients(step: int, device: str = "cpu") -> list[Tensor]:
    """Some are large, some tiny, some zero, and one parameter's are all zero in the first step."""
    draw = torch.Generator().manual_seed(1000 + step)
    made = [torch.randn(shape, generator=draw) * 10.0 ** (2 - at) for at, shape in enumerate(SHAPES)]
    made[0][0] = 0
    made[3] *= step > 0
    return [tensor.to(device) for tensor in made]


def grouped(params: Sequence[nn.Parameter], weight_decay: float, rate: float = 0.5) -> list[ParameterGroup]:
    """The first two decay; the last two have another rate."""
    named = [(f"p{at}", parameter) for at, parameter in enumerate(params)]
    return [
        ParameterGroup(params=dict(named[:2]), weight_decay=weight_decay, rate=1.0),
        ParameterGroup(params=dict(named[2:]), weight_decay=0.0, rate=rate),
    ]


def put(params: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(params, gradients, strict=True):
        parameter.grad = gradient.clone()


def rounded(value: float, optim: Optim) -> float:
    return float(torch.tensor(value, dtype=torch.float32).to(getattr(torch, optim.momentum_type)))


class Reference:
    """θ, m and v of one parameter as lists of floats; what is stored of m is rounded as the config says."""

    def __init__(self, tensor: Tensor, optim: Optim, weight_decay: float) -> None:
        self.theta = [float(value) for value in tensor.detach().double().flatten()]
        self.m, self.v = [0.0] * len(self.theta), [0.0] * len(self.theta)
        self.optim, self.weight_decay, self.t = optim, weight_decay, 0

    def step(self, gradient: Tensor, lr: float) -> None:
        self.t += 1
        o = self.optim
        decay = rounded(o.momentum, o)  # optax multiplies in the accumulator's type
        for at, value in enumerate(gradient.double().flatten()):
            g, theta = float(value), self.theta[at]
            if o.kind == "sgd":
                m = decay * self.m[at] + g
                moved = lr * m
            else:
                m = decay * self.m[at] + (1 - o.momentum) * g
                self.v[at] = o.second * self.v[at] + (1 - o.second) * g * g
                corrected = m / (1 - o.momentum**self.t), self.v[at] / (1 - o.second**self.t)
                moved = lr * corrected[0] / (math.sqrt(corrected[1]) + o.eps)
            self.theta[at] = theta - moved - lr * self.weight_decay * theta
            self.m[at] = rounded(m, o)
