"""A network with queries of a few hundred weights that only looks like one, and batches with segments."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.segment_targets import pack_masks
from vitrail.data.targets import Target, TargetSegments
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.objectives.objective import Objective, ObjectiveContext
from vitrail.tasks.mask_queries.objective import MaskQueries, MaskQueriesObjective, PanopticQueries
from vitrail.train.step import TrainingStep

IMAGE, CLASSES, COUNT, SEED, STEPS = (16, 20), 5, 6, 3, 60
PLAIN = Preprocessing(image=IMAGE)
NO_SEGMENTS, UNREADABLE = 1, 4  # places of the batch


@dataclass
class SmallConfig:
    queries: int = 7
    query_blocks: int = 2
    classes: int = CLASSES
    image: tuple[int, int] = IMAGE
    has_queries: bool = True
    title: str = "small"
    macs: int = 1000
    masked_calls: list[int] = field(default_factory=list[int])


class SmallQueries(nn.Module):
    """Patches of 4 pixels; each layer turns the queries a bit, those that are masked in it a bit more."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.queries = nn.Parameter(torch.randn(config.queries, 8))
        self.turns = nn.ModuleList(nn.Linear(8, 8) for _ in range(config.query_blocks))
        self.classifier = nn.Linear(8, config.classes + 1)

    def forward_layers(self, images: Tensor, masked: Tensor | None = None) -> list[Any]:
        from vitrail.models.query_output import QueryOutput

        patches = self.patches(images)
        z = self.queries + patches.mean((2, 3))[:, None]
        found: list[Any] = []
        for layer in range(len(self.turns) + 1):
            found.append(QueryOutput(self.classifier(z), torch.einsum("bqd,bdhw->bqhw", z, patches)))
            if layer < len(self.turns):
                more = 0.0 if masked is None else masked[:, layer, :, None].float()
                z = z + torch.tanh(self.turns[layer](z)) * (1 + more)
        return found

    def set_masked_blocks(self, count: int) -> None:
        self.config.masked_calls.append(count)


def make_objective(config: MaskQueries | None = None, world: World | None = None) -> MaskQueriesObjective:
    torch.manual_seed(0)
    network: Any = SmallQueries(SmallConfig())
    made = (config or PanopticQueries()).build(network, context(world))
    assert isinstance(made, MaskQueriesObjective)
    return made


def context(world: World | None = None) -> ObjectiveContext:
    return ObjectiveContext(CLASSES, PLAIN, Mix(), STEPS, world or World(device=torch.device("cpu")))


def make_batch(*, semantic: bool = False) -> Batch:
    """Six images of 0 to 5 segments, of which one is a crowd; one image could not be read."""
    g = torch.Generator().manual_seed(1)
    noise = F.interpolate(torch.randn(COUNT, 8, 4, 5, generator=g), IMAGE, mode="bilinear")
    classes = torch.randint(CLASSES, (COUNT, 8), generator=g)
    numbers = torch.tensor([5, 0, 2, 1, 3, 4])
    classes[torch.arange(8) >= numbers[:, None]] = -1
    crowd = torch.zeros(COUNT, 8, dtype=torch.bool)
    crowd[5, 2] = True
    target: Target = TargetSegments(pack_masks(noise > 0), classes, crowd)
    if semantic:
        target = torch.where(noise[:, 0] > 1, 255, noise[:, 1:6].argmax(1)).byte()
        target[NO_SEGMENTS] = 255
    return Batch(
        step=0,
        views=(torch.randint(0, 256, (COUNT, 3, *IMAGE), generator=g).byte(),),
        targets=(target,),
        sample=torch.arange(COUNT),
        epoch=torch.zeros(COUNT, dtype=torch.int64),
        valid=torch.arange(COUNT) != UNREADABLE,
    )


def take(given: Batch, places: list[int]) -> Batch:
    return given.map_tensors(lambda tensor: tensor[places])


class Left(NamedTuple):
    """The loss of a step and its parts, and its gradients by name, over all micro-batches and processes."""

    loss: float
    count: float
    tallies: dict[str, float]
    gradients: dict[str, Tensor]


def run_step(
    objective: Objective, batch: Batch, *, micro: int, world: World | None = None, sharding: Any = "none"
) -> Left:
    from vitrail.distributed.parallel import parallelise

    world = world or World(device=torch.device("cpu"))
    parallel = parallelise(objective, world=world, sharding=sharding)
    unused: Any = None
    run: Any = SimpleNamespace(seed=SEED, sizes=())
    step = TrainingStep(objective, parallel, unused, None, world, run)
    output = step.compute_gradients(step.prepare_inputs(batch, STEPS // 2), STEPS // 2, micro)
    names = list(output.tallies)
    sums = world.sum_(torch.stack([output.total, output.count, *output.tallies.values()]))
    count = sums[1].clamp(min=1)
    gradients = {
        name: parameter.grad * parallel.gradient_factor / count
        for name, parameter in objective.named_parameters()
        if parameter.grad is not None
    }
    tallies = dict(zip(names, (sums[2:] / count).tolist(), strict=True))
    return Left(float(sums[0] / count), float(sums[1]), tallies, gradients)
