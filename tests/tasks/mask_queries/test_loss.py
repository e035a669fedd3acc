"""The loss against transformers' `EomtLoss`, which is given the same points."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.segment_targets import pack_masks, round_up_places
from vitrail.models.query_output import QueryOutput
from vitrail.tasks.mask_queries import points as pts
from vitrail.tasks.mask_queries.loss import (
    LearntSegments,
    LossWeights,
    compute_costs,
    count_normalisers,
    sum_losses,
)
from vitrail.tasks.mask_queries.matching import match

WEIGHTS = LossWeights(2.0, 5.0, 5.0, 0.1)


def draw_masks(count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Blobs: noise of few pixels enlarged, and cut at 0."""
    noise = torch.randn(1, count, 4, 5, generator=generator)
    return (F.interpolate(noise, size, mode="bilinear")[0] > 0).to(torch.uint8)


class Case:
    """Targets of images with different numbers of segments, and the outputs of a network for them."""

    def __init__(self, numbers: list[int], *, queries: int, classes: int, layers: int, points: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        size, small = (24, 20), (7, 9)
        self.masks = [draw_masks(count, size, g) if count else torch.zeros(0, *size) for count in numbers]
        self.classes = [torch.randint(classes, (count,), generator=g) for count in numbers]
        shape = (len(numbers), queries)
        self.outputs = [
            QueryOutput(
                (2 * torch.randn(*shape, classes + 1, generator=g)).requires_grad_(),
                (3 * torch.randn(*shape, *small, generator=g)).requires_grad_(),
            )
            for _ in range(layers)
        ]
        places = round_up_places(max(numbers))
        planes = torch.stack([pack_masks(F.pad(one.byte(), (0, 0, 0, 0, 0, places - len(one)))) for one in self.masks])
        names = torch.stack([F.pad(one, (0, places - len(one)), value=-1) for one in self.classes])
        self.segments = LearntSegments(planes, names, torch.ones(len(numbers), dtype=torch.bool))
        self.counts = pts.count_points(points, 3.0, 0.75)
        keys = torch.arange(len(numbers)) * 1000 + seed
        self.shared = [pts.draw_points(keys + 7 * layer, points) for layer in range(layers)]
        self.points = [pts.draw_loss_points(keys + 7 * layer, places, self.counts) for layer in range(layers)]
        self.weights = WEIGHTS


def compute_ours(case: Case) -> dict[str, Tensor]:
    segments, found = case.segments, dict[str, Tensor]()
    sums = count_normalisers(segments, case.outputs[0].classes.shape[1], case.weights.no_object)
    for layer, (output, points) in enumerate(zip(case.outputs, case.points, strict=True)):
        queries = match(compute_costs(output, segments, case.shared[layer], case.weights), segments.classes >= 0)
        parts = sum_losses(output, segments, queries, points, case.weights)
        end = "" if layer == len(case.outputs) - 1 else f"_{layer}"
        found[f"loss_cross_entropy{end}"] = parts.classes.sum() / sums[2]
        found[f"loss_mask{end}"] = parts.mask.sum() / sums[1].clamp(min=1)
        found[f"loss_dice{end}"] = parts.dice.sum() / sums[1].clamp(min=1)
    return found


def compute_theirs(case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    eomt = pytest.importorskip("transformers.models.eomt.modeling_eomt")
    config = eomt.EomtConfig(
        num_labels=case.outputs[0].classes.shape[2] - 1,
        train_num_points=case.counts.matching,
        oversample_ratio=3.0,
        importance_sample_ratio=0.75,
        class_weight=case.weights.classes,
        mask_weight=case.weights.mask,
        dice_weight=case.weights.dice,
        no_object_weight=case.weights.no_object,
    )
    loss = eomt.EomtLoss(config, {})
    queue = draw_in_their_order(case, loss)
    monkeypatch.setattr(torch, "rand", lambda *size, **_: next(queue).reshape(size))
    final, *others = case.outputs[-1], *case.outputs[:-1]
    auxiliary = [{"masks_queries_logits": one.masks, "class_queries_logits": one.classes} for one in others]
    found = loss(final.masks, final.classes, [one.float() for one in case.masks], case.classes, auxiliary)
    monkeypatch.undo()
    assert next(queue, None) is None
    return found


def draw_in_their_order(case: Case, loss: torch.nn.Module) -> Iterator[Tensor]:
    """The final layer first; of each layer the points of each image's matching, then those of all matched segments,
    which are in the order of their queries."""
    for layer in (len(case.outputs) - 1, *range(len(case.outputs) - 1)):
        output, points = case.outputs[layer], case.points[layer]
        for image in range(len(case.masks)):
            yield case.shared[layer][image]
        queries = match(
            compute_costs(output, case.segments, case.shared[layer], case.weights), case.segments.classes >= 0
        )
        ordered = [(image, q, n) for image, row in enumerate(queries.tolist()) for n, q in enumerate(row) if q >= 0]
        ordered.sort()
        yield torch.stack([points.candidates[image, n] for image, _, n in ordered])
        yield torch.stack([points.others[image, n] for image, _, n in ordered])


CASES = {
    "one image": Case([3], queries=6, classes=4, layers=1, points=40, seed=1),
    "several": Case([2, 5, 1], queries=10, classes=7, layers=3, points=64, seed=2),
    "an empty one": Case([0, 4], queries=5, classes=3, layers=2, points=48, seed=3),
    "more than queries": Case([9, 2], queries=4, classes=5, layers=2, points=56, seed=4),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_is_that_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    ours, theirs = compute_ours(case), compute_theirs(case, monkeypatch)
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    leaves = [tensor for output in case.outputs for tensor in output]
    mine, others = (torch.autograd.grad(sum(one.values()), leaves) for one in (ours, theirs))
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_nothing_to_learn_at_all() -> None:
    """Of images without segments all queries learn that they have none; transformers fails there."""
    case = Case([0, 0], queries=3, classes=2, layers=1, points=16, seed=5)
    found = compute_ours(case)
    logits = case.outputs[0].classes
    expected = F.cross_entropy(logits.flatten(0, 1), torch.full((6,), 2))
    torch.testing.assert_close(found["loss_cross_entropy"], expected)
    assert not found["loss_mask"].any()
    assert not found["loss_dice"].any()


def test_an_image_that_is_not_there_counts_for_nothing() -> None:
    case = CASES["several"]
    segments = case.segments._replace(valid=torch.tensor([True, False, True]))
    segments = segments._replace(classes=torch.where(segments.valid[:, None], segments.classes, -1))
    alone = count_normalisers(segments, 10, 0.1)
    assert alone[:2].tolist() == [2, 3]
    torch.testing.assert_close(alone[2], torch.tensor(3 + 0.1 * 17))
    output, points = case.outputs[0], case.points[0]
    queries = match(compute_costs(output, segments, case.shared[0], WEIGHTS), segments.classes >= 0)
    for part in sum_losses(output, segments, queries, points, WEIGHTS):
        assert part[1] == 0
        assert part[0] > 0


@pytest.mark.parametrize("size", [(5, 7), (24, 20)])
def test_packed_masks_are_sampled_like_maps(size: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(0)
    masks = (torch.rand(2, 16, *size, generator=g) < 0.5).byte()
    shared, own = torch.rand(2, 300, 2, generator=g), torch.rand(2, 16, 200, 2, generator=g)
    edges = torch.tensor([0.0, 1.0, 1 / size[1], 0.5 - 1e-6])
    shared[0, :4, 0] = own[1, 3, :4, 1] = edges
    for points in (shared, own):
        found = pts.sample_planes(pack_masks(masks), points)
        torch.testing.assert_close(found, pts.sample_maps(masks.float(), points), rtol=1e-5, atol=1e-5)


def test_points_are_uniform_and_depend_on_their_key_alone() -> None:
    keys = torch.tensor([3, 4, 2**62])
    counts = pts.count_points(2000, 2.0, 0.75)
    assert counts == (2000, 4000, 1500, 500)
    candidates, uncertain, others = pts.draw_loss_points(keys, 8, counts)
    assert uncertain == 1500
    assert candidates.shape == (3, 8, 4000, 2)
    assert others.shape == (3, 8, 500, 2)
    alone = pts.draw_loss_points(keys[1:2], 8, counts)
    assert torch.equal(candidates[1:2], alone.candidates)
    assert torch.equal(others[1:2], alone.others)
    for part in (candidates, others, pts.draw_points(keys, 6000)):
        assert part.min() >= 0
        assert part.max() < 1
        flat = part.reshape(-1, 2)
        assert (flat.mean(0) - 0.5).abs().max() < 0.01
        assert (flat.var(0) - 1 / 12).abs().max() < 0.01
        assert abs(float(torch.corrcoef(flat.T)[0, 1])) < 0.05
        assert len(flat.unique(dim=0)) > 0.999 * len(flat)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [5, 5000])
def test_compiled_keys_are_the_keys(count: int) -> None:
    keys = torch.arange(6).reshape(2, 3) * 123456789123456789
    compiled = torch.compile(pts.split_keys, fullgraph=True)(keys.cuda(), count)
    assert torch.equal(compiled.cpu(), pts.split_keys(keys, count))
