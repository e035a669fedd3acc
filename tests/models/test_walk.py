"""The closed form against the modules: parameters counted, multiply-accumulates traced, on the meta device."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.lanes import rest_slow
from tests.models.tiny import SOME, VARIANTS, VIT
from vitrail.models.build import Model, build, build_from, tensor_shapes
from vitrail.models.family import CostStep, ModelConfig, sum_steps
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO, model_config


def shell(config: ModelConfig) -> Model:
    """The network without storage."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in tensor_shapes(config).items()}
    model = build_from(config, tensors)
    return model.to("meta").eval()  # fixed tables, too


def traced_macs(config: ModelConfig, device: str = "meta") -> int:
    """What torch counts for one image, of all tokens in every layer; 2 FLOPs are one MAC."""
    model, counter = shell(config) if device == "meta" else build(config).eval(), FlopCounterMode(display=False)
    if isinstance(model, ViT):
        model.class_token_only = False
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.empty(1, config.channels, *config.image, device=device))
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return flops // 2


# Tracing takes its time a layer; the other rows differ in numbers only.
QUICK = ("ViT-B/16", "ViT-b/32", "ViT-Nano/4", "Axial-ViT-B/32", "R50+ViT-B/16", "R50+ViT-B/32")
SMALL = ("ViT-Ti/16", "ViT-Nano/4", "Axial-ViT-B/32", "mini-R11+ViT-Nano/4", "BiT-mini-R14", "AxialResNet50")
QUICK += ("mini-R11+ViT-Nano/4", "BiT-R50x1", "BiT-mini-R14", "AxialResNet50")
TRACED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


@pytest.mark.parametrize(
    "name",
    rest_slow(ZOO, *SMALL),
)
def test_parameters_of_every_network(name: str) -> None:
    config = ZOO[name]
    assert config.parameters == sum(math.prod(shape) for shape in tensor_shapes(config).values())


@pytest.mark.parametrize("name", rest_slow(TRACED, "ViT-Nano/4", "mini-R11+ViT-Nano/4", "BiT-mini-R14"))
def test_macs_of_every_network(name: str) -> None:
    assert ZOO[name].macs == traced_macs(ZOO[name])


@pytest.mark.parametrize(
    ("name", "size"),
    rest_slow(
        [
            ("ViT-B/16", 384),
            ("BiT-R50x1", 384),
            ("AxialResNet50", 64),
            ("mini-R11+ViT-Nano/4", 64),
            ("BiT-mini-R14", 28),
            pytest.param("R50+ViT-B/32", 384, marks=pytest.mark.slow),
            pytest.param("Axial-ViT-B/32", 384, marks=pytest.mark.slow),
            pytest.param("ViT-H/14", 378, marks=pytest.mark.slow),
            pytest.param("BiT-R152x4", 384, marks=pytest.mark.slow),
            pytest.param("AxialResNet50", 384, marks=pytest.mark.slow),
        ],
        3,
        4,
    ),
)
def test_both_at_other_sizes(name: str, size: int) -> None:
    config = model_config(name, image_size=size)
    assert config.parameters == sum(math.prod(shape) for shape in tensor_shapes(config).values())
    assert config.macs == traced_macs(config)


@pytest.mark.parametrize("name", SOME)
def test_both_for_every_kind(name: str) -> None:
    """Positions of each kind and place, registers, pools, heads, axial forms, backbones, nothing square."""
    config = VARIANTS[name]
    assert config.parameters == sum(parameter.numel() for parameter in build(config).parameters())
    assert config.macs == traced_macs(config, "cpu")


@pytest.mark.parametrize("name", SOME)
def test_shapes_on_the_way(name: str) -> None:
    """Where a step of the walk has a module of its own, its output has the shape that the walk says."""
    config = VARIANTS[name]
    model = build(config)
    images = torch.zeros(1, config.channels, *config.image)
    steps = {step.name: step.shape for step in config.walk()}
    assert steps["image"] == (*config.image, config.channels)
    if isinstance(config, ViTConfig):
        assert steps["embeddings E"] == tuple(model.embedding(images).shape[1:])
        assert steps[f"block {config.depth}: {'column ' * (config.attention == 'axial')}norm, MLP, residual"] == tuple(
            model.encode(images).shape[1:]
        )
        trunk = None if config.backbone is None else model.embedding.backbone
    else:
        trunk = model.trunk
    if trunk is not None:
        x = trunk.stem(images)
        for stage, units in enumerate(trunk.stages):
            for block, unit in enumerate(units):
                x = unit(x)
                channels_last = (*x.shape[2:], x.shape[1])
                assert steps[f"stage {stage + 1}, block {block + 1}"] == channels_last
    assert list(config.walk())[-1].shape == tuple(model(images).shape[1:])


def test_walk_names_every_part_once() -> None:
    names = [step.name for step in VIT.walk()]
    assert len(names) == len(set(names))
    assert names[:5] == ["image", "patches 2x3", "embeddings E", "class token", "positions (learned)"]
    assert names[-3:] == ["norm", "class token's row", "head: logits"]


def test_summed_adds_up() -> None:
    steps = [CostStep("a", (3,), 5, 7), CostStep("b", (2, 2), 11, 13)]
    assert sum_steps(steps) == CostStep("total", (2, 2), 16, 20)
    assert sum_steps(VIT.walk()) == CostStep("total", (5,), VIT.parameters, VIT.macs)


def test_macs_of_one_image_are_quadratic_in_tokens_only_in_attention() -> None:
    small, large = (replace(VIT, image=size) for size in ((6, 12), (12, 12)))

    def of(config: ViTConfig, part: str) -> int:
        return sum(step.macs for step in config.walk() if step.name.endswith(part))

    assert of(large, ": attention") / of(small, ": attention") == (25 / 13) ** 2
    assert of(large, "MLP, residual") / of(small, "MLP, residual") == 25 / 13
