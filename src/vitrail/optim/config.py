"""Configuration of the optimiser and the learning rate schedule. Values are the paper's; 0 turns a feature off."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from vitrail.core.errors import ConfigError, unknown_name

Kind: TypeAlias = Literal["adamw", "sgd"]
MomentumType: TypeAlias = Literal["float32", "bfloat16"]
Decay: TypeAlias = Literal["cosine", "linear", "poly", "steps", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """Adam with decoupled weight decay, or SGD with momentum. Only kernels decay, scaled by the current rate,
    θ ← θ - lr·λ·θ, as was usual when the paper appeared. `layer_decay` d gives layer l of L the rate lr·d^(L+1-l).
    `freeze` names what stays fixed: "embedding", "blocks:N" (embedding and the first N blocks), "all" (everything but
    the head)."""

    kind: Kind = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9  # Adam's first β
    second: float = 0.999  # Adam's second β
    eps: float = 1e-8
    momentum_type: MomentumType = "float32"
    clip: float = 0.0  # the global norm of the gradient
    layer_decay: float = 1.0
    freeze: str = ""

    def __post_init__(self) -> None:
        for name, value, kinds in (("kind", self.kind, Kind), ("momentum_type", self.momentum_type, MomentumType)):
            if value not in get_args(kinds):
                raise unknown_name(f"optim.{name}", str(value), get_args(kinds))
        for name, is_valid, rule in (
            ("lr", self.lr > 0, "above 0"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("clip", self.clip >= 0, "at least 0"),
            ("momentum", 0 <= self.momentum < 1, "at least 0 and below 1"),
            ("second", 0 <= self.second < 1, "at least 0 and below 1"),
            ("eps", self.eps > 0, "above 0"),
            ("layer_decay", 0 < self.layer_decay <= 1, "above 0 and at most 1"),
        ):
            if not is_valid:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be {rule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up over `warmup` steps, then decay to `end` (a rate, for "linear", "cosine" and "poly") at the last
    step. "poly" falls as (1 - progress)^power. "steps" divides by ten at each of the milestones, given as fractions of
    the run (BiT). With `encoder_warmup` the encoder stays fixed while the head warms up, and then warms up over that
    many steps (EoMT): the first gradients of a new head carry little information for the encoder."""

    decay: Decay = "cosine"
    warmup: int = 0
    encoder_warmup: int = 0
    power: float = 0.9
    end: float = 0.0
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)

    def __post_init__(self) -> None:
        if self.decay not in get_args(Decay):
            raise unknown_name("schedule.decay", str(self.decay), get_args(Decay))
        if self.warmup < 0 or self.end < 0:
            raise ConfigError(f"schedule.warmup={self.warmup} and schedule.end={self.end} must be at least 0")
        if self.encoder_warmup < 0 or self.power <= 0:
            both = f"schedule.encoder_warmup={self.encoder_warmup} must be at least 0, schedule.power={self.power}"
            raise ConfigError(f"{both} above 0")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < at < 1 for at in self.milestones):
            raise ConfigError(f"schedule.milestones={self.milestones} must ascend between 0 and 1")
