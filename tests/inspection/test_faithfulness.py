"""Deletion and insertion on networks whose reasons are known."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import RESNET, VIT, awake, images
from vitrail.core.errors import ConfigError, UnknownName
from vitrail.inspection.measures import FaithfulnessCurves, faithfulness_curves, random_maps, rank_cells
from vitrail.inspection.rollout import grad_cam, gradient_rollout, rollout


class Corner(nn.Module):
    """Says class 1 as far as the lower right quarter is bright, and nothing else counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, images: Tensor) -> Tensor:
        seen = images[:, :, 4:, 4:].mean(dim=(1, 2, 3)) * self.scale
        return torch.stack([-seen, seen], dim=1)


def corner_pictures() -> Tensor:
    """Dark with grain, the lower right quarter bright."""
    pictures = -1 + 0.1 * torch.randn(2, 3, 8, 8)
    pictures[:, :, 4:, 4:] += 2
    return pictures


def test_the_right_map_beats_chance_and_the_wrong_one_loses() -> None:
    model, pictures = Corner(), corner_pictures()
    right = torch.zeros(2, 4, 4)
    right[:, 2:, 2:] = 1
    scores = [faithfulness_curves(model, pictures, maps, steps=8) for maps in (right, random_maps(right), -right)]
    for better, worse in pairwise(scores):
        assert (better.deletion_area < worse.deletion_area).all()
        assert (better.insertion_area > worse.insertion_area).all()
    # The four cells that count are the first quarter: two of eight steps do it all.
    assert scores[0].deletion[:, 2:].amax() < scores[0].deletion[:, :1].amin() - 0.3
    torch.testing.assert_close(scores[0].insertion[:, 2], scores[0].insertion[:, -1])


@pytest.mark.parametrize("fill", ["mean", "blur"])
def test_curves_begin_and_end_where_they_must(fill: str) -> None:
    model, pictures = awake(VIT), images(VIT, 3)
    classes = torch.tensor([0, 2, 4])
    found = faithfulness_curves(model, pictures, rollout(model, pictures), classes, steps=5, fill=fill)  # type: ignore[arg-type]
    whole = model(pictures).softmax(1)[range(3), classes].detach()
    torch.testing.assert_close(found.deletion[:, 0], whole)
    torch.testing.assert_close(found.insertion[:, -1], whole)
    torch.testing.assert_close(found.deletion[:, -1], found.insertion[:, 0])
    assert found.deletion.shape == found.insertion.shape == (3, 6)
    if fill == "mean":
        empty = pictures.mean(dim=(2, 3), keepdim=True).expand_as(pictures)
        torch.testing.assert_close(found.insertion[:, 0], model(empty).softmax(1)[range(3), classes].detach())


def test_areas_by_hand() -> None:
    found = FaithfulnessCurves(torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[0.0, 1.0, 1.0]]))
    assert found.deletion_area.tolist() == [0.5]
    assert found.insertion_area.tolist() == [0.75]


def test_cells_are_ranked_largest_first() -> None:
    assert rank_cells(torch.tensor([[[0.1, 0.9], [0.5, 0.5]]])).tolist() == [[[3, 0], [1, 2]]]
    assert torch.equal(random_maps(torch.zeros(2, 3, 4)), random_maps(torch.ones(2, 3, 4)))
    assert not torch.equal(random_maps(torch.zeros(2, 3, 4)), random_maps(torch.zeros(2, 3, 4), seed=1))


def test_any_network_and_any_map() -> None:
    model, pictures = awake(RESNET), images(RESNET)
    found = faithfulness_curves(model, pictures, grad_cam(model, pictures), steps=4)
    assert found.deletion.shape == (2, 5)
    model.train()
    faithfulness_curves(model, pictures, torch.rand(2, 20, 28), steps=2)  # as fine as the image
    assert model.training


def test_misfits_are_refused() -> None:
    model, pictures = awake(VIT), images(VIT)
    with pytest.raises(ConfigError):
        faithfulness_curves(model, pictures, torch.rand(3, 3, 4))
    with pytest.raises(ConfigError):
        faithfulness_curves(model, pictures, torch.rand(2, 7, 4))
    with pytest.raises(ConfigError):
        faithfulness_curves(model, pictures, torch.rand(2, 3, 4))
    with pytest.raises(UnknownName, match="mean"):
        faithfulness_curves(model, pictures, torch.rand(2, 3, 4), fill="meen", steps=3)  # type: ignore[arg-type]


class Averaged(nn.Module):
    """The mean logits of a network that answers for pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images).mean((2, 3))


def test_of_answers_for_pixels_the_mean_counts() -> None:
    model = awake(replace(VIT, head="patches"))
    pictures = images(VIT, 2)
    maps = rollout(model, pictures)
    found, wanted = (faithfulness_curves(one, pictures, maps, steps=3) for one in (model, Averaged(model)))
    torch.testing.assert_close(found.deletion, wanted.deletion)
    torch.testing.assert_close(found.insertion, wanted.insertion)


def test_one_output_has_no_probability() -> None:
    config = replace(VIT, classes=1)
    with pytest.raises(ConfigError):
        faithfulness_curves(awake(config), images(config), torch.rand(2, 3, 4), steps=3)
    assert gradient_rollout(awake(config), images(config)).shape == (2, 3, 4)
