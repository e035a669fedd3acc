"""Every architecture of timm's ViT modules: what its tensors do not show is read from its name, or it is refused.

Networks are built without memory for their tensors, with two blocks. A folder states the architecture and nothing else,
as folders on the hub do.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.lanes import rest_slow
from vitrail.checkpoint.formats.key_table import TensorShapes
from vitrail.checkpoint.formats.registry import recognise
from vitrail.checkpoint.weights import load
from vitrail.core.errors import MismatchedWeights
from vitrail.models.vit_config import ViTConfig

timm = pytest.importorskip("timm")

MODULES = ("vision_transformer", "deit", "eva", "beit", "vision_transformer_sam")
GELU = {"GELU": "erf", "GELUTanh": "tanh", "QuickGELU": "quick"}
POOLS = {"mean": "avg", "token": "token", "map": "map"}
REFUSED = ("sapiens2", "18x2", "_xp_", "parallel", "dlittle", "dwee", "dpwee", "pwee")


def build(architecture: str) -> tuple[Any, dict[str, Any]]:
    """timm's network and the config.json of its folder."""
    cfg = timm.get_pretrained_cfg(architecture)
    args: dict[str, Any] = {"num_classes": cfg.num_classes} if cfg else {}
    args |= {"global_attn_indexes": [1]} if "samvit" in architecture else {}
    args |= {} if "sapiens2" in architecture else {"depth": 2}  # its layers differ
    with torch.device("meta"):
        network = timm.create_model(architecture, **args)
    size = {"input_size": list(cfg.input_size)} if cfg else {}
    return network, {"architecture": architecture, "pretrained_cfg": size}


def infer(network: nn.Module, settings: dict[str, Any]) -> ViTConfig:
    path = Path(settings["architecture"])
    form, tensors = recognise(path, network.state_dict(), settings)
    config = form.infer(TensorShapes(path=path, tensors=tensors, settings=settings, facts={}))
    assert isinstance(config, ViTConfig)
    return config


def states(network: Any) -> dict[str, Any]:
    """What no tensor shows, of timm's network, in our words."""
    block = network.blocks[0]
    pool = getattr(network, "attn_pool", None)
    found: dict[str, Any] = {"heads": block.attn.num_heads, "norm_eps": block.norm1.eps}
    found |= {"rotary": getattr(network, "rope", None) is not None}
    if type(block.mlp.act).__name__ in GELU:
        tanh = getattr(block.mlp.act, "approximate", "none") == "tanh"
        found |= {"gelu": "tanh" if tanh else GELU[type(block.mlp.act).__name__]}
    if hasattr(network, "num_prefix_tokens"):
        found |= {"prefix": network.num_prefix_tokens}
    if pool is not None:
        found |= {"map_heads": pool.num_heads}
        found |= {"map_prefix": getattr(network, "pool_include_prefix", True)} if network.num_prefix_tokens else {}
    if network.num_classes:
        found |= {"pool": network.global_pool}
    return found


def reads(config: ViTConfig) -> dict[str, Any]:
    """The same of ours."""
    found = {name: getattr(config, name) for name in ("heads", "norm_eps", "gelu", "prefix", "map_prefix")}
    return found | {
        "rotary": config.rotary is not None,
        "map_heads": config.map_heads or config.heads,
        "pool": POOLS.get(config.pool, config.pool),
    }


@pytest.mark.parametrize("module", rest_slow(MODULES, "deit", "beit", "vision_transformer_sam"))
def test_an_architecture_is_read_as_what_it_is_or_refused(module: str) -> None:
    wrong: dict[str, Any] = {}
    for architecture in timm.list_models(module=module):
        network, settings = build(architecture)
        try:
            found = reads(infer(network, settings))
        except MismatchedWeights as error:
            if not any(part in architecture for part in REFUSED):
                wrong[architecture] = str(error)
            continue
        differs = {name: (found[name], value) for name, value in states(network).items() if found[name] != value}
        if differs:
            wrong[architecture] = differs
    assert not wrong


@pytest.mark.parametrize(
    ("argument", "value"),
    [("global_pool", "max"), ("norm_layer", "simplenorm"), ("pool_include_prefix", True)],
)
def test_an_argument_that_we_do_not_have_is_refused(argument: str, value: object) -> None:
    """It would change the numbers and no tensor shows it."""
    architecture = "vit_base_patch16_224"
    with torch.device("meta"):
        network = timm.create_model(architecture, depth=1, embed_dim=64, num_heads=2, num_classes=3)
    args = {"global_pool": "avg", "fc_norm": False, "num_heads": 2, argument: value}
    with pytest.raises(MismatchedWeights, match=argument):
        infer(network, {"architecture": architecture, "model_args": args})


def test_a_pool_that_we_do_not_have_is_refused_next_to_the_arguments_too() -> None:
    network, settings = build("vit_base_patch16_224")
    assert infer(network, {**settings, "global_pool": "avg"}).pool == "mean"
    with pytest.raises(MismatchedWeights, match="global_pool"):
        infer(network, {**settings, "global_pool": "avgmax"})


def test_pixels_beyond_the_last_patch_are_cut_off(tmp_path: Path) -> None:
    """As by timm's convolution: SigLIP's So400m/14 states 384 pixels, which are 27 patches and 6 pixels."""
    args = {"img_size": 36, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2, "num_classes": 0}
    theirs = timm.create_model("vit_base_patch16_siglip_224", **args).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    cfg = {"input_size": [3, 36, 36], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}
    settings = {"architecture": "vit_base_patch16_siglip_224", "model_args": args, "pretrained_cfg": cfg}
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    ours, images = load(tmp_path), torch.randn(2, 3, 36, 36, generator=torch.Generator().manual_seed(0))
    assert ours.config.image == ours.card.preprocessing.image == (32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images[:, :, :32, :32]), theirs(images), atol=1e-5, rtol=1e-5)
