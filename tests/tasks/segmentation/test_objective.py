"""The loss of segmentation against a loop over pixels, in any micro-batches."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models.tiny import VIT
from vitrail.core.errors import ConfigError
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.models.build import Model, build
from vitrail.objectives.objective import ObjectiveContext, ObjectiveOutput
from vitrail.tasks.segmentation.task import Segmentation, SegmentationObjective

COUNT, CLASSES, IMAGE = 6, VIT.classes, VIT.image
VOID = 3  # has no pixel that counts
PLAIN = Preprocessing(image=IMAGE)


def network() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build(replace(VIT, head="patches"))
        classifier = made.get_classifier()
        assert isinstance(classifier, torch.nn.Linear)
        torch.nn.init.normal_(classifier.weight, std=0.5)
    return made.eval()


def objective(smoothing: float = 0.0) -> SegmentationObjective:
    config = Segmentation(smoothing=smoothing)
    world = World(device=torch.device("cpu"))
    made = config.build(network(), ObjectiveContext(CLASSES, PLAIN, Mix(), 10, world))
    assert isinstance(made, SegmentationObjective)
    return made


def batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    masks = torch.randint(0, CLASSES, (COUNT, *IMAGE), generator=draw).byte()
    masks[torch.rand(masks.shape, generator=draw) < 0.3] = 255
    masks[VOID] = 255
    return Batch(
        step=0,
        views=(torch.randint(0, 256, (COUNT, 3, *IMAGE), generator=draw).byte(),),
        targets=(masks,),
        sample=torch.arange(COUNT),
        epoch=torch.zeros(COUNT, dtype=torch.int64),
        valid=torch.ones(COUNT, dtype=torch.bool),
    )


def take(given: Batch, places: list[int]) -> Batch:
    return given.map_tensors(lambda tensor: tensor[places])


def ask(of: SegmentationObjective, given: Batch) -> ObjectiveOutput:
    outcome: ObjectiveOutput = of(*of.inputs(given, seed=0, step=0))
    return outcome


def slow(logits: Tensor, mask: Tensor, smoothing: float) -> tuple[float, float]:
    """The loss of one image and the share of its pixels that are right."""
    losses: list[float] = []
    right = 0
    for row in range(IMAGE[0]):
        for column in range(IMAGE[1]):
            truth = int(mask[row, column])
            if truth == 255:
                continue
            values = logits[:, row, column].double().tolist()
            total = math.log(sum(math.exp(value) for value in values))
            wanted = [smoothing / CLASSES + (1 - smoothing) * (kind == truth) for kind in range(CLASSES)]
            losses.append(sum(share * (total - value) for share, value in zip(wanted, values, strict=True)))
            right += values.index(max(values)) == truth
    return sum(losses) / len(losses), right / len(losses)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_a_loop_over_pixels(smoothing: float) -> None:
    of, given = objective(smoothing), batch()
    outcome = ask(of, given)
    with torch.no_grad():
        logits = of.network(of.normalise(given.pixels))
    each = [slow(logits[at], given.target[at], smoothing) for at in range(COUNT) if at != VOID]
    assert float(outcome.count) == COUNT - 1
    assert outcome.total.item() == pytest.approx(sum(loss for loss, _ in each), rel=1e-5)
    assert float(outcome.tallies["pixel_accuracy"]) == pytest.approx(sum(right for _, right in each), rel=1e-6)


def gradient(of: SegmentationObjective, parts: list[list[int]]) -> Tensor:
    of.zero_grad()
    count = sum(ask(of, take(batch(), part)).count.item() for part in parts)
    for part in parts:
        (ask(of, take(batch(), part)).total / count).backward()
    return torch.cat([weight.grad.flatten() for weight in of.parameters() if weight.grad is not None])


def test_micro_batches_add_up_to_the_whole() -> None:
    of, parts = objective(), [[0, 1], [2], [VOID], [4, 5]]
    outcomes = [ask(of, take(batch(), part)) for part in parts]
    whole = ask(of, batch())
    assert sum(outcome.count.item() for outcome in outcomes) == whole.count.item()
    assert sum(outcome.total.item() for outcome in outcomes) == pytest.approx(whole.total.item(), rel=1e-6)
    found, expected = gradient(of, parts), gradient(of, [list(range(COUNT))])
    assert float(expected.norm()) > 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_image_without_pixels_that_count_and_an_unreadable_one_change_nothing() -> None:
    of = objective()
    fewer = take(batch(), [0, 1, 2])
    more = take(batch(), [0, 1, 2, VOID, 4])
    more = replace(more, valid=torch.tensor([True, True, True, True, False]))  # its mask says classes
    one, other = ask(of, fewer), ask(of, more)
    assert float(one.count) == float(other.count) == 3
    assert one.total.item() == pytest.approx(other.total.item(), rel=1e-6)
    alone = ask(of, take(batch(), [VOID]))
    assert (alone.count.item(), alone.total.item()) == (0, 0)
    alone.total.backward()
    assert all(weight.grad is None or not weight.grad.any() for weight in of.parameters())


def test_smoothing_has_bounds() -> None:
    with pytest.raises(ConfigError, match="smoothing"):
        Segmentation(smoothing=1.0)
