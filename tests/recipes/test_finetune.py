"""The choices for somebody's folder of images: from tens to millions, and what is said of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.text import Pair
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.models.zoo import model_config
from vitrail.recipes.finetune import choose_batch, choose_defaults, explain_choices
from vitrail.train.config import Run

DEIT = model_config("ViT-Ti/16", gelu="erf")
CARD = Preprocessing(image=(224, 224), resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic")


def chosen(samples: int, **more: Any) -> Run:
    return choose_defaults(DEIT, CARD, **{"weights": "w", "source": "s", "samples": samples, "classes": 37, **more})


def explained(run: Run, samples: int, picture: Pair | None = None, **more: bool) -> tuple[str, ...]:
    count = samples - round(samples * run.data.dev)
    return explain_choices(run, DEIT, count, picture, **{"given": False, "has_val": False, **more})


# samples, batch, steps, warm-up
RULE = [
    (20, 16, 200, 20),
    (200, 16, 338, 33),
    (1_000, 32, 844, 84),
    (3_680, 128, 776, 77),
    (20_000, 512, 1_055, 105),
    (50_000, 512, 2_637, 263),
    (1_281_167, 512, 20_000, 500),
]


@pytest.mark.parametrize(("samples", "batch", "steps", "warmup"), RULE)
def test_rule(samples: int, batch: int, steps: int, warmup: int) -> None:
    run = chosen(samples)
    assert (run.batch, run.steps, run.schedule.warmup) == (batch, steps, warmup)
    assert (run.optim.kind, run.optim.lr, run.optim.momentum, run.optim.clip) == ("sgd", 0.01, 0.9, 1.0)
    assert (run.schedule.decay, run.optim.weight_decay, run.data.dev) == ("cosine", 0.0, 0.1)


@settings(deadline=None, max_examples=40)
@given(samples=st.integers(2, 20_000_000), has_val=st.booleans())
def test_bounds(samples: int, has_val: bool) -> None:
    """A batch fits into the set, a run is neither over at once nor endless, and its warm-up is inside it."""
    run = chosen(samples, has_val=has_val)
    count = samples - round(samples * run.data.dev)
    assert 1 <= run.batch <= min(512, count)
    assert run.batch & (run.batch - 1) == 0
    assert 200 <= run.steps <= 20_000
    assert run.steps * run.batch / count < 31 or run.steps == 200
    assert 0 < run.schedule.warmup < run.steps / 5
    assert (run.data.dev > 0) == (not has_val and samples >= 20)


def test_batch_is_never_above_the_set() -> None:
    assert [choose_batch(count) for count in (1, 2, 3, 15, 16, 255, 512, 8_191, 8_192, 10**9)] == [
        *(1, 2, 2, 8, 16, 16, 32, 256, 512, 512)
    ]


def test_weights_say_how_pixels_go_in() -> None:
    run = chosen(3_680)
    assert run.preprocessing == CARD
    assert run.model == replace(DEIT, classes=37)
    assert isinstance(run.augmentation.crop, InceptionCrop)
    assert (run.augmentation.crop.interpolation, run.augmentation.crop.area) == ("bicubic", (0.25, 1.0))
    assert (run.weights, run.data.source) == ("w", "s")
    large = chosen(50_000).augmentation.crop
    assert isinstance(large, InceptionCrop)
    assert large.area == (0.05, 1.0)


@pytest.mark.parametrize(("size", "resize"), [(128, 146), (224, 256), (288, 329)])
def test_another_image_size(size: int, resize: int) -> None:
    run = chosen(3_680, image_size=size)
    why = explained(run, 3_680, (128, 128), given=True)
    assert run.model == replace(DEIT, classes=37, image=(size, size))
    assert run.preprocessing == replace(CARD, image=(size, size), resize=resize)
    assert run.augmentation.size == (size, size)
    assert ("positions resized from 224x224" in why[0]) == (size != 224)
    assert ("are enlarged" in why[0]) == (size > 128)


def test_a_hybrid_is_resized_whole() -> None:
    run = choose_defaults(
        model_config("R50+ViT-B/16"), CARD, weights="w", source="s", samples=99, classes=2, image_size=384
    )
    assert run.model == model_config("R50+ViT-B/16", image_size=384, classes=2)


def test_one_step_of_warm_up_is_one_step() -> None:
    run = chosen(20)
    run = replace(run, steps=12, schedule=replace(run.schedule, warmup=1))
    why = explained(run, 20)
    assert any(", 1 step of warm-up)" in line for line in why)


def test_it_is_said() -> None:
    assert explained(chosen(3_680), 3_680, (128, 128)) == (
        "image size 224x224: the weights' own; change it with --image-size; the images, typically 128x128, are "
        "enlarged",
        "10 % of the training images held out to choose the best weights",
        "batch 128 for 3,312 training images; change it with --batch",
        "776 steps (30.0 epochs, 77 steps of warm-up); change it with --epochs or --steps",
        "learning rate 0.01, sgd, cosine decay, gradients clipped at 1, as in the paper; change it with --lr, or try "
        "several with --sweep",
        "crops of 25 to 100 % of an image and flips; --set augmentation.flip=0 if left and right differ",
    )
    assert explained(chosen(50_000, has_val=True), 50_000, has_val=True)[1:3] == (
        "the val split chooses the best weights",
        "batch 512 for 50,000 training images; change it with --batch; gradients are accumulated if memory is short",
    )
    assert explained(chosen(19), 19)[1] == "no images held out: there are too few"


def test_mistakes() -> None:
    with pytest.raises(ImageSizeError, match="use 224 or 240"):
        chosen(100, image_size=230)
    with pytest.raises(ConfigError, match="1 images of 37 classes"):
        chosen(1)
    with pytest.raises(ConfigError, match="100 images of 1 classes"):
        chosen(100, classes=1)
