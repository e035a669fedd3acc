"""CKA between layers: what it does not see, what it does, and that minibatches add up."""

import pytest
import torch
from torch import Tensor

from tests.inspection.test_tokens import ATTENTIVE
from tests.models.tiny import RESNET, VIT, awake, images
from vitrail.core.errors import ConfigError, DataError
from vitrail.inspection.measures import cka, layer_cka
from vitrail.models.build import build


def unbiased(x: Tensor, y: Tensor) -> float:
    """HSIC_1 of Song et al. as they write it, with traces and sums."""
    count = len(x)
    one = torch.ones(count, dtype=torch.float64)
    K, L = ((z @ z.T).fill_diagonal_(0) for z in (x.double(), y.double()))
    whole = (K @ L).trace() + (one @ K @ one) * (one @ L @ one) / ((count - 1) * (count - 2))
    return float((whole - 2 / (count - 2) * (one @ K @ L @ one)) / (count * (count - 3)))


def test_it_is_the_ratio_of_unbiased_estimates() -> None:
    x, y = torch.randn(12, 5) + 3, torch.randn(12, 5)
    wanted = unbiased(x, y) / (unbiased(x, x) * unbiased(y, y)) ** 0.5
    found = cka([torch.stack([x, y])])
    assert found[0, 1].item() == pytest.approx(wanted, abs=1e-6)
    assert torch.equal(found, found.T)


def test_rotation_scale_and_shift_are_not_seen() -> None:
    x = torch.randn(20, 6)
    turned = 5 * x @ torch.linalg.qr(torch.randn(6, 6)).Q + torch.randn(6)
    torch.testing.assert_close(cka([torch.stack([x, turned])]), torch.ones(2, 2))
    squeezed = x * torch.tensor([100.0, 1, 1, 1, 1, 1])
    assert cka([torch.stack([x, squeezed])])[0, 1] < 0.9


def test_chance_is_zero_on_average_even_in_few_pictures() -> None:
    """The plain estimator would say 0.9 here: 8 images in 64 dimensions."""
    found = cka([torch.randn(2, 8, 64) for _ in range(400)])
    assert abs(found[0, 1].item()) < 0.03


def test_minibatches_add_up_and_small_ones_are_not_dropped() -> None:
    rows = torch.randn(3, 18, 5)
    parts = [rows[:, :8], rows[:, 8:16], rows[:, 16:]]
    torch.testing.assert_close(cka(parts), cka([rows[:, :8], rows[:, 8:]]))
    torch.testing.assert_close(cka([rows[:, :2], rows[:, 2:8]]), cka([rows[:, :8]]))
    torch.testing.assert_close(cka(iter([rows[:, i : i + 1] for i in range(18)])), cka([rows]), atol=0.5, rtol=0)
    with pytest.raises(DataError):
        cka([rows[:, :3]])


@pytest.mark.parametrize("name", ["registers", "mean, no class token", "hybrid", "axial"])
def test_layers_of_a_network(name: str) -> None:
    config = ATTENTIVE[name]
    model = awake(config)
    found = layer_cka(model, [images(config, 6), images(config, 6)])
    count = config.depth * (2 if config.attention == "axial" else 1) + 1
    assert found.shape == (count, count)
    assert found.diagonal().tolist() == [1.0] * count
    assert (found.abs() <= 1).all()


def test_a_layer_that_changes_nothing_is_like_its_input() -> None:
    model = awake(VIT)
    with torch.no_grad():
        for part in (model.blocks[0].attention.out, model.blocks[0].mlp.contract):
            part.weight.zero_()
            part.bias.zero_()
    found = layer_cka(model, [images(VIT, 16)])
    assert found[0, 1].item() == pytest.approx(1)
    assert found[0, 2] < 0.999
    with pytest.raises(ConfigError):
        layer_cka(build(RESNET), [images(RESNET)])


def test_what_does_not_vary_is_like_nothing() -> None:
    rows = torch.stack([torch.ones(6, 4), torch.randn(6, 4)])
    assert cka([rows]).tolist() == [[1, 0], [0, 1]]
