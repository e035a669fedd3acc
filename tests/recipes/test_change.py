"""Changes that reach more than one field: image size, network, weights."""

from dataclasses import replace

import pytest

from vitrail.core.errors import ConfigError, ImageSizeError, UnknownName
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.data.transforms.crop import InceptionCrop, ResizeCrop
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config
from vitrail.recipes.registry import list_recipes, load_recipe
from vitrail.recipes.run_overrides import start_from, with_changes, with_data, with_image_size


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_can_be_resized_and_back(name: str) -> None:
    run = load_recipe(name)
    old = run.augmentation.size
    new = (2 * old[0], 2 * old[1])
    doubled = with_image_size(run, new)
    assert doubled.augmentation.size == new
    assert doubled.model is None or doubled.model.image == new
    assert doubled.preprocessing is None or doubled.preprocessing.image == new
    assert with_image_size(doubled, old) == run


def test_a_hybrid_takes_its_backbone_along() -> None:
    run = with_image_size(load_recipe("r50-vit-b16-jft"), 384)
    assert isinstance(run.model, ViTConfig)
    assert run.model.backbone is not None
    assert run.model.backbone.image == (384, 384)
    assert run.preprocessing == Preprocessing(image=(384, 384), resize=439)


def test_what_a_crop_is_cut_out_of_grows_in_proportion() -> None:
    crop = with_image_size(load_recipe("finetune-pets"), 192).augmentation.crop
    assert isinstance(crop, ResizeCrop)
    assert (crop.size, crop.resize) == ((192, 192), (224, 224))
    run = load_recipe("finetune-pets")
    short = replace(run, augmentation=replace(run.augmentation, crop=replace(crop, size=(192, 192), resize=224)))
    crop = with_image_size(short, (96, 96)).augmentation.crop
    assert isinstance(crop, ResizeCrop)
    assert crop.resize == 112


def test_a_size_that_leaves_pixels_over_is_refused() -> None:
    with pytest.raises(ImageSizeError, match="use 224 or 240"):
        with_image_size(load_recipe("vit-b16-imagenet"), 225)


def test_a_network_by_name_keeps_the_ways_of_the_recipe() -> None:
    run = with_changes(load_recipe("cifar10"), ["model=ViT-Micro/2", "model.dropout=0.1"])
    model = run.model
    assert isinstance(model, ViTConfig)
    assert (model.width, model.depth, model.patch, model.image) == (192, 9, (2, 2), (32, 32))
    assert (model.pool, model.class_token, model.stochastic_depth, model.dropout) == ("mean", False, 0.1, 0.1)


@pytest.mark.parametrize("text", ["R50+ViT-B/16", "r50_vit_b_16"])
def test_a_hybrid_by_name(text: str) -> None:
    run = with_changes(with_image_size(load_recipe("vit-b16-imagenet"), 384), [f"model={text}"])
    assert run.model == model_config("R50+ViT-B/16", image_size=384, head="tanh", dropout=0.1)
    back = with_changes(run, ["model=ViT-B/16"])
    assert back.model == model_config("ViT-B/16", image_size=384, head="tanh", dropout=0.1)


def test_a_resnet_by_name() -> None:
    run = with_changes(load_recipe("vit-b16-imagenet"), ["model=BiT-R50x1"])
    assert isinstance(run.model, ResNetConfig)
    assert run.model == model_config("BiT-R50x1")
    assert with_changes(run, ["model=ViT-B/16"]).model == model_config("ViT-B/16")


def test_other_texts_for_the_model() -> None:
    assert with_changes(load_recipe("finetune-pets"), ["model=none"]).model is None
    with pytest.raises(ConfigError, match="model=none"):  # a pre-training has a network
        with_changes(load_recipe("cifar10"), ["model=none"])
    same = with_changes(load_recipe("cifar10"), ["model=ViTConfig", "model.depth=3"]).model
    assert isinstance(same, ViTConfig)
    assert same.depth == 3
    with pytest.raises(UnknownName, match="did you mean ViT-B/16"):
        with_changes(load_recipe("cifar10"), ["model=ViT-B/17"])
    assert with_changes(load_recipe("finetune-pets"), ["model=ViT-B/16", "model.image=384"]).model is not None


def test_settings_reach_every_corner() -> None:
    run = with_changes(
        load_recipe("vit-b16-imagenet"),
        [
            *("optim.lr=3e-4", "model.dropout=0.0", "schedule.milestones=0.3,0.6", "mix.mixup=0.2"),
            *("augmentation.policy=RandAugment", "augmentation.policy.magnitude=7", "augmentation.erase.probability=1"),
            *("model.image=384", "augmentation.crop.size=384", "preprocessing=none", "steps=10"),
            *("evaluation.shots=5,10", "precision=bfloat16", "model.placement=every", "recompute=on"),
        ],
    )
    assert (run.optim.lr, run.schedule.milestones, run.mix.mixup, run.steps) == (3e-4, (0.3, 0.6), 0.2, 10)
    assert run.augmentation.policy is not None
    assert getattr(run.augmentation.policy, "magnitude", None) == 7
    assert run.augmentation.erase is not None
    assert (run.augmentation.size, run.augmentation.erase.probability) == ((384, 384), 1.0)
    assert (run.evaluation.shots, run.precision, run.recompute) == ((5, 10), "bfloat16", True)


def test_steps_take_the_place_of_epochs() -> None:
    run = with_changes(load_recipe("cifar10"), ["steps=10"])
    assert (run.steps, run.epochs) == (10, 0)
    run = with_changes(run, ["epochs=0.5"])
    assert (run.steps, run.epochs) == (0, 0.5)
    with pytest.raises(ConfigError, match="give one of them"):
        with_changes(run, ["epochs=1", "steps=10"])


def test_another_source() -> None:
    run = load_recipe("finetune-pets")
    assert with_data(run, "my/pets") == replace(run, data=replace(run.data, source="my/pets"))
    assert with_data(run, "vtab/pets").augmentation == run.augmentation
    assert with_data(run, "vtab/dsprites-orientation").augmentation == replace(run.augmentation, flip=0.0)


def test_a_rule_between_two_fields_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"the network takes 384x384 but the augmentation gives 224x224; --image-size sets both"
    ):
        with_changes(load_recipe("vit-b16-imagenet"), ["model.image=384"])


def test_weights_bring_their_network_and_preprocessing() -> None:
    config = model_config("ViT-Ti/16")
    card = Preprocessing(image=(224, 224), resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic")
    run = start_from(load_recipe("finetune-pets"), "some.safetensors", config, card)
    assert run.weights == "some.safetensors"
    assert run.model == model_config("ViT-Ti/16", image_size=384)
    assert run.preprocessing == replace(card, image=(384, 384), resize=439)
    assert isinstance(load_recipe("digits").augmentation.crop, InceptionCrop)
