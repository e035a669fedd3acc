"""However an objective is spread over processes, it learns what one process would."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.pair import together
from tests.distributed.small import KINDS, LATER, dealt, inputs, objective
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.core.precision import Precision
from vitrail.distributed.meta_init import gather_tensor
from vitrail.distributed.parallel import Parallel, Sharding, parallelise, shard_units
from vitrail.distributed.process_group import World

ALONE = World(device=torch.device("cpu"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    kind: str = "vit"
    sharding: Sharding = "none"
    precision: Precision = "float32"
    micro: int = 1
    recompute: bool = False
    compile: bool = False
    steps: int = 10


def step(parallel: Parallel, batch: tuple[Tensor, ...], micro: int) -> float:
    """Gradients of one batch, by micro-batches, and the sum of its losses here."""
    total = 0.0
    for at in range(micro):
        with parallel.micro(last=at == micro - 1):
            outcome = parallel(*(tensor.chunk(micro)[at] for tensor in batch))
            outcome.total.backward()
            total += outcome.total.item()
    return total


def learn(world: World, way: Way) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The first gradients and the last weights of a few steps of SGD, whole, and the first loss."""
    learner = objective(way.kind)
    names = [name for name, _ in learner.named_parameters()]
    parallel = parallelise(
        learner,
        world=world,
        sharding=way.sharding,
        precision=way.precision,
        compile=way.compile,
        recompute=way.recompute,
    )
    assert names == [name for name, _ in learner.named_parameters()] == list(learner.state_dict())
    first: dict[str, Tensor] = {}
    loss = 0.0
    for at in range(way.steps):
        torch.manual_seed(at)
        total = step(parallel, dealt(inputs(way.kind, seed=at), world.rank, world.size), way.micro)
        gradients = {name: parameter.grad for name, parameter in learner.named_parameters()}
        if not first:
            loss = world.sum_(torch.tensor(total)).item()
            first = {
                name: gather_tensor(grad, world) * parallel.gradient_factor
                for name, grad in gradients.items()
                if grad is not None
            }
        with torch.no_grad():
            for parameter in learner.parameters():
                assert parameter.grad is not None
                assert parameter.grad.dtype == torch.float32
                parameter -= 0.02 * parallel.gradient_factor / 8 * parameter.grad
                parameter.grad = None
    return first, {name: gather_tensor(parameter, world) for name, parameter in learner.named_parameters()}, loss


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, in units of the largest value."""
    assert list(found) == list(expected)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / scale


def several(world: World, ways: list[Way]) -> list[Any]:
    return [learn(world, way) for way in ways]


PLACES: list[tuple[Sharding, int]] = [("ddp", 1), ("fsdp", 1), ("hsdp", 1), ("hsdp", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "nodes"), PLACES)
def test_two_processes_learn_what_one_does(sharding: Sharding, nodes: int) -> None:
    ways = [Way(sharding=sharding), Way(sharding=sharding, micro=2, recompute=True)]
    first_alone, last_alone, loss_alone = learn(ALONE, Way())
    for way, (first, last, loss) in zip(ways, together(several, ways, nodes=nodes)[0], strict=True):
        assert loss == pytest.approx(loss_alone, rel=1e-6), way
        assert apart(first, first_alone) < 1e-6, way
        assert apart(last, last_alone) < 1e-5, way


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_convolutions_too(sharding: Sharding) -> None:
    """First gradients only: in ten steps a ReLU's kink makes of rounding what it likes."""
    ways = [Way(sharding=sharding, kind=kind, steps=1, micro=2) for kind in ("resnet", "hybrid")]
    for way, (first, _, loss) in zip(ways, together(several, ways)[0], strict=True):
        first_alone, _, loss_alone = learn(ALONE, Way(kind=way.kind, steps=1))
        assert loss == pytest.approx(loss_alone, rel=1e-6), way
        assert apart(first, first_alone) < 1e-6, way


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_later_families_too(sharding: Sharding) -> None:
    """In both precisions, with blocks that are computed again: what they know of places travels with their inputs. In
    bfloat16 both ways are off by rounding, which is how far one process alone is from float32."""
    ways = [Way(sharding=sharding, kind=kind, steps=1, micro=2, recompute=True) for kind in LATER]
    ways += [replace(way, precision="bfloat16") for way in ways]
    for way, (first, _, loss) in zip(ways, together(several, ways)[0], strict=True):
        first_alone, _, loss_alone = learn(ALONE, Way(kind=way.kind, precision=way.precision, steps=1))
        exact = way.precision == "float32"
        rounding = 0.0 if exact else apart(first_alone, learn(ALONE, Way(kind=way.kind, steps=1))[0])
        assert loss == pytest.approx(loss_alone, rel=1e-6 if exact else 1e-2), way
        assert apart(first, first_alone) < (1e-6 if exact else 2 * rounding), way


@pytest.mark.slow
def test_four_processes_on_two_nodes() -> None:
    first, last, _ = together(learn, Way(sharding="hsdp"), size=4, nodes=2)[0]
    first_alone, last_alone, _ = learn(ALONE, Way())
    assert apart(first, first_alone) < 1e-6
    assert apart(last, last_alone) < 1e-5


@pytest.mark.slow
def test_bfloat16_weights_have_float32_masters() -> None:
    kinds = ("vit", "sine", "hybrid")
    exact = {kind: learn(ALONE, Way(kind=kind, steps=1)) for kind in kinds}
    low = {kind: learn(ALONE, Way(kind=kind, steps=1, precision="bfloat16")) for kind in kinds}
    for kind in kinds:
        assert 1e-6 < apart(low[kind][0], exact[kind][0]) < 0.05
    ways = [Way(kind=kind, sharding=way, precision="bfloat16", steps=1) for kind in kinds for way in ("ddp", "fsdp")]
    for way, (first, last, _) in zip(ways, together(several, ways)[0], strict=True):
        # Rounding of partial sums moves an element of a gradient, nothing else.
        assert apart(first, low[way.kind][0]) < 0.02, way
        assert all(tensor.dtype == torch.float32 for tensor in last.values())


@pytest.mark.slow
def test_autocast() -> None:
    exact, low = learn(ALONE, Way(steps=1))[0], learn(ALONE, Way(steps=1, precision="autocast"))[0]
    assert 1e-6 < apart(low, exact) < 0.05
    ways = [Way(sharding=way, precision="autocast", steps=1) for way in ("ddp", "fsdp")]
    for first, _, _ in together(several, ways)[0]:
        assert apart(first, low) < 0.02


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_recomputing_changes_no_bit(precision: Precision) -> None:
    ways = [Way(kind="dropout", precision=precision, recompute=recompute, steps=2) for recompute in (False, True)]
    kept, recomputed = (learn(ALONE, way)[1] for way in ways)
    for name in kept:
        assert torch.equal(kept[name], recomputed[name]), name


def test_recomputing_keeps_less() -> None:
    kept: list[int] = []
    for recompute in (False, True):
        parallel = parallelise(objective("vit"), world=ALONE, recompute=recompute)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, sizes=sizes: sizes.append(tensor.numel()), bool):
            parallel(*inputs("vit"))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


@contextmanager
def quick_compiler() -> Iterator[None]:
    """The graphs of a compiled module without their kernels, which would take minutes to build."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of torch
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        yield


def compiled(world: World, ways: list[Way]) -> list[Any]:
    with quick_compiler():
        return several(world, ways)


@pytest.mark.slow
def test_one_network_after_another_is_compiled_in_one_process() -> None:
    """Torch compiles so many networks for a piece of code, and then runs others as they are, without a word."""
    frames, seen = torch._dynamo.utils.counters["frames"], list[int]()
    with quick_compiler(), torch._dynamo.config.patch(recompile_limit=2):
        for kind in ("vit", "sine", "resnet", "hybrid"):
            parallel, before = parallelise(objective(kind), world=ALONE, compile=True), frames["ok"]
            parallel(*inputs(kind))
            seen.append(frames["ok"] - before)
    assert min(seen) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_compiled_is_the_same(precision: Precision, recompute: bool) -> None:
    (found,) = compiled(ALONE, [Way(precision=precision, recompute=recompute, steps=1, compile=True)])
    expected = learn(ALONE, Way(precision=precision, steps=1))
    assert apart(found[0], expected[0]) < (1e-6 if precision == "float32" else 0.02)


@pytest.mark.slow
def test_compiled_in_two_processes() -> None:
    ways = [Way(sharding=way, steps=2, compile=True, recompute=True, micro=2) for way in ("ddp", "fsdp")]
    expected = learn(ALONE, Way(steps=2))
    for first, last, _ in together(compiled, ways, patience_s=200)[0]:
        assert apart(first, expected[0]) < 1e-6
        assert apart(last, expected[1]) < 1e-5


class Collectives(TorchDispatchMode):
    """Counts what goes to other processes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(world: World, sharding: Sharding) -> list[dict[str, int]]:
    """Collectives of each of three micro-batches."""
    parallel = parallelise(objective("vit"), world=world, sharding=sharding)
    for _ in range(2):  # DDP settles its buckets in the second step
        step(parallel, dealt(inputs("vit"), world.rank, world.size), 1)
    counts: list[dict[str, int]] = []
    for at in range(3):
        with Collectives() as seen, parallel.micro(last=at == 2):
            parallel(*dealt(inputs("vit"), world.rank, world.size)).total.backward()
        counts.append(dict(seen.counts))
    return counts


def shared(world: World) -> dict[str, float]:
    """How far the weights of FSDP are from those of DDP after three steps."""
    kinds = ("vit", "resnet", "hybrid")
    ways = [[learn(world, Way(kind=kind, sharding=way, steps=3))[1] for way in ("fsdp", "ddp")] for kind in kinds]
    return {kind: apart(*pair) for kind, pair in zip(kinds, ways, strict=True)} if world.is_main else {}


@pytest.mark.slow
def test_sharded_and_replicated_learn_the_same() -> None:
    distances = together(shared)[0]
    assert max(distances.values()) < 1e-6, distances


@pytest.mark.slow
def test_gradients_travel_once_a_step() -> None:
    for counts in together(count, "ddp"):
        assert [sum(one.values()) for one in counts[:2]] == [0, 0]
        assert set(counts[2]) == {"allreduce_"}
    blocks = len(shard_units(objective("vit")))
    for counts in together(count, "fsdp"):
        scattered = [one.get("_reduce_scatter_base_", 0) for one in counts]
        assert scattered == [0, 0, blocks + 1]
        # Weights are gathered for the forward and, but for the rest around the blocks, for the backward pass.
        assert [one["_allgather_base_"] for one in counts] == [2 * blocks + 1] * 3


def question(network: nn.Module, images: Tensor) -> Tensor:
    return network(images)


def answers(world: World, sharding: Sharding, precision: Precision) -> Tensor:
    learner = objective("vit")
    targets: set[torch.dtype] = set()
    learner.register_forward_pre_hook(lambda _, inputs: targets.add(inputs[1].dtype))
    parallel = parallelise(learner, world=world, sharding=sharding, precision=precision)
    parameters = list(learner.parameters())
    images = torch.linspace(-1, 1, 4 * 3 * 6 * 12).view(4, 3, 6, 12)
    first = parallel.evaluate_with(question, images).float()
    # Asking leaves no trace: the parameters are where they were, the answer is the same again, and a step goes on.
    assert all(before is after for before, after in zip(parameters, learner.parameters(), strict=True))
    assert torch.equal(first, parallel.evaluate_with(question, images).float())
    step(parallel, dealt(inputs("vit"), world.rank, world.size), 1)
    weight = dict(learner.named_parameters())["network.head.classifier.weight"]
    assert weight.grad is not None
    assert targets == {torch.float32}  # whatever the network computes in
    return first


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_questions_are_answered_wherever_the_weights_are(precision: Precision) -> None:
    expected = answers(ALONE, "none", precision)
    for sharding in ("ddp", "fsdp"):
        for found in together(answers, sharding, precision):
            torch.testing.assert_close(found, expected, atol=1e-5 if precision == "float32" else 0.02, rtol=0)


def test_units_are_the_blocks() -> None:
    assert [type(unit).__name__ for unit in shard_units(objective("vit"))] == ["Block"] * 2
    assert [type(unit).__name__ for unit in shard_units(objective("resnet"))] == ["PreActivationUnit"] * 3
    assert len(shard_units(objective("hybrid"))) == 3 + KINDS["hybrid"].depth  # type: ignore[union-attr]


def test_mistakes() -> None:
    two = World(device=torch.device("cpu"), size=2, local_size=1)
    with pytest.raises(ConfigError, match="sharding='none' is for one process, and there are 2"):
        parallelise(objective("vit"), world=two, sharding="none")
    with pytest.raises(UnknownName, match="unknown sharding 'fsdp3'; did you mean fsdp"):
        parallelise(objective("vit"), world=two, sharding="fsdp3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="3 are not a multiple of the 2 here"):
        parallelise(objective("vit"), world=World(device=two.device, size=3, local_size=2), sharding="hsdp")
    with pytest.raises(ValueError, match="nothing gives it values"):
        parallelise(objective("vit").to("meta"), world=ALONE)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "hsdp"])
def test_one_process_has_nothing_to_share_out(sharding: Sharding) -> None:
    learner = objective("vit")
    parallel = parallelise(learner, world=ALONE, sharding=sharding)
    assert parallel.gradient_factor == 1
    assert all(type(parameter) is nn.Parameter for parameter in learner.parameters())
