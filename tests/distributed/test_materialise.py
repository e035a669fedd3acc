"""A network that was built without storage gets the values it would have had with it."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.distributed.pair import together
from tests.distributed.small import KINDS, inputs, wrapped
from tests.models.tiny import SOME, VARIANTS
from vitrail.distributed.meta_init import draw_parameters, gather_tensor, give_storage
from vitrail.distributed.parallel import Sharding, parallelise
from vitrail.distributed.process_group import World
from vitrail.models.build import build
from vitrail.models.family import ModelConfig
from vitrail.models.layers import initialise
from vitrail.tasks.classification.objective import ClassificationObjective

ALONE = World(device=torch.device("cpu"))


def hollow(config: ModelConfig) -> ClassificationObjective:
    with torch.device("meta"):
        network = build(config)
    return wrapped(network, config)


def drawn(learner: Any) -> None:
    """As `build` does it, from a fixed seed."""
    torch.manual_seed(5)
    draw_parameters(learner.network, initialise)


def expected(config: ModelConfig) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return dict(build(config).state_dict())


@pytest.mark.parametrize("name", SOME)
def test_drawn_weights_are_those_of_build(name: str) -> None:
    config = VARIANTS[name]
    learner = hollow(config)
    parallelise(learner, world=ALONE, values=drawn)
    after = torch.rand(1)
    found, values = learner.network.state_dict(), expected(config)
    assert list(found) == list(values)
    for key in values:
        assert torch.equal(found[key], values[key]), key
    assert torch.equal(torch.rand(1), after)  # so many numbers were drawn, no more
    buffers = dict(build(config).named_buffers())
    for key, buffer in learner.network.named_buffers():
        assert torch.equal(buffer, buffers[key]), key


def share(world: World, sharding: Sharding) -> list[str]:
    """Names of what is not as one process would have it."""
    wrong: list[str] = []
    for kind, config in KINDS.items():
        learner = hollow(config)
        parallel = parallelise(learner, world=world, sharding=sharding, values=drawn)
        values = expected(config)
        for name, tensor in learner.network.state_dict().items():
            found = gather_tensor(tensor, world)
            if world.is_main and not torch.equal(found, values[name]):
                wrong.append(f"{kind}: {name}")
        if not torch.isfinite(parallel(*inputs(kind)).total):
            wrong.append(f"{kind} does not run")
    return wrong


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("sharding", "size"),
    [pytest.param("fsdp", 2, marks=SLOW), pytest.param("ddp", 2, marks=SLOW), pytest.param("fsdp", 3, marks=SLOW)],
)
def test_drawn_weights_do_not_depend_on_the_world(sharding: Sharding, size: int) -> None:
    assert together(share, sharding, size=size) == [[]] * size


class Live(TorchFunctionMode):
    """The most numbers that blanks hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.full:
            self.now += out.numel()
            self.most = max(self.most, self.now)
            weakref.finalize(out, self.freed, out.numel())
        return out

    def freed(self, count: int) -> None:
        self.now -= count


def test_one_module_is_whole_at_a_time() -> None:
    network = hollow(KINDS["vit"]).network
    give_storage(network, ALONE.device)
    with Live() as live:
        draw_parameters(network, initialise)
    largest = max(
        sum(parameter.numel() for parameter in part.parameters())
        for part in network.modules()
        if not any(isinstance(child, nn.Linear) for inner in part.children() for child in inner.children())
    )
    assert 0 < live.most <= 2 * largest


def test_what_has_values_keeps_them() -> None:
    learner = hollow(KINDS["vit"])
    mean = learner.mean.clone()
    give_storage(learner, ALONE.device)
    assert torch.equal(learner.mean, mean)
    assert not any(parameter.is_meta for parameter in learner.parameters())
