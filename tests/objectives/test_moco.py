"""MoCo v3: the loss against a slow one, many processes as one, and what must not move."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.distributed.pair import together
from tests.objectives.digits import digits_network, digits_preprocessing, feature_rank, learnt_rows
from tests.objectives.taught import ALONE, MOCO, MODEL, STEPS, batch, contrast, difference, gradients
from tests.objectives.together import stepped
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.parallel import Sharding, parallelise
from vitrail.objectives.moco import MoCo, MoCoObjective, feature_spread, info_nce
from vitrail.objectives.objective import ObjectiveContext, ObjectiveOutput


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def test_info_nce_is_the_slow_one() -> None:
    torch.manual_seed(0)
    queries, keys = unit(4, 5), unit(9, 5)
    known = torch.tensor([True, False, True, True, True, True, False, True, True])
    losses, hits = info_nce(queries, keys, known, first=2, temperature=0.3)
    for row in range(4):
        own = (queries[row] @ keys[2 + row] / 0.3).exp()
        others = [(queries[row] @ keys[at] / 0.3).exp() for at in range(9) if known[at]]
        assert losses[row].item() == pytest.approx(-(own / sum(others)).log().item(), abs=1e-12)
        best = max((at for at in range(9) if known[at]), key=lambda at: float(queries[row] @ keys[at]))
        assert bool(hits[row]) == (best == 2 + row)


def slow(objective: MoCoObjective, views: tuple[Tensor, ...], valid: Tensor) -> tuple[Tensor, float, float]:
    """The whole loss by loops over the images that are there, with torch's own batch norms."""

    def head(mlp: Any, x: Tensor) -> Tensor:
        for at, (layer, norm) in enumerate(zip(mlp.layers, mlp.norms, strict=True)):
            x = F.batch_norm(layer(x), None, None, norm.weight, norm.bias, training=True)
            x = x.relu() if at < len(mlp.layers) - 1 else x
        return x

    images = [objective.normalise(view[valid]) for view in views]
    network: Any = objective.network
    queries = [F.normalize(head(objective.predictor, head(objective.projector, network(x))), dim=-1) for x in images]
    keys = [F.normalize(head(objective.teacher.head, objective.teacher.network(x)), dim=-1).detach() for x in images]
    total, hits, tau = torch.zeros((), dtype=torch.float64), 0, objective.config.temperature
    for one, other in ((0, 1), (1, 0)):
        for i, query in enumerate(queries[one]):
            similar = torch.stack([query @ key for key in keys[other]])
            total = total - 2 * tau * (similar / tau).log_softmax(0)[i]
            hits += int(similar.argmax() == i)
    stds = torch.stack([key.std(0, unbiased=False).mean() for key in keys]).mean() * keys[0].shape[1] ** 0.5
    return total, hits / 2, float(stds)


def test_the_objective_is_the_slow_one_with_its_gradients() -> None:
    objective = contrast().double()
    *views, valid = objective.inputs(batch(), seed=0, step=0)
    outcome: ObjectiveOutput = objective(*views, valid)
    outcome.total.backward()
    found = gradients(objective)
    objective.zero_grad()
    total, hits, width = slow(objective, tuple(views), valid)
    total.backward()
    assert outcome.total.item() == pytest.approx(total.item(), rel=1e-6)  # it is told in float32
    assert outcome.count.item() == 7
    assert outcome.tallies["agreement"].item() == pytest.approx(hits)
    assert outcome.tallies["spread"].item() == pytest.approx(7 * width, rel=1e-6)
    assert difference(found, gradients(objective)) < 1e-9


@pytest.mark.parametrize(
    ("sharding", "double"),
    [
        pytest.param("ddp", True, marks=pytest.mark.slow),
        pytest.param("ddp", False, marks=pytest.mark.slow),
        pytest.param("fsdp", False, marks=pytest.mark.slow),
    ],
)
def test_two_processes_do_what_one_does(sharding: Sharding, double: bool) -> None:
    """Loss, gradients, the step and the teacher after it."""
    alone = stepped(ALONE, "moco", "none", double)
    pair = together(stepped, "moco", sharding, double)[0]
    limit = 1e-12 if double else 5e-6  # a batch norm of seven rows makes much of rounding
    assert pair.total == pytest.approx(alone.total, rel=1e-6)
    assert pair.tallies == pytest.approx(alone.tallies, rel=1e-5)
    assert difference(pair.gradients, alone.gradients) < limit
    assert difference(pair.state, alone.state) < limit


def test_what_stands_where_no_picture_is_changes_nothing() -> None:
    one, other = (contrast() for _ in range(2))
    given = batch(absent=(0, 5))
    for view in given.views:
        view[~given.valid] = 0
    first: ObjectiveOutput = one(*one.inputs(given, seed=0, step=0))
    first.total.backward()
    for view in given.views:
        view[~given.valid] = 255
    second: ObjectiveOutput = other(*other.inputs(given, seed=0, step=0))
    second.total.backward()
    assert torch.allclose(first.total, second.total, rtol=1e-6)
    assert first.tallies["spread"].item() == pytest.approx(second.tallies["spread"].item(), rel=1e-6)
    assert difference(gradients(one), gradients(other)) < 1e-6


def test_a_batch_without_pictures_is_worth_nothing_and_breaks_nothing() -> None:
    objective = contrast()
    outcome: ObjectiveOutput = objective(*objective.inputs(batch(absent=tuple(range(8))), seed=0, step=0))
    outcome.total.backward()
    assert (outcome.total.item(), outcome.count.item()) == (0.0, 0.0)
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients(objective).values())


def test_the_teacher_has_no_gradient_and_the_embedding_stays() -> None:
    objective = contrast()
    optimiser = torch.optim.AdamW((p for p in objective.parameters() if p.requires_grad), lr=0.1)
    before = {name: parameter.clone() for name, parameter in objective.named_parameters()}
    outcome: ObjectiveOutput = objective(*objective.inputs(batch(), seed=0, step=0))
    outcome.total.backward()
    optimiser.step()
    same = {name for name, p in objective.named_parameters() if torch.equal(p, before[name])}
    teacher = {name for name in before if name.startswith("teacher.")}
    assert same == teacher | {"network.embedding.projection.weight", "network.embedding.projection.bias"}
    assert all(p.grad is None for p in objective.teacher.parameters())
    objective.after_step(STEPS // 2)
    for name in ("network.norm.weight", "projector.layers.1.weight"):
        student = objective.get_parameter(name)
        old = before["teacher." + name.replace("projector", "head")]
        new = objective.get_parameter("teacher." + name.replace("projector", "head"))
        assert torch.allclose(new, 0.995 * old + 0.005 * student, atol=1e-7)
    free = contrast(config=replace(MOCO, frozen_embedding=False))
    assert free.network.embedding.projection.weight.requires_grad


def test_spread_tells_a_collapse() -> None:
    torch.manual_seed(0)
    known = torch.ones(500, dtype=torch.bool)
    assert feature_spread(unit(2, 500, 16), known).item() == pytest.approx(1.0, abs=0.02)
    assert feature_spread(unit(1, 1, 16).expand(2, 500, 16), known).item() == pytest.approx(0.0, abs=1e-6)
    flat = torch.zeros(2, 500, 16)
    flat[..., 0] = torch.tensor([1.0, -1.0]).repeat(250)  # one dimension of sixteen is left
    assert feature_spread(flat, known).item() == pytest.approx(0.25, abs=1e-6)


def test_its_state_comes_back() -> None:
    one = contrast()
    one(*one.inputs(batch(), seed=0, step=0)).total.backward()
    one.after_step(3)
    other = contrast()
    other.load_state_dict(one.state_dict())
    inputs = one.inputs(batch(seed=2), seed=0, step=4)
    assert torch.equal(one(*inputs).total, other(*inputs).total)


@pytest.mark.slow
def test_forward_is_one_graph() -> None:
    objective = contrast(depth=1)
    inputs = objective.inputs(batch(), seed=0, step=0)
    torch.compiler.reset()  # of what other tests have compiled
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    outcome: ObjectiveOutput = compiled(*inputs)
    outcome.total.backward()
    found = gradients(objective)
    objective.zero_grad()
    expected: ObjectiveOutput = objective(*inputs)
    expected.total.backward()
    assert torch.allclose(outcome.total, expected.total, rtol=1e-6)
    assert difference(found, gradients(objective)) < 1e-6


@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_in_bfloat16_weights_and_gradients_stay_float32(position: str) -> None:
    exact = contrast(position=position)
    inputs = exact.inputs(batch(), seed=0, step=0)
    expected: ObjectiveOutput = exact(*inputs)
    low = contrast(position=position)
    outcome: ObjectiveOutput = parallelise(low, world=ALONE, precision="bfloat16")(*inputs)
    outcome.total.backward()
    assert outcome.total.dtype == torch.float32
    assert outcome.total.item() == pytest.approx(expected.total.item(), rel=0.1)
    assert all(gradient.dtype == torch.float32 for gradient in gradients(low).values())


def test_work_counts_a_pass_without_gradient_as_a_third() -> None:
    config = MoCo(hidden=20, width=12)
    project, predict = 16 * 20 + 20 * 20 + 20 * 12, 12 * 20 + 20 * 12
    expected = 2 * (MODEL.macs + project + predict) + 2 / 3 * (MODEL.macs + project)
    assert config.macs_per_image(MODEL) == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"momentum": 1.1}, {"hidden": 0}, {"width": 0}])
def test_nonsense_is_refused(changes: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        MoCo(**changes)


@pytest.mark.slow
def test_it_learns_digits_without_collapse() -> None:
    config = MoCo(hidden=64, width=32, momentum=0.9)
    objective = MoCoObjective(digits_network(), config, ObjectiveContext(0, digits_preprocessing(), Mix(), 40, ALONE))
    before = feature_rank(objective)
    rows = learnt_rows(objective, steps=40, rate=5e-3)
    first, last = rows[:8].mean(0), rows[-8:].mean(0)
    assert last[0] < 0.93 * first[0]  # loss
    assert last[1] > 1.5 * first[1]  # agreement
    assert last[2] > 0.9  # spread
    assert feature_rank(objective) > 0.5 * before
