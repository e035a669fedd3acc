"""The objective of queries: the same loss however a batch is split, targets of each kind, annealing, determinism."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.distributed.pair import together
from tests.models.test_walk import shell
from tests.tasks.mask_queries import small
from tests.tasks.mask_queries.small import Left, make_batch, make_objective, run_step, take
from tests.train.dense import QUERIES
from vitrail.core.errors import ConfigError
from vitrail.data.segment_targets import unpack_planes
from vitrail.distributed.process_group import World
from vitrail.models.query_configs import KINDS, QueryKind, query_config
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks.mask_queries.annealing import count_masked_blocks, draw_masked, masking_chance
from vitrail.tasks.mask_queries.objective import InstanceQueries, PanopticQueries, SemanticQueries
from vitrail.tasks.mask_queries.semantic_segments import count_places, list_class_segments

# Processes: the first has the images that teach nothing but "no object", and one that cannot be read.
ORDER = [small.NO_SEGMENTS, small.UNREADABLE, 0, 2, 3, 5]
FEW = PanopticQueries(points=16)


def check_same(found: Left, expected: Left) -> None:
    assert found.count == expected.count == 5
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.tallies == pytest.approx(expected.tallies, rel=1e-5)
    assert set(found.gradients) == set(expected.gradients)
    for name, value in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], value, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def whole() -> Left:
    return run_step(make_objective(FEW), take(make_batch(), ORDER), micro=6)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches_change_nothing(micro: int, whole: Left) -> None:
    check_same(run_step(make_objective(FEW), take(make_batch(), ORDER), micro=micro), whole)


def step_in_process(world: World, sharding: str, micro: int) -> Left:
    part = take(make_batch(), ORDER[:2]) if world.rank == 0 else take(make_batch(), ORDER[2:])
    return run_step(make_objective(FEW, world), part, micro=micro, world=world, sharding=sharding)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [4, 1])
def test_processes_change_nothing(micro: int, whole: Left) -> None:
    """One process holds no segment at all, and parts of different sizes."""
    for found in together(step_in_process, "ddp", micro):
        check_same(found, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_training_is_that_of_all_predictions(kind: QueryKind) -> None:
    config = query_config(QUERIES.encoder, kind, 10, queries=12, query_blocks=2, upscale=1)
    network: Any = shell(config)
    counter = FlopCounterMode(display=False)
    images, masked = torch.empty(1, 3, *config.image, device="meta"), torch.empty(1, 2, 12, device="meta").bool()
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network.forward_layers(images, masked)
    assert FEW.macs_per_image(config) == counter.get_total_flops() / 2 > config.macs


def test_seed_and_step_determine_everything() -> None:
    batch = make_batch()
    one, other = make_objective(FEW), make_objective(FEW)
    inputs = one.inputs(batch, seed=1, step=30)
    again = other.inputs(batch, seed=1, step=30)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(inputs, again, strict=True))
    assert torch.equal(one.normalisers(inputs), other.normalisers(again))
    for changes in ({"seed": 2, "step": 30}, {"seed": 1, "step": 31}):
        assert not torch.equal(one.inputs(batch, **changes)[-1], inputs[-1])
    part = one.inputs(take(batch, [3, 5]), seed=1, step=30)
    assert all(torch.equal(whole[[3, 5]], some) for whole, some in zip(inputs, part, strict=True))


def test_steps_repeat_bit_by_bit() -> None:
    one, other = (run_step(make_objective(FEW), make_batch(), micro=3) for _ in range(2))
    assert one.loss == other.loss
    assert all(torch.equal(value, other.gradients[name]) for name, value in one.gradients.items())


def test_normalisers_count_segments_and_weights() -> None:
    objective = make_objective()
    inputs = objective.inputs(make_batch(), seed=0, step=0)
    found = objective.normalisers(inputs)
    # 5, 0, 2, 1 and 3 without its crowd; the unreadable one's do not count.
    assert found[:2].tolist() == [5, 11]
    torch.testing.assert_close(found[2], torch.tensor(11 + 0.1 * (5 * 7 - 11)))


def test_an_unreadable_image_may_hold_anything(whole: Left) -> None:
    batch = take(make_batch(), ORDER)
    batch.views[0][1] = 255 - batch.views[0][1]
    batch.segments.classes[1] = 0
    check_same(run_step(make_objective(FEW), batch, micro=6), whole)


def test_a_step_without_any_image() -> None:
    batch = make_batch().map_tensors(lambda tensor: tensor & False if tensor.dtype == torch.bool else tensor)
    found = run_step(make_objective(FEW), batch, micro=6)
    assert found.loss == found.count == 0
    assert not any(value.any() for value in found.gradients.values())


def test_tallies_are_parts_of_the_last_loss(whole: Left) -> None:
    assert set(whole.tallies) == {"class_loss", "mask_loss", "dice_loss", "matched"}
    assert whole.tallies["matched"] == pytest.approx(11 / 5)
    # Three outputs: the last is one of them.
    assert 0 < sum(whole.tallies[name] for name in ("class_loss", "mask_loss", "dice_loss")) < whole.loss


def test_weights_scale_their_parts(whole: Left) -> None:
    plain = run_step(make_objective(PanopticQueries(points=16, mask_weight=0.0)), take(make_batch(), ORDER), micro=6)
    assert plain.tallies["mask_loss"] == 0
    assert whole.tallies["mask_loss"] > 0


def test_learns() -> None:
    objective, batch = make_objective(PanopticQueries(points=16)), make_batch()
    optimiser = torch.optim.Adam(objective.parameters(), 0.02)
    losses: list[float] = []
    for step in range(15):
        inputs = objective.inputs(batch, seed=0, step=step)
        sums = objective.normalisers(inputs)
        output = objective(*inputs, sums.expand(len(batch), -1))
        optimiser.zero_grad()
        (output.total / output.count).backward()
        optimiser.step()
        losses.append(float((output.total / output.count).detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_masked_attention_is_annealed_block_by_block() -> None:
    """Windows of EoMT with four blocks: from 1/6 to 2/6 of training, and so on; (1 - progress)^0.9 within."""
    for block in range(4):
        assert masking_chance(block, 4, 100 * (block + 1), 600) == 1.0
        assert masking_chance(block, 4, 100 * (block + 1) + 50, 600) == pytest.approx(0.5**0.9)
        assert masking_chance(block, 4, 100 * (block + 2), 600) == 0.0
    assert masking_chance(0, 2, 45, 60 * 3) == 1.0
    assert [count_masked_blocks(4, step, 600) for step in (0, 150, 160, 250, 260, 360, 460, 600)] == [
        4, 4, 3, 3, 2, 1, 0, 0,
    ]  # fmt: skip


def test_queries_are_masked_as_often_as_they_should() -> None:
    bits = torch.randint(-(2**63), 2**63 - 1, (40, 3, 500), generator=torch.Generator().manual_seed(0))
    masked = draw_masked(bits, [1.0, 0.3, 0.0])
    assert masked.dtype == torch.bool
    assert masked[:, 0].all()
    assert not masked[:, 2].any()
    assert masked[:, 1].float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_network_is_told_how_many_blocks_are_masked() -> None:
    objective: Any = make_objective()
    for step in (0, 10, 30, 45, 59):
        objective.inputs(make_batch(), seed=0, step=step)
        objective.after_step(step)
    assert objective.network.config.masked_calls == [2, 1, 0]
    objective = make_objective(PanopticQueries(annealing=False))
    assert objective.inputs(make_batch(), seed=0, step=59)[4].all()
    objective.after_step(59)
    assert objective.network.config.masked_calls == [2]


def test_classes_of_a_mask_are_segments() -> None:
    masks = make_batch(semantic=True).target
    planes, names = list_class_segments(masks, small.CLASSES)
    assert planes.shape == (6, 1, *small.IMAGE)
    assert names.shape == (6, 8)
    for mask, own, segments in zip(masks, names.tolist(), unpack_planes(planes), strict=True):
        shown = sorted(set(mask.flatten().tolist()) - {255}, key=lambda one: (-int((mask == one).sum()), one))
        assert own == shown + [-1] * (8 - len(shown))
        for name, segment in zip(own, segments, strict=True):
            assert torch.equal(
                segment.bool(), (mask == name) if name >= 0 else torch.zeros_like(mask, dtype=torch.bool)
            )


def test_of_many_classes_the_largest_are_kept() -> None:
    mask = torch.arange(80).repeat_interleave(torch.arange(1, 81))[None, None].byte()
    _, names = list_class_segments(mask, 80)
    assert names.tolist() == [list(range(79, 15, -1))]
    assert [count_places(count) for count in (1, 8, 9, 64, 150)] == [8, 8, 16, 64, 64]


def test_semantic_queries_learn_from_masks() -> None:
    batch = make_batch(semantic=True)
    one = run_step(make_objective(SemanticQueries(points=16)), batch, micro=6)
    other = run_step(make_objective(SemanticQueries(points=16)), batch, micro=4)
    check_same(one, other)
    assert one.tallies["matched"] > 0


def test_small_masks_have_fewer_points() -> None:
    config = PanopticQueries()
    assert config.count_points(torch.empty(2, 3, 160, 160)) == (12544, 37632, 9408, 3136)
    assert config.count_points(torch.empty(2, 3, 16, 16)) == (256, 768, 192, 64)


def test_configs_refuse_what_cannot_be() -> None:
    assert [kind.task for kind in (SemanticQueries, InstanceQueries, PanopticQueries)] == [
        "segmentation", "instances", "panoptic",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="queries"):
        PanopticQueries().check_model(ViTConfig(width=16, depth=1, mlp_width=32, heads=2, patch=(4, 4), image=(8, 8)))
    for wrong in ({"points": 0}, {"importance": 1.5}, {"oversample": 0.5}, {"no_object": 0.0}, {"dice_weight": -1.0}):
        with pytest.raises(ConfigError):
            PanopticQueries(**wrong)


def test_losses_are_float32_in_half_precision() -> None:
    objective, batch = make_objective(FEW), make_batch()
    inputs = objective.inputs(batch, seed=0, step=0)
    with torch.autocast("cpu", torch.bfloat16):
        output = objective(*inputs, objective.normalisers(inputs).expand(len(batch), -1))
    assert output.total.dtype == output.count.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in output.tallies.values())
    exact = objective(*inputs, objective.normalisers(inputs).expand(len(batch), -1))
    torch.testing.assert_close(output.total, exact.total, rtol=0.05, atol=0)


@pytest.mark.gpu
def test_a_step_can_be_recorded() -> None:
    """Forward and backward pass of one batch as a graph, replayed with the inputs of another step."""
    objective = make_objective(FEW).cuda()
    batch = make_batch().to("cuda")

    def prepare(step: int) -> tuple[torch.Tensor, ...]:
        inputs = objective.inputs(batch, seed=0, step=step)
        return (*inputs, objective.normalisers(inputs).expand(len(batch), -1).contiguous())

    def compute(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        output = objective(*inputs)
        output.total.backward()
        return output.total.detach()

    places, side = prepare(20), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compute(places)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(places)
    for place, value in zip(places, prepare(41), strict=True):
        place.copy_(value)
    objective.zero_grad(set_to_none=False)
    graph.replay()
    gradients = {name: value.grad.clone() for name, value in objective.named_parameters() if value.grad is not None}
    objective.zero_grad()
    torch.testing.assert_close(found, compute(prepare(41)), rtol=1e-5, atol=0)
    for name, value in objective.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_computes(whole: Left) -> None:
    world = World(device=torch.device("cuda"))
    found = run_step(make_objective(FEW, world), take(make_batch(), ORDER).to("cuda"), micro=6, world=world)
    assert found.loss == pytest.approx(whole.loss, rel=1e-3)
    for name, value in whole.gradients.items():
        torch.testing.assert_close(found.gradients[name].cpu(), value, rtol=1e-2, atol=1e-3)


def list_configs() -> Iterator[Any]:
    from vitrail.models import query_configs

    encoder = {"width": 16, "depth": 3, "mlp_width": 32, "heads": 2, "patch": (4, 4), "image": small.IMAGE}
    for name in ("EoMTConfig", "PMTConfig"):
        more = {"levels": 2} if name == "PMTConfig" else {}
        yield getattr(query_configs, name)(
            **encoder, **more, classes=small.CLASSES, queries=7, query_blocks=2, upscale=1
        )


@pytest.mark.slow
@pytest.mark.parametrize("config", list(list_configs()), ids=lambda config: config.family)
def test_real_networks_train(config: Any) -> None:
    from vitrail.models.build import build

    found: list[Left] = []
    for micro in (6, 4):
        torch.manual_seed(0)
        network = build(config)
        objective: Any = FEW.build(network, small.context())
        found.append(run_step(objective, make_batch(), micro=micro))
    check_same(*found)
    inputs = objective.inputs(make_batch(), seed=0, step=40)
    inputs = (*inputs, objective.normalisers(inputs).expand(small.COUNT, -1))
    expected, compiled = (
        one(*inputs) for one in (objective, torch.compile(objective, backend="eager", fullgraph=True))
    )
    torch.testing.assert_close(compiled, expected)
    trained = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert set(found[0].gradients) == trained
    objective.after_step(0)
    assert network.config.masked_blocks == 2
    objective.after_step(small.STEPS - 1)
    assert network.config.masked_blocks == 0
