"""vitrail against timm: the same numbers from the same file, and files that come back as they went in."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.lanes import rest_slow
from tests.parity.networks import assert_parity, assert_same, differences, pictures, randomise
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.weights import load
from vitrail.core.errors import MismatchedWeights
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig

timm = pytest.importorskip("timm")

WIDTHS = {"tiny": 192, "small": 384, "base": 768, "large": 1024, "huge": 1280}
HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "huge": 16}
NAMED = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_small_patch32_224",
    "vit_base_patch16_224",
    "vit_base_patch32_224",
    "vit_large_patch16_224",
    "vit_large_patch32_224",
    "vit_huge_patch14_224",
]
HYBRIDS = {
    "R50+ViT-B/16": ("vit_base_r50_s16_224", {}),
    "R50+ViT-L/32": ("vit_large_r50_s32_224", {}),
    "R50+ViT-B/32": ("vit_large_r50_s32_224", {"embed_dim": 768, "num_heads": 12}),
    "R50+ViT-L/16": ("vit_base_r50_s16_224", {"embed_dim": 1024, "num_heads": 16}),
}


def made(name: str, seed: int = 0, **arguments: Any) -> Any:
    with torch.device("meta"):
        network = timm.create_model(name, **{"num_classes": 11, **arguments})
    return randomise(network.to_empty(device="cpu"), seed)


def bit(blocks: tuple[int, ...], factor: int, classes: int = 11) -> Any:
    """timm's BiT of any depth and width, from timm's own parts."""
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    conv = partial(StdConv2d, eps=1e-8)
    network = ResNetV2(list(blocks), num_classes=classes, width_factor=factor, stem_type="fixed", conv_layer=conv)
    return randomise(network)


def written(network: nn.Module, path: Path) -> Path:
    """The state dict as timm's users save it."""
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    if path.suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path, metadata={"format": "pt"})
    return path


def blocks_of(network: Any) -> list[nn.Module]:
    if hasattr(network, "stages"):
        return [block for stage in network.stages for block in stage.blocks]
    return list(network.blocks)


def there_and_back(
    network: Any, folder: Path, size: tuple[int, int] = (224, 224), suffix: str = ".safetensors", **facts: Any
) -> Any:
    """Read what timm wrote, compare at every place, write it for timm again: nothing may change on the way."""
    source = written(network, folder / f"in{suffix}")
    model = load(source, **facts)
    assert_parity(model, network, blocks_of(network), pictures(size))
    done = convert(source, folder / "out.safetensors", to="timm", **facts)
    assert done.parity.identical == done.parity.tensors
    assert done.parity.worst < 1e-5
    assert len(done.parity.rows) == len(blocks_of(network)) + 2
    assert_same(load_file(done.target), network.state_dict())
    network.load_state_dict(load_file(done.target), strict=True)
    return model


@pytest.mark.parametrize("name", rest_slow(NAMED))
def test_two_layers_of_every_vit(name: str, tmp_path: Path) -> None:
    shape, patch = name.split("_")[1], int(name.split("patch")[1].split("_")[0])
    side = 4 * patch if shape in ("large", "huge") else 224
    config = there_and_back(made(name, depth=2, img_size=side), tmp_path, (side, side)).config
    assert (config.width, config.heads, config.mlp_width) == (WIDTHS[shape], HEADS[shape], 4 * WIDTHS[shape])
    assert (config.patch, config.image) == ((patch, patch), (side, side))
    assert (config.depth, config.classes, config.gelu, config.norm_eps) == (2, 11, "erf", 1e-6)


@pytest.mark.slow
def test_the_whole_of_b16(tmp_path: Path) -> None:
    model = there_and_back(made("vit_base_patch16_224", num_classes=1000), tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 86_567_656


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch16_224", "vit_small_patch32_224", "vit_base_patch32_224"]
)
def test_the_whole_of_the_others_up_to_base(name: str, tmp_path: Path) -> None:
    there_and_back(made(name, num_classes=1000), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mlp_width"), [("vit_giant_patch14_224", 6144), ("vit_gigantic_patch14_224", 8192)])
def test_one_layer_of_the_giants(name: str, mlp_width: int, tmp_path: Path) -> None:
    """Their MLP is not a whole multiple of the width, and timm rounds the product down."""
    network = made(name, depth=1, img_size=56)
    model = there_and_back(network, tmp_path, (56, 56))
    assert (model.config.mlp_width, model.config.heads) == (mlp_width, 16)
    folder = convert(tmp_path / "in.safetensors", tmp_path / "folder", to="timm").target
    other = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert_same(other.state_dict(), network.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("paper", HYBRIDS)
def test_hybrids_of_few_layers(paper: str, tmp_path: Path) -> None:
    name, arguments = HYBRIDS[paper]
    network = made(name, depth=1 if "L" in paper else 2, img_size=64, **arguments)
    model = there_and_back(network, tmp_path, (64, 64))
    inner = model.config.backbone
    assert inner.blocks == ((3, 4, 9) if paper.endswith("16") else (3, 4, 6, 3))
    assert (inner.standardisation, inner.standardisation_eps, inner.norm_eps) == ("sqrt(var+eps)", 1e-8, 1e-5)
    assert (model.config.patch, model.config.image) == ((1, 1), (64, 64))
    if paper == "R50+ViT-B/16":
        taken_as_folder(network, tmp_path, pictures((64, 64)))


@pytest.mark.slow
def test_the_whole_of_r50_b16(tmp_path: Path) -> None:
    model = there_and_back(made("vit_base_r50_s16_224", num_classes=1000), tmp_path)
    assert sum(p.numel() for p in model.parameters()) == 98_659_112


@pytest.mark.parametrize(
    ("blocks", "factor", "size"),
    rest_slow([((1, 1), 1, (32, 48)), ((1, 2, 3, 1), 1, (64, 64)), ((1, 1, 2), 1, (75, 90)), ((1, 1, 1), 2, (32, 64))]),
    ids=["small", "R101x1", "images of odd size", "R152x2 and R50x2"],
)
def test_bit_of_few_units(blocks: tuple[int, ...], factor: int, size: tuple[int, int], tmp_path: Path) -> None:
    model = there_and_back(bit(blocks, factor), tmp_path, size)
    assert model.config == ResNetConfig(blocks=blocks, factor=factor, classes=11, standardisation_eps=1e-8)


@pytest.mark.slow
def test_the_whole_of_bit_r50x1(tmp_path: Path) -> None:
    network = made("resnetv2_50x1_bit")
    there_and_back(network, tmp_path, (96, 96))
    taken_as_folder(network, tmp_path, pictures((96, 96)))


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "factor"), [((3, 4, 23, 3), 1), ((1, 1, 1, 1), 4), ((1, 2, 2, 1), 3)])
def test_the_deep_and_the_wide_bit(blocks: tuple[int, ...], factor: int, tmp_path: Path) -> None:
    there_and_back(bit(blocks, factor), tmp_path, (128, 128))


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean of patches, norm behind": (
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "pool": "mean", "norm_after_pool": True, "position_prefix": True},
    ),
    "mean of patches, norm in front": (
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"class_token": False, "pool": "mean", "norm_after_pool": False},
    ),
    "mean next to a class token": (
        {"global_pool": "avg"},
        {"class_token": True, "pool": "mean", "norm_after_pool": True, "position_prefix": True},
    ),
    "registers": (
        {"reg_tokens": 4, "no_embed_class": True},
        {"registers": 4, "position_prefix": False, "class_token": True},
    ),
    "registers without a class token": (
        {"reg_tokens": 2, "class_token": False, "global_pool": "avg", "no_embed_class": True},
        {"registers": 2, "class_token": False, "pool": "mean"},
    ),
    "class token without a position": ({"no_embed_class": True}, {"position_prefix": False, "registers": 0}),
    "no bias on q, k, v": ({"qkv_bias": False}, {"qkv_bias": False}),
    "one channel": ({"in_chans": 1}, {"channels": 1}),
    "no head": ({"num_classes": 0}, {"classes": 0, "head": "none"}),
    "a larger image": ({"img_size": 96}, {"image": (96, 96)}),
    "patches that are not square": (
        {"patch_size": (16, 8), "img_size": (112, 56)},
        {"patch": (16, 8), "image": (112, 56)},
    ),
}


@pytest.mark.parametrize(
    "variant",
    rest_slow(VARIANTS, "mean of patches, norm behind", "registers"),
)
def test_variants_of_ti16(variant: str, tmp_path: Path) -> None:
    arguments, expected = VARIANTS[variant]
    network = made("vit_tiny_patch16_224", **{"depth": 2, "img_size": 64, **arguments})
    source = written(network, tmp_path / "in.safetensors")
    model = load(source)
    assert isinstance(model.config, ViTConfig)
    assert {field: getattr(model.config, field) for field in expected} == expected
    images = pictures(model.config.image, model.config.channels)
    assert_parity(model, network, blocks_of(network), images)
    done = convert(source, tmp_path / "out.safetensors", to="timm")
    assert (done.sidecar, done.lost_fields) == (None, [])
    assert done.parity.worst < 1e-5
    assert_same(load_file(done.target), network.state_dict())
    network.load_state_dict(load_file(done.target), strict=True)


def test_a_picture_that_is_not_square_must_be_told(tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", depth=2, img_size=(96, 160))
    source = written(network, tmp_path / "in.safetensors")
    with pytest.raises(MismatchedWeights, match=r"61 positions make no square grid; pass image=\(height, width\)"):
        load(source)
    there_and_back(network, tmp_path, (96, 160), image=(96, 160))
    wrong = load(source, image=(160, 96))
    assert wrong.config.grid == (10, 6)
    with pytest.raises(MismatchedWeights, match="61 positions do not fit 96x96 pixels"):
        load(source, image=(96, 96))


def test_tanh_gelu_must_be_told(tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", depth=2, act_layer="gelu_tanh")
    source = written(network, tmp_path / "in.safetensors")
    assert_parity(load(source, gelu="tanh"), network, blocks_of(network), pictures((224, 224)))
    assert max(differences(load(source), network, blocks_of(network), pictures((224, 224)))) > 3e-5


@pytest.mark.parametrize("dtype", rest_slow([torch.float16, torch.bfloat16, torch.float64]))
@pytest.mark.parametrize("suffix", rest_slow([".pth", ".safetensors"]))
def test_other_types_keep_their_bits(dtype: torch.dtype, suffix: str, tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", depth=2).to(dtype)
    source = written(network, tmp_path / f"in{suffix}")
    for step in ("ours.safetensors", "again.pth"):
        source = convert(source, tmp_path / step, to="timm" if step.endswith(".pth") else None).target
    assert_same(torch.load(source), network.state_dict())


def test_a_pth_file_with_a_holder_and_a_wrapper(tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", depth=2)
    state = {f"module.{name}": tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 7}, tmp_path / "run.pth.tar")
    model = load(tmp_path / "run.pth.tar")
    assert_parity(model, network, blocks_of(network), pictures((224, 224)))


@pytest.mark.parametrize("suffix", rest_slow([".safetensors", ".pth"]))
def test_timm_takes_our_file_as_a_checkpoint(suffix: str, tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", depth=1, img_size=64)
    source = written(network, tmp_path / f"in{suffix}")
    target = convert(source, tmp_path / f"out{suffix}", to="timm").target
    arguments = {"depth": 1, "img_size": 64, "num_classes": 11}
    other = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(target), **arguments).eval()
    images = pictures((64, 64))
    with torch.no_grad():
        assert torch.equal(other(images), network(images))


def taken_as_folder(network: Any, folder: Path, images: Tensor, **facts: Any) -> None:
    """Write what was read as a folder that timm's hub code takes for a pretrained model."""
    done = convert(folder / "in.safetensors", folder / "folder", to="timm", **facts)
    assert (done.sidecar, done.lost_fields, done.parity.worst < 1e-5) == (None, [], True)
    other = timm.create_model(f"local-dir:{done.target}", pretrained=True).eval()
    assert_same(other.state_dict(), network.state_dict())
    with torch.no_grad():
        assert torch.equal(other(images), network(images))
    assert load(done.target).config == load(folder / "in.safetensors", **facts).config
    cfg = other.pretrained_cfg
    assert (cfg["num_classes"], cfg["interpolation"], cfg["mean"]) == (11, "bicubic", [0.485, 0.456, 0.406])


@pytest.mark.parametrize(
    "arguments",
    rest_slow(
        [
            {"depth": 2},
            {
                "depth": 1,
                "in_chans": 1,
                "global_pool": "avg",
                "qkv_bias": False,
                "reg_tokens": 3,
                "no_embed_class": True,
            },
            {"depth": 1, "class_token": False, "global_pool": "avg", "fc_norm": False, "patch_size": 8, "num_heads": 6},
        ],
        1,
    ),
    ids=["plain", "registers", "mean"],
)
def test_timm_takes_our_folder_as_a_pretrained_model(arguments: dict[str, Any], tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", img_size=64, **arguments)
    written(network, tmp_path / "in.safetensors")
    facts = {"heads": 6} if "num_heads" in arguments else {}
    taken_as_folder(network, tmp_path, pictures((64, 64), arguments.get("in_chans", 3)), **facts)


def test_a_folder_says_which_gelu(tmp_path: Path) -> None:
    network = made("vit_tiny_patch16_224", depth=2, act_layer="gelu_tanh")
    done = convert(written(network, tmp_path / "in.safetensors"), tmp_path / "folder", to="timm", gelu="tanh")
    assert (done.sidecar, load(done.target).config.gelu) == (None, "tanh")
    other = timm.create_model(f"local-dir:{done.target}", pretrained=True).eval()
    assert_parity(load(done.target), other, blocks_of(other), pictures((224, 224)))


# Numerics that ordinary weights hide. Each is brought to light by values so small that the epsilon counts.


@torch.no_grad()
def faint(network: nn.Module) -> Any:
    """Kernels and tokens of about the size of the epsilons."""
    for name, tensor in network.named_parameters():
        if tensor.ndim == 4 and "head" not in name:
            tensor.mul_(3e-3)
        if tensor.ndim == 3 or name == "patch_embed.proj.bias":
            tensor.mul_(1e-3)
    return network


@pytest.mark.parametrize(
    "fact", rest_slow([{}, {"norm_eps": 1e-12}, {"norm_eps": 1e-5}, {"gelu": "tanh"}], 0, 2), ids=str
)
def test_numerics_of_the_vit_count(fact: dict[str, Any], tmp_path: Path) -> None:
    network = faint(made("vit_tiny_patch16_224", depth=2))
    model = load(written(network, tmp_path / "in.safetensors"), **fact)
    largest = max(differences(model, network, blocks_of(network), pictures((224, 224))))
    assert (largest < 1e-5) if not fact else (largest > 2e-5)


@pytest.mark.parametrize(
    "fact",
    [
        {},
        {"norm_eps": 1e-6},
        {"standardisation_eps": 1e-10},
        {"standardisation": "std+eps"},
        {"padding": "same"},
        {"pool_padding": "infinity"},
    ],
    ids=str,
)
def test_numerics_of_bit_count(fact: dict[str, Any], tmp_path: Path) -> None:
    network = faint(bit((1, 1), 1))
    model = load(written(network, tmp_path / "in.safetensors"), **fact)
    largest = max(differences(model, network, blocks_of(network), 0.02 * pictures((64, 64)) - 0.05))
    assert (largest < 1e-5) if not fact else (largest > 1e-4)


def small_hybrid() -> Any:
    """timm's hybrid of three units, from timm's own parts."""
    from timm.layers.std_conv import StdConv2dSame
    from timm.models.resnetv2 import ResNetV2
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import HybridEmbed

    conv = partial(StdConv2dSame, eps=1e-8)
    trunk = ResNetV2((1, 1, 1), num_classes=0, global_pool="", preact=False, stem_type="same", conv_layer=conv)
    embed = partial(HybridEmbed, backbone=trunk)
    network = VisionTransformer(
        img_size=64, patch_size=1, num_classes=11, embed_dim=192, depth=1, num_heads=3, embed_layer=embed
    )
    return randomise(network)


@pytest.mark.parametrize(
    "fact", rest_slow([{}, {"norm_eps": 1e-6}, {"standardisation_eps": 1e-10}, {"padding": "symmetric"}], 0, 2), ids=str
)
def test_numerics_of_the_hybrid_count(fact: dict[str, Any], tmp_path: Path) -> None:
    network = faint(small_hybrid())
    path = written(network, tmp_path / "in.safetensors")
    backbone = load(path).config.backbone
    model = load(path, backbone=replace(backbone, **fact))
    largest = max(differences(model, network, blocks_of(network), 0.004 * pictures((64, 64))))
    assert (largest < 1e-5) if not fact else (largest > 1e-4)
