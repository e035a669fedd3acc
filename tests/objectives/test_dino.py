"""DINO: the loss against a slow one, centring over micro-batches and processes, and signs of a collapse."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.distributed.pair import together
from tests.objectives.digits import digits_network, digits_preprocessing, feature_rank, learnt_rows
from tests.objectives.taught import ALONE, DINO_, MODEL, STEPS, batch, difference, distil, gradients
from tests.objectives.together import stepped
from vitrail.core.errors import ConfigError
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.parallel import Sharding, parallelise
from vitrail.models.resnet_config import ResNetConfig
from vitrail.objectives.dino import DINO, DINOObjective, distillation_loss
from vitrail.objectives.multicrop import represent_at
from vitrail.objectives.objective import ObjectiveContext, ObjectiveOutput


def slow(
    objective: DINOObjective, views: list[Tensor], valid: Tensor, temperature: float
) -> tuple[Tensor, float, Tensor]:
    """The summed loss and entropy by loops over images and pairs of views, and the teacher's answers."""
    network: Any = objective.network
    images = [objective.normalise(view) for view in views]
    assert objective.at is not None
    told = [objective.head(represent_at(network, view, objective.at)) for view in images]
    with torch.no_grad():
        answers = [objective.teacher.head(objective.teacher.network(view)) for view in images[:2]]
    total, entropy = torch.zeros((), dtype=torch.float64), 0.0
    for i in valid.nonzero()[:, 0].tolist():
        pairs: list[Tensor] = []
        for t, answer in enumerate(answers):
            p = ((answer[i] - objective.centre) / temperature).softmax(0)
            entropy += float(-(p * p.log()).sum()) / 2
            pairs += [
                -(p * (view[i] / objective.config.student_temperature).log_softmax(0)).sum()
                for v, view in enumerate(told)
                if v != t
            ]
        assert len(pairs) == 2 * (len(views) - 1)
        total = total + torch.stack(pairs).mean()
    return total, entropy, torch.stack(answers)[:, valid]


def test_the_objective_is_the_slow_one_with_its_gradients_and_centre() -> None:
    objective = distil().double()
    *views, valid, temperature = objective.inputs(batch(small=3), seed=0, step=0)
    outcome: ObjectiveOutput = objective(*views, valid, temperature)
    outcome.total.backward()
    found = gradients(objective)
    objective.zero_grad()
    centre = objective.centre.clone()
    total, entropy, answers = slow(objective, views, valid, float(temperature[0]))
    total.backward()
    assert outcome.total.item() == pytest.approx(total.item(), rel=1e-6)  # it is told in float32
    assert outcome.count.item() == 7
    assert outcome.tallies["teacher_entropy"].item() == pytest.approx(entropy, rel=1e-6)
    assert outcome.tallies["kl"].item() == pytest.approx(total.item() - entropy, rel=1e-5)
    assert difference(found, gradients(objective)) < 1e-9
    objective.after_step(0)
    assert torch.allclose(objective.centre, 0.9 * centre + 0.1 * answers.mean((0, 1)), rtol=0, atol=1e-12)


def test_distillation_leaves_out_pairs_of_the_same_view() -> None:
    torch.manual_seed(0)
    told, target = torch.randn(2, 3, 5), torch.randn(2, 3, 5).log_softmax(-1)
    losses, _ = distillation_loss(told, target)
    crossed = F.cross_entropy(told[1], target[0].exp(), reduction="none")
    crossed += F.cross_entropy(told[0], target[1].exp(), reduction="none")
    assert torch.allclose(losses, crossed / 2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "double"),
    [
        pytest.param("ddp", True, marks=pytest.mark.slow),
        ("ddp", False),
        pytest.param("fsdp", False, marks=pytest.mark.slow),
    ],
)
def test_two_processes_do_what_one_does(sharding: Sharding, double: bool) -> None:
    """Loss, gradients, the step, the teacher and the centre after it; in micro-batches, too."""
    alone = stepped(ALONE, "dino", "none", double)
    assert "centre" in alone.state
    limit = 1e-12 if double else 2e-6
    for micro in (1, 2):
        pair = together(stepped, "dino", sharding, double, micro)[0]
        assert pair.total == pytest.approx(alone.total, rel=1e-6)
        assert pair.tallies == pytest.approx(alone.tallies, rel=1e-5)
        assert difference(pair.gradients, alone.gradients) < limit
        assert difference(pair.state, alone.state) < limit


def test_micro_batches_give_the_loss_and_centre_of_the_whole_batch() -> None:
    whole, parts = (stepped(ALONE, "dino", "none", True, micro) for micro in (1, 4))
    assert parts.total == pytest.approx(whole.total, rel=1e-6)
    assert difference(parts.gradients, whole.gradients) < 1e-10
    assert torch.allclose(parts.state["centre"], whole.state["centre"], rtol=0, atol=1e-12)


def test_a_step_that_broke_off_and_comes_again_counts_once() -> None:
    once, twice = distil(), distil()
    for objective, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            inputs = objective.inputs(batch(small=3), seed=0, step=0)
            objective(*(tensor[:4] for tensor in inputs) if times == 2 and _ == 0 else inputs)
        objective.after_step(0)
    assert torch.equal(once.centre, twice.centre)


def test_numbers_that_are_none_leave_no_mark_on_the_centre() -> None:
    objective = distil()
    inputs = objective.inputs(batch(small=3), seed=0, step=0)
    before = objective.centre.clone()
    weight = objective.teacher.head.layers[0].weight
    with torch.no_grad():
        weight[0, 0] = torch.nan
    objective(*inputs)
    objective.after_step(0)
    assert torch.equal(objective.centre, before)
    none = objective.inputs(batch(small=3, absent=tuple(range(8))), seed=0, step=1)
    with torch.no_grad():
        weight[0, 0] = 0.0
    assert objective(*none).total.item() == 0
    objective.after_step(1)
    assert torch.equal(objective.centre, before)


def test_what_stands_where_no_picture_is_changes_nothing() -> None:
    one, other = distil(), distil()
    given = batch(small=3, absent=(0, 5))
    found: list[ObjectiveOutput] = []
    for objective, value in ((one, 0), (other, 255)):
        for view in given.views:
            view[~given.valid] = value
        found.append(objective(*objective.inputs(given, seed=0, step=0)))
        found[-1].total.backward()
        objective.after_step(0)
    assert torch.equal(found[0].total, found[1].total)
    assert difference(gradients(one), gradients(other)) < 1e-6
    assert torch.allclose(one.centre, other.centre, atol=1e-7)


def test_the_teacher_has_no_gradient_and_follows_and_is_what_is_kept() -> None:
    objective = distil(config=replace(DINO_, freeze_last=0.0))
    objective(*objective.inputs(batch(small=3), seed=0, step=0)).total.backward()
    assert all(p.grad is None for p in objective.teacher.parameters())
    assert {name for name, p in objective.named_parameters() if p.grad is None} == {
        name for name, _ in objective.named_parameters() if name.startswith("teacher.")
    }
    old = objective.teacher.network.norm.weight.clone()
    objective.after_step(STEPS // 2)
    expected = 0.998 * old + 0.002 * objective.network.norm.weight
    assert torch.allclose(objective.teacher.network.norm.weight, expected, atol=1e-7)
    assert objective.eval_network is objective.teacher.network


def test_the_last_layer_stays_for_its_share_of_the_run() -> None:
    objective = distil(config=replace(DINO_, freeze_last=0.02))
    objective.on_start()
    optimiser = torch.optim.AdamW((p for p in objective.parameters() if p.requires_grad), lr=0.01)
    drawn, others = objective.head.last.weight.clone(), objective.head.layers[0].weight.clone()
    for step in range(3):
        objective(*objective.inputs(batch(small=3), seed=0, step=step)).total.backward()
        optimiser.step()
        objective.after_step(step)
        assert torch.equal(objective.head.last.weight, drawn) == (step < 2)
    assert not torch.equal(objective.head.layers[0].weight, others)


def test_sharpness_warms_up_and_reaches_every_sample() -> None:
    config = DINO(teacher_start=0.04, teacher_temperature=0.07, warmup=0.3)
    assert config.sharpness(0, 100) == pytest.approx(0.04)
    assert config.sharpness(15, 100) == pytest.approx(0.055)
    assert config.sharpness(30, 100) == config.sharpness(99, 100) == pytest.approx(0.07)
    objective = distil(config=replace(DINO_, teacher_start=0.04, teacher_temperature=0.08, warmup=1.0))
    *_, temperature = objective.inputs(batch(small=3), seed=0, step=50)
    assert temperature.tolist() == pytest.approx([0.06] * 8)


def test_signs_of_a_collapse() -> None:
    """A teacher that tells the same of all images: once the centre knows, it tells nothing at all."""
    objective = distil(config=replace(DINO_, centre_momentum=0.0))
    with torch.no_grad():
        for parameter in objective.teacher.network.norm.parameters():
            parameter.zero_()
    inputs = objective.inputs(batch(small=3), seed=0, step=0)
    objective(*inputs)
    objective.after_step(0)
    with torch.no_grad():
        for parameter in objective.teacher.network.norm.parameters():
            parameter.zero_()
    objective.teacher.head.load_state_dict(distil().teacher.head.state_dict())
    outcome: ObjectiveOutput = objective(*inputs)
    assert outcome.tallies["teacher_entropy"].item() / 7 == pytest.approx(math.log(12), rel=1e-5)
    objective.centre[0] -= 10.0  # or it tells one thing of all
    assert objective(*inputs).tallies["teacher_entropy"].item() / 7 < 1e-3


def test_its_state_comes_back() -> None:
    one = distil()
    one(*one.inputs(batch(small=3), seed=0, step=0)).total.backward()
    one.after_step(3)
    state = one.state_dict()
    assert "centre" in state
    assert "seen" not in state
    other = distil()
    other.load_state_dict(state)
    inputs = one.inputs(batch(small=3, seed=2), seed=0, step=4)
    assert torch.equal(one(*inputs).total, other(*inputs).total)


@pytest.mark.slow
def test_forward_is_one_graph_that_notes_the_answers() -> None:
    config = replace(DINO_, local_views=1)
    objective, plain = (distil(config=config, depth=1) for _ in range(2))
    inputs = objective.inputs(batch(small=1), seed=0, step=0)
    torch.compiler.reset()  # of what other tests have compiled
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for learner in (compiled, plain):
        for part in range(2):  # micro-batches
            outcome: ObjectiveOutput = learner(*(tensor.chunk(2)[part] for tensor in inputs))
            outcome.total.backward()
    assert difference(gradients(objective), gradients(plain)) < 1e-6
    assert objective.seen[-1] == 14
    assert torch.allclose(objective.seen, plain.seen, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_in_bfloat16_weights_gradients_and_centre_stay_float32(position: str) -> None:
    exact, low = distil(position=position), distil(position=position)
    inputs = exact.inputs(batch(small=3), seed=0, step=0)
    expected: ObjectiveOutput = exact(*inputs)
    outcome: ObjectiveOutput = parallelise(low, world=ALONE, precision="bfloat16")(*inputs)
    outcome.total.backward()
    for objective in (exact, low):
        objective.after_step(0)
    assert outcome.total.item() == pytest.approx(expected.total.item(), rel=0.1)
    assert all(gradient.dtype == torch.float32 for gradient in gradients(low).values())
    assert low.centre.dtype == torch.float32
    assert torch.allclose(low.centre, exact.centre, atol=0.01)


def test_wide_views_alone_will_do_and_any_positions_then() -> None:
    for changes in ({"position": "relative"}, {"attention": "axial", "class_token": False, "pool": "mean"}):
        objective = distil(config=replace(DINO_, local_views=0), **changes)
        outcome: ObjectiveOutput = objective(*objective.inputs(batch(), seed=0, step=0))
        outcome.total.backward()
        assert outcome.total.isfinite()


def test_work_counts_views_by_their_size_and_a_pass_without_gradient_as_a_third() -> None:
    head = 16 * 20 + 20 * 20 + 20 * 8 + 8 * 12
    small = replace(MODEL, image=(4, 6)).macs
    expected = (2 + 2 / 3) * (MODEL.macs + head) + 3 * (small + head)
    assert DINO_.macs_per_image(MODEL) == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": 0},
        {"local_views": -1},
        {"teacher_start": 0.0},
        {"momentum": -0.1},
        {"freeze_last": 2.0},
        {"local_scale": (0.5, 0.4)},
        {"global_scale": (0.5, 1.4)},
    ],
)
def test_nonsense_is_refused(changes: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DINO(**changes)


def test_resnets_are_refused() -> None:
    with pytest.raises(ConfigError, match="ResNet"):
        DINO().macs_per_image(ResNetConfig(blocks=(1, 1)))


SMALL = DINO(
    outputs=64,
    hidden=64,
    bottleneck=64,
    local_views=2,
    local_scale=(0.3, 0.6),
    global_scale=(0.6, 1.0),
    momentum=0.99,
    centre_momentum=0.5,
)


@pytest.mark.slow
def test_it_learns_one_batch_of_digits_by_heart() -> None:
    """From a teacher that stays as it is."""
    config = replace(SMALL, momentum=1.0, centre_momentum=0.0)
    objective = DINOObjective(digits_network(), config, ObjectiveContext(0, digits_preprocessing(), Mix(), 40, ALONE))
    rows = learnt_rows(objective, steps=40, rate=5e-3, same=True)
    assert rows[1:, 1].std() < 1e-4  # what is taught stays the same, once it is centred
    assert rows[-1, 0] < 0.75 * rows[1, 0]  # loss
    assert rows[-1, 2] < 0.35 * rows[1, 2]  # the learner's distance to what is taught


@pytest.mark.slow
def test_it_learns_digits_without_collapse() -> None:
    objective = DINOObjective(digits_network(), SMALL, ObjectiveContext(0, digits_preprocessing(), Mix(), 40, ALONE))
    before = feature_rank(objective)
    rows = learnt_rows(objective, steps=40, rate=2e-3)
    first, last = rows[:8].mean(0), rows[-8:].mean(0)
    assert last[2] < 0.7 * first[2]  # distance to the teacher
    assert 0.5 < last[1] < math.log(64) - 0.01  # the teacher neither tells one thing of all nor nothing
    assert feature_rank(objective) > 0.5 * before
