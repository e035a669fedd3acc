"""A run as one value: what is trained, on what, and how. It goes through three stages, each with its own type:

- `RunRequest` may leave the network open: a fine-tuning recipe uses the network of the weights it is given (3.2).
- `Run` is configured: it has a network. What depends on the data and the machine may still be "auto". Recipes return
  a `RunRequest` or a `Run`, and the command line changes their fields.
- `ResolvedRun` has every choice made: nothing in it is None or "auto". `resolve` in `train/resolve.py` makes it from a
  run, its images and the processes. Whatever trains, scores or reports takes a `ResolvedRun`.

All three have the same fields in the same order, and are stored alike. In the later stages, `field()` marks fields that
have no default any more.
"""

from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin

from vitrail.core.config_overrides import field_types, union_members
from vitrail.core.errors import ConfigError, unknown_name
from vitrail.core.precision import Precision, PrecisionChoice
from vitrail.core.text import format_size
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Augmentation, Mix
from vitrail.distributed import parallel
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config
from vitrail.objectives.registry import ObjectiveConfig
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.classification.objective import Classification

OnOff: TypeAlias = Literal["on", "off"]
Compilation: TypeAlias = Literal["on", "graphs", "recorded", "off"]
RECORDED: Final = ("graphs", "recorded")  # of these
Switch: TypeAlias = Literal["auto", OnOff]
Compile: TypeAlias = Literal["auto", Compilation]
Sharding: TypeAlias = Literal["auto", parallel.Sharding]
Start: TypeAlias = Literal["zero", "closed-form"]
Positions: TypeAlias = Literal["resized", "drawn"]
PatchOrder: TypeAlias = Literal["drawn", "listed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Which images. `without` is a file written by `vitrail data dedup` that lists training images to leave out (4.1).
    `part` is the share of the rest to train on, stratified by class; with the same `part_seed`, a smaller part is
    contained in every larger one (4.3). `dev` is the share of that part held out for selection, also by class. `watch`
    is the split that is scored during training and that selects the best weights (auto: dev if there is one, else val;
    any: else test), and `test` is the split that is scored at the end (auto: test, if there is one)."""

    source: str = ""
    train: str = "train"
    without: str = ""
    part: float = 1.0
    part_seed: int = 0
    dev: float = 0.0
    watch: str = "auto"
    test: str = "auto"
    names: tuple[str, ...] = ()  # of the classes, in their order; empty for the data's own
    resident: Switch = "auto"  # keeps the whole set on the device and augments it there
    workers: int = -1  # loader processes; -1 chooses a number
    repeats: int = 1  # repeated augmentation
    strict: bool = False  # an unreadable image is an error

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise ConfigError(f"data.part={self.part} must be above 0 and at most 1")
        if not 0 <= self.dev < 1:
            raise ConfigError(f"data.dev={self.dev} must be at least 0 and below 1")
        if self.resident not in get_args(Switch):
            raise unknown_name("data.resident", str(self.resident), get_args(Switch))
        if self.repeats < 1 or self.workers < -1:
            raise ConfigError(f"data.repeats={self.repeats} must be at least 1, data.workers={self.workers} -1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Scoring during training, after every so many steps (0: twenty times per run). `fewshot` names a source on which
    closed-form few-shot accuracy is measured too (Section 4.1). With `patience`, a run stops after that many scores
    without an improvement (4.3)."""

    every: int = 0
    fewshot: str = ""
    shots: tuple[int, ...] = (5,)
    patience: int = 0

    def __post_init__(self) -> None:
        if self.every < 0 or self.patience < 0:
            raise ConfigError(f"evaluation.every={self.every}, evaluation.patience={self.patience} must not be below 0")
        if not self.shots or min(self.shots) < 1:
            raise ConfigError(f"evaluation.shots={self.shots} must be one number or more, each at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Checkpoints: every so many steps, or minutes if `steps` is 0. The newest `last` of them are kept."""

    steps: int = 0
    minutes: float = 10.0
    last: int = 2

    def __post_init__(self) -> None:
        if self.steps < 0 or self.minutes <= 0 or self.last < 1:
            rule = f"keep.steps={self.steps} must not be below 0, keep.minutes={self.minutes} must be above 0"
            raise ConfigError(f"{rule}, keep.last={self.last} at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """A training run as requested. `model` is None if the network comes from `weights` (fine-tuning, 3.2); the data set
    its classes. Either `steps` or `epochs` is above 0. `batch` is the global batch, whatever the number of processes
    and micro-batches."""

    name: str
    augmentation: Augmentation
    model: ModelConfig | None = None
    weights: str = ""
    start: Start = "zero"  # of the new head (3.2); closed-form: least squares on frozen features
    positions: Positions = "resized"  # of weights at another image size (3.2); drawn: initialised afresh
    patches: tuple[int, ...] = ()  # patch sizes to train at; none for the network's own
    patch_order: PatchOrder = "drawn"  # for every step (FlexiViT); listed: each for an equal share of the steps
    sizes: tuple[int, ...] = ()  # image sizes to train at, each for an equal share of the steps; none for the one size
    objective: ObjectiveConfig = field(default_factory=Classification)
    data: Data = field(default_factory=Data)
    mix: Mix = field(default_factory=Mix)
    preprocessing: Preprocessing | None = None  # for evaluation; None: that of the weights, or a plain resize
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    batch: int = 512
    micro: int = 0  # samples that a process computes at once; 0 for as many as fit
    steps: int = 0
    epochs: float = 0.0
    average: float = 0.0  # Polyak's factor, 0.9999 in the paper; 0 for none
    seed: int = 0
    precision: PrecisionChoice = "auto"  # float32 on a CPU, bfloat16 with float32 masters on a GPU
    compile: Compile = "auto"  # graphs: a step is compiled and recorded as a CUDA graph; recorded: recorded only
    recompute: bool = False  # recomputes activations in the backward pass instead of keeping them
    sharding: Sharding = "auto"
    evaluation: Scoring = field(default_factory=Scoring)
    keep: Keep = field(default_factory=Keep)
    baseline: Switch = "auto"  # closed form on frozen features, to compare with; auto: wherever it is possible
    log: int = 10  # steps between two rows of metrics
    bad_steps: int = 10  # updates skipped for a loss or gradient that is not finite, before the run gives up

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():  # fields that may not be None at this stage
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise unknown_name(name, str(value), get_args(hint))
            if value is None and NoneType not in union_members(hint):
                remedy = "; a fine-tuning run takes it from its weights" if name == "model" else ""
                raise ConfigError(f"{name} is not set{remedy}")
        if (self.steps > 0) == (self.epochs > 0) or self.steps < 0 or self.epochs < 0:
            raise ConfigError(f"steps={self.steps} and epochs={self.epochs}: give one of them, above 0")
        if self.batch < 1 or self.micro < 0 or self.log < 1 or self.bad_steps < 1:
            rule = f"batch={self.batch}, log={self.log} and bad_steps={self.bad_steps} must be at least 1"
            raise ConfigError(f"{rule}, micro={self.micro} not below 0")
        if self.patches and (min(self.patches) < 1 or len(set(self.patches)) < len(self.patches)):
            raise ConfigError(f"patches={self.patches} must be different patch sizes, each at least 1")
        if self.sizes and (min(self.sizes) < 1 or len(set(self.sizes)) < len(self.sizes)):
            raise ConfigError(f"sizes={self.sizes} must be different image sizes, each at least 1")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average={self.average} must be at least 0 and below 1")
        size = self.augmentation.size
        if self.model is not None and self.model.image != size:
            sizes = f"the network takes {format_size(self.model.image)} but the augmentation gives {format_size(size)}"
            raise ConfigError(f"{sizes}; --image-size sets both")
        if self.preprocessing is not None and self.preprocessing.image != size:
            image = format_size(self.preprocessing.image)
            raise ConfigError(f"preprocessing.image={image} but the network is trained at {format_size(size)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(RunRequest):
    """A training run as configured: its network is known."""

    model: ModelConfig = field()

    @property
    def networks(self) -> tuple[ModelConfig, ...]:
        """The network that is trained, or that network at each of the `patches` or `sizes`."""
        several = [adapt_config(self.model, patch=patch) for patch in self.patches]
        several += [adapt_config(self.model, image_size=size) for size in self.sizes]
        return tuple(several) or (self.model,)

    @property
    def macs_per_image(self) -> float:
        """Multiply-accumulates of one image in the forward pass, averaged over `networks`. A step takes three times as
        many."""
        networks = self.networks
        return sum(map(self.objective.macs_per_image, networks)) / len(networks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedData(Data):
    """Which images, with the names of the splits that are scored ("none" for none), and whether the images lie on the
    device. The number of loader processes may stay open: each start chooses it for its machine."""

    watch: str = field()
    test: str = field()
    resident: OnOff = field()

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        if "auto" in (self.watch, self.test, self.resident) or self.watch == "any":
            raise ConfigError(f"data.watch={self.watch}, data.test={self.test}, data.resident={self.resident} are open")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRun(Run):
    """A training run with every choice made for its images and its machine. Only `steps` gives its length."""

    data: ResolvedData = field()
    preprocessing: Preprocessing = field()
    micro: int = field()
    steps: int = field()
    precision: Precision = field()
    compile: Compilation = field()
    sharding: parallel.Sharding = field()
    baseline: OnOff = field()

    def __post_init__(self) -> None:
        RunRequest.__post_init__(self)
        if (least := min(self.steps, self.micro, self.evaluation.every)) < 1:
            raise ConfigError(f"steps, micro and evaluation.every must be at least 1 in a resolved run, not {least}")


AnyRun = TypeVar("AnyRun", bound=RunRequest)
Stage = TypeVar("Stage", bound=RunRequest | Data)


def to_stage(kind: type[Stage], old: RunRequest | Data, **changes: Any) -> Stage:
    """Converts a run, or its data, to the type of another stage, with changes as in `replace`."""
    return kind(**{field.name: getattr(old, field.name) for field in fields(old)} | changes)


def configure(run: RunRequest) -> Run:
    """The request as a configured run. ConfigError if it has no network."""
    return run if isinstance(run, Run) else to_stage(Run, run)
