"""vitrail against torchvision: the same numbers from the same file, and files that come back as they went in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.models import vision_transformer
from torchvision.models.vision_transformer import VisionTransformer

from tests.lanes import rest_slow
from tests.parity.networks import assert_parity, assert_same, differences, pictures, randomise
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.weights import load
from vitrail.core.errors import MismatchedWeights

SHAPES = {
    "B/16": (768, 12, 3072, 16),
    "B/32": (768, 12, 3072, 32),
    "L/16": (1024, 16, 4096, 16),
    "L/32": (1024, 16, 4096, 32),
    "H/14": (1280, 16, 5120, 14),
    "S/16": (384, 6, 1536, 16),
    "Ti/16": (192, 3, 768, 16),
}


def made(name: str, *, depth: int = 2, side: int = 224, **arguments: Any) -> VisionTransformer:
    width, heads, mlp_width, patch = SHAPES[name]
    with torch.device("meta"):
        network = VisionTransformer(
            image_size=side,
            patch_size=patch,
            num_layers=depth,
            num_heads=heads,
            hidden_dim=width,
            mlp_dim=mlp_width,
            **{"num_classes": 11, **arguments},
        )
    return randomise(network.to_empty(device="cpu"))


def written(network: nn.Module, path: Path) -> Path:
    torch.save(network.state_dict(), path)
    return path


def blocks_of(network: VisionTransformer) -> list[nn.Module]:
    return list(network.encoder.layers)


def there_and_back(network: VisionTransformer, folder: Path, side: int = 224, suffix: str = ".safetensors") -> Any:
    """Read what torchvision wrote, compare at every place, write it for torchvision again."""
    source = written(network, folder / "in.pth")
    model = load(source)
    assert_parity(model, network, blocks_of(network), pictures((side, side)))
    done = convert(source, folder / f"out{suffix}", to="torchvision")
    assert (done.sidecar, done.lost_fields) == (None, [])
    assert done.parity.identical == done.parity.tensors
    assert done.parity.worst < 1e-5
    state = torch.load(done.target) if suffix == ".pth" else load_file(done.target)
    assert_same(state, network.state_dict())
    network.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("name", rest_slow(SHAPES, "Ti/16"))
def test_two_layers_of_every_vit(name: str, tmp_path: Path) -> None:
    width, heads, mlp_width, patch = SHAPES[name]
    side = 4 * patch if name[0] in "LH" else 224
    config = there_and_back(made(name, side=side), tmp_path, side, ".pth" if side == 224 else ".safetensors").config
    assert (config.width, config.heads, config.mlp_width, config.patch) == (width, heads, mlp_width, (patch, patch))
    assert (config.depth, config.classes, config.head, config.gelu, config.norm_eps) == (2, 11, "linear", "erf", 1e-6)


@pytest.mark.slow
def test_the_whole_of_b16(tmp_path: Path) -> None:
    with torch.device("meta"):
        network = vision_transformer.vit_b_16(image_size=96)
    model = there_and_back(randomise(network.to_empty(device="cpu")), tmp_path, 96)
    assert sum(p.numel() for p in model.parameters()) == 86_567_656 - (14 * 14 - 6 * 6) * 768


@pytest.mark.slow
@pytest.mark.parametrize("name", ["B/16", "B/32", "S/16", "Ti/16"])
def test_the_whole_of_all_up_to_base(name: str, tmp_path: Path) -> None:
    there_and_back(made(name, depth=12, num_classes=1000), tmp_path)


def test_representation_size_is_the_hidden_tanh_layer(tmp_path: Path) -> None:
    network = made("Ti/16", representation_size=192)
    assert there_and_back(network, tmp_path).config.head == "tanh"


def test_representation_of_another_width_is_refused(tmp_path: Path) -> None:
    source = written(made("Ti/16", representation_size=100), tmp_path / "in.pth")
    with pytest.raises(MismatchedWeights, match=r"in\.pth: tensor 'heads\.pre_logits\.weight' has shape \[100, 192\]"):
        load(source)


def test_older_names_are_read_and_todays_written(tmp_path: Path) -> None:
    network = made("Ti/16")
    older = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in network.state_dict().items()
    }
    assert len(set(older) - set(network.state_dict())) == 8
    torch.save(older, tmp_path / "older.pth")
    assert_parity(load(tmp_path / "older.pth"), network, blocks_of(network), pictures((224, 224)))
    target = convert(tmp_path / "older.pth", tmp_path / "out.safetensors", to="torchvision").target
    assert_same(load_file(target), network.state_dict())


def test_no_head(tmp_path: Path) -> None:
    network = made("Ti/16")
    network.heads = nn.Sequential()
    model = there_and_back(network, tmp_path)
    assert (model.config.classes, model.config.head) == (0, "none")


@pytest.mark.parametrize("dtype", rest_slow([torch.float16, torch.bfloat16]))
def test_other_types_keep_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    network = made("Ti/16").to(dtype)
    ours = convert(written(network, tmp_path / "in.pth"), tmp_path / "ours.safetensors").target
    for suffix, read in ((".pth", torch.load), (".safetensors", load_file)):
        assert_same(read(convert(ours, tmp_path / f"out{suffix}", to="torchvision").target), network.state_dict())


@pytest.mark.parametrize("fact", [{"gelu": "tanh"}, {"heads": 6}], ids=str)
def test_another_fact_gives_other_numbers(fact: dict[str, Any], tmp_path: Path) -> None:
    network = made("Ti/16")
    model = load(written(network, tmp_path / "in.pth"), **fact)
    assert max(differences(model, network, blocks_of(network), pictures((224, 224)))) > 3e-5
