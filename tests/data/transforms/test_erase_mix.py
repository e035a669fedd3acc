"""Erasing and mixing."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from tests.data.transforms.test_crop import drawn
from vitrail.core.errors import ConfigError
from vitrail.data.randomness import CounterRng
from vitrail.data.transforms.augmentation import Mix, RandomErasing, one_hot


@pytest.mark.slow
def test_erased_boxes_are_distributed_as_torchvision_draws_them() -> None:
    ours = RandomErasing(probability=1.0).boxes(drawn(6000), 40, 60).astype(float)
    reference = v2.RandomErasing(p=1.0, scale=(0.02, 1 / 3), ratio=(0.3, 3.3))
    torch.manual_seed(0)
    params = [reference.make_params([torch.zeros(3, 40, 60)]) for _ in range(6000)]
    theirs = np.array([[p["i"], p["j"], p["h"], p["w"]] for p in params if p["v"] is not None], float)
    ours = ours[ours[:, 2] > 0]
    for i in range(4):
        assert stats.ks_2samp(ours[:, i], theirs[:, i]).pvalue > 1e-3


def test_erasing_covers_its_box_and_nothing_else() -> None:
    image = torch.full((3, 24, 32), 100, dtype=torch.uint8)
    for erase in (RandomErasing(probability=1.0, fill=7), RandomErasing(probability=1.0)):
        for sample in range(30):
            draws = CounterRng.for_samples(seed=0, epoch=0, sample=sample)
            top, left, height, width = erase.boxes(draws, 24, 32)[0].tolist()
            got = erase(image, draws)
            inside = torch.zeros(24, 32, dtype=torch.bool)
            inside[top : top + height, left : left + width] = True
            assert (got[:, ~inside] == 100).all()
            if erase.fill is not None:
                assert (got[:, inside] == 7).all()
            assert torch.equal(got, erase(image, draws))
    assert (image == 100).all()


def test_erasing_noise_is_noise() -> None:
    erase = RandomErasing(probability=1.0, area=(0.3, 0.3), aspect=(1.0, 1.0))
    draws = CounterRng.for_samples(seed=0, epoch=0, sample=0)
    top, left, height, width = erase.boxes(draws, 100, 100)[0].tolist()
    hole = erase(torch.zeros(3, 100, 100, dtype=torch.uint8), draws)[:, top : top + height, left : left + width]
    levels = np.bincount(hole.reshape(-1).numpy(), minlength=256)
    assert stats.chisquare(levels).pvalue > 1e-3
    red, green, blue = hole.float()
    for one, other in ((red, green), (green, blue), (red[:, 1:], red[:, :-1]), (red[1:], red[:-1])):
        assert abs(np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1]) < 0.06


def test_erasing_happens_as_often_as_told() -> None:
    boxes = RandomErasing(probability=0.25).boxes(drawn(4000), 32, 32)
    assert 0.22 < (boxes[:, 2] > 0).mean() < 0.28
    tiny = RandomErasing(probability=1.0)(torch.zeros(3, 1, 1, dtype=torch.uint8), drawn(1))
    assert tiny.shape == (3, 1, 1)


def batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 16, 20), generator=generator).to(torch.uint8), torch.eye(count)


def test_mixup_is_a_weighted_mean_with_the_neighbour() -> None:
    mix, (pixels, targets) = Mix(mixup=0.8), batch()
    weight, box = mix.draw(3, 5, (16, 20))
    assert box is None
    partner = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])
    mixed, labels = mix(pixels.float(), targets, seed=3, step=5)
    torch.testing.assert_close(mixed, weight * pixels + (1 - weight) * pixels[partner])
    torch.testing.assert_close(labels, weight * targets + (1 - weight) * targets[partner])
    whole, _ = mix(pixels, targets, seed=3, step=5)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, mixed.round().to(torch.uint8))


def test_cutmix_pastes_a_box_of_the_neighbour() -> None:
    mix, (pixels, targets) = Mix(cutmix=1.0), batch()
    areas = []
    for step in range(60):
        weight, box = mix.draw(0, step, (16, 20))
        mixed, labels = mix(pixels, targets, seed=0, step=step)
        torch.testing.assert_close(labels.sum(1), torch.ones(8))
        if box is None or weight == 1:
            continue
        top, left, bottom, right = box
        inside = torch.zeros(16, 20, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert torch.equal(mixed[0][:, inside], pixels[1][:, inside])
        assert torch.equal(mixed[0][:, ~inside], pixels[0][:, ~inside])
        assert float(labels[0, 0]) == pytest.approx(1 - inside.float().mean().item())
        areas.append(weight)
    assert len(areas) > 40
    assert min(areas) < 0.4


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_global_batch_is_mixed_alike_on_any_number_of_processes(world: int, stride: int) -> None:
    mix, (pixels, targets) = Mix(mixup=0.8, cutmix=1.0, stride=stride), batch(8 * stride)
    for step in range(6):
        whole = mix(pixels, targets, seed=0, step=step)
        parts = [mix(*part, seed=0, step=step) for part in zip(pixels.chunk(world), targets.chunk(world), strict=True)]
        for i in range(2):
            assert torch.equal(whole[i], torch.cat([part[i] for part in parts]))


def test_repeats_are_never_mixed_with_themselves() -> None:
    samples = torch.arange(4).repeat_interleave(3)
    assert (Mix(mixup=0.8, stride=3).partners(samples) != samples).all()
    with pytest.raises(ConfigError, match="multiple of 6"):
        Mix(mixup=0.8, stride=3).partners(samples[:9])


def test_a_missing_partner_leaves_the_sample_alone() -> None:
    pixels, targets = batch()
    valid = torch.tensor([True, False, True, True, True, True, True, True])
    for mix in (Mix(mixup=0.8), Mix(cutmix=1.0)):
        mixed, labels = mix(pixels, targets, seed=0, step=1, valid=valid)
        plain = mix(pixels, targets, seed=0, step=1)
        assert torch.equal(mixed[:2], pixels[:2])
        assert torch.equal(labels[:2], targets[:2])
        assert torch.equal(mixed[2:], plain[0][2:])


def test_how_often_and_how_strongly() -> None:
    mix = Mix(mixup=0.8, cutmix=1.0, probability=0.6, switch=0.3)
    drawn_steps = [mix.draw(0, step, (224, 224)) for step in range(4000)]
    on = [mixing for mixing in drawn_steps if mixing.weight < 1]
    assert 0.57 < len(on) / 4000 < 0.63
    assert 0.27 < np.mean([mixing.box is not None for mixing in on]) < 0.33
    weights = [mixing.weight for mixing in on if mixing.box is None]
    assert stats.kstest(weights, "beta", (0.8, 0.8)).pvalue > 1e-3
    assert mix.draw(0, 7, (224, 224)) == mix.draw(0, 7, (224, 224))
    assert Mix().draw(0, 0, (8, 8)).weight == 1


def test_one_hot() -> None:
    assert torch.equal(one_hot(torch.tensor([1, 0, -1]), 3), torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    several = torch.tensor([[0, 2], [1, -1], [-1, -1]])
    assert torch.equal(one_hot(several, 3), torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]]))
    smooth = one_hot(torch.tensor([1, -1]), 4, smoothing=0.1)
    torch.testing.assert_close(smooth, torch.tensor([[0.025, 0.925, 0.025, 0.025], [0.0, 0, 0, 0]]))


def test_bad_values_are_named() -> None:
    makes: list[tuple[Any, str]] = [
        (lambda: RandomErasing(probability=1.5), "probability"),
        (lambda: RandomErasing(area=(0.5, 0.2)), "area"),
        (lambda: RandomErasing(aspect=(0, 1)), "aspect"),
        (lambda: RandomErasing(fill=256), "fill=256"),
        (lambda: Mix(mixup=-1), "mixup=-1"),
        (lambda: Mix(probability=2), "probability=2"),
        (lambda: Mix(stride=0), "stride=0"),
        (lambda: one_hot(torch.zeros(1, dtype=torch.int64), 2, smoothing=1.0), "smoothing"),
    ]
    for make, told in makes:
        with pytest.raises(ConfigError, match=told):
            make()
