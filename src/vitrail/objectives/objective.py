"""The interface between the loop and an objective: a batch becomes inputs, inputs become a sum, a count and tallies."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from vitrail.core.config_overrides import Choice
from vitrail.core.errors import ConfigError
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing, normalise_pixels
from vitrail.data.transforms.augmentation import Augmentation, Mix
from vitrail.distributed.process_group import World
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig


class ObjectiveOutput(NamedTuple):
    """The result of a micro-batch. The loss of a step is Σ total / Σ count over micro-batches and processes, so that
    accumulation is exact. Every tally is a sum over samples, too (divide by the count for a mean). All are 0-dim,
    float32."""

    total: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts the fields of an outcome
    tallies: dict[str, Tensor]


class ObjectiveContext(NamedTuple):
    """What an objective is built with: the number of classes, preprocessing, mixing, length of the run, processes."""

    classes: int
    preprocessing: Preprocessing
    mix: Mix
    steps: int
    world: World


class ObjectiveConfig(Choice, ABC):
    """An objective's configuration, as frozen data. Registered objectives are known to --set by name."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every objective's config is a frozen dataclass

    task: ClassVar[str] = ""  # the task whose targets it needs; empty if it learns from images alone
    needs_whole_batch: ClassVar[bool] = False  # the loss of a sample depends on its batch: no accumulation

    @classmethod
    def list_registered(cls) -> tuple[type[Any], ...]:
        return tuple(sorted(OBJECTIVES, key=lambda config: not config.task))  # independent of the import order

    @property
    def labelled(self) -> bool:
        """Whether it learns from targets rather than from the images alone."""
        return bool(self.task)

    def check_numbers(self, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
        """Raises ConfigError for a field whose value breaks a rule."""
        for name in names:
            if not holds(value := getattr(self, name)):
                raise ConfigError(f"objective.{name}={value} must {rule}")

    def views(self, augmentation: Augmentation) -> tuple[Augmentation, ...]:
        """The views of each image that a batch must hold."""
        return (augmentation,)

    def check_model(self, model: ModelConfig) -> ModelConfig:
        """The model, checked; raises where this objective cannot train it."""
        return model

    def prepare_head(self, network: Backbone) -> None:
        """Initialises the last layer of a fresh network with values other than zeros, if the objective needs them."""

    @abstractmethod
    def macs_per_image(self, model: ModelConfig) -> float:
        """Multiply-accumulates of one image in the forward pass. A step takes three times as many: once forward, twice
        backward."""

    @abstractmethod
    def build(self, network: Backbone, context: ObjectiveContext) -> "Objective":
        """Builds the objective around a network, with the heads it needs."""


OBJECTIVES: list[type[ObjectiveConfig]] = []


def register_objective(config: type[ObjectiveConfig]) -> None:
    """Makes an objective known to --set by the name of its config."""
    if config not in OBJECTIVES:
        OBJECTIVES.append(config)


class Objective(nn.Module, ABC):
    """A module that owns the network and the heads and teachers it needs. `inputs` runs eagerly and may draw random
    numbers; `forward` is compiled and sharded, so it must be a pure function of tensors.

    Heads are initialised when the objective is built, under a seed that the caller has set. `on_start` is called once
    the network has its initial weights, and before a checkpoint is restored. All state is in the state dict.
    """

    network: Backbone
    config: Any  # an ObjectiveConfig; each objective declares its own
    mean: Tensor
    std: Tensor

    def __init__(self, network: Backbone, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.network = network
        mean, std = preprocessing.channel_tensors()
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalises bytes [B, 3, H, W] for the network, in float32."""
        return normalise_pixels(pixels, self.mean, self.std)

    @abstractmethod
    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """The inputs of `forward` for a batch that is already on the device. Random choices depend on (seed, step)."""

    def normalisers(self, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """What the losses are divided by, if that is more than a count of samples: sums [n] over this process's part of
        a step. The sums of the whole step are appended to its inputs as [B, n], the same for every sample, so that the
        loss does not depend on how the batch is split."""
        del inputs
        return None

    @abstractmethod
    def forward(self, *inputs: Tensor) -> ObjectiveOutput: ...

    def views(self, augmentation: Augmentation) -> tuple[Augmentation, ...]:
        """The views of each image that a batch must hold."""
        return self.config.views(augmentation)

    def on_start(self) -> None:
        """Called once the network has its initial weights. A teacher is copied from it here."""

    def set_progress(self, done: int) -> None:
        """Sets what the network does differently after `done` steps: for a run that resumes, and for weights of an
        earlier step while they are scored."""

    def after_step(self, step: int) -> None:
        """Called after each update: a teacher follows the student here."""

    @property
    def eval_network(self) -> Backbone:
        """The network that is evaluated and saved: for some objectives the teacher, which is better."""
        return self.network
