"""No field of a config.json of transformers is overlooked: what changes the numbers is read, or the folder is refused.

Each field of a tiny network's config is changed by itself. Where transformers runs the result, vitrail computes the
same, or says why not.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.judges import fill
from tests.parity.networks import TOLERANCE
from vitrail.checkpoint.formats.key_table import TensorShapes
from vitrail.checkpoint.formats.registry import recognise
from vitrail.checkpoint.weights import load
from vitrail.core.errors import VitrailError

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 96}
BIASED = {**WIDE, "use_relative_position_bias": True}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViTModel": ("ViTConfig", WIDE),
    "DeiTModel": ("DeiTConfig", WIDE),
    "ViTMSNModel": ("ViTMSNConfig", WIDE),
    "IJepaModel": ("IJepaConfig", WIDE),
    "BeitModel": ("BeitConfig", BIASED),
    "Data2VecVisionModel": ("Data2VecVisionConfig", BIASED),
    "Dinov2Model": ("Dinov2Config", SIZES),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", SIZES),
    "DINOv3ViTModel": ("DINOv3ViTConfig", WIDE),
    "CLIPVisionModel": ("CLIPVisionConfig", WIDE),
    "MetaClip2VisionModel": ("MetaClip2VisionConfig", WIDE),
    "SiglipVisionModel": ("SiglipVisionConfig", WIDE),
    "Aimv2VisionModel": ("Aimv2VisionConfig", WIDE),
    "PixioModel": ("PixioConfig", {**WIDE, "n_cls_tokens": 3}),
    "SamVisionModel": (
        "SamVisionConfig",
        {**SIZES, "mlp_dim": 96, "window_size": 3, "global_attn_indexes": [1], "output_channels": 16},
    ),
    "VitDetModel": (
        "VitDetConfig",
        {
            **SIZES, "mlp_ratio": 2, "window_size": 3, "window_block_indices": [0],
            "use_relative_position_embeddings": True,
        },
    ),
}  # fmt: skip
# They have to do with training, or with what surrounds a network.
ELSEWHERE = ("dropout", "drop_path", "initializer", "output_", "return_dict", "mask_ratio", "num_labels")
JUNK: tuple[Any, ...] = (None, "abc", [], [None], [[1]], {}, {"a": 1}, -1, 0, float("inf"), float("nan"), 2**70, True)
GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "tanh")


def vary(name: str, value: object) -> Iterator[object]:
    """Other values of a field."""
    if any(part in name for part in ELSEWHERE):
        return
    if isinstance(value, bool):
        yield not value
    elif name.endswith("_act"):
        yield from (act for act in GELUS if act != value)
    elif isinstance(value, float):
        yield 2 * value or 0.1
    elif isinstance(value, int) and name not in ("hidden_size", "num_attention_heads", "num_channels"):
        yield from (value + 1, 2 * value)
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        yield [item - 1 for item in value]
    elif value is None:
        yield from (True, 0.1, 2)


@torch.no_grad()
def compute_theirs(kind: str, config: str, settings: dict[str, Any], folder: Path) -> tuple[Tensor, Tensor] | None:
    """Images and tokens behind the last norm; none where transformers refuses the config or cannot run it."""
    torch.manual_seed(0)
    try:
        network = fill(getattr(transformers, kind)(getattr(transformers, config)(**settings)))
        images = torch.randn(2, 3, *[network.config.image_size] * 2)
        tokens = network(images).last_hidden_state
        network.save_pretrained(folder)
    except Exception:  # whatever transformers raises for a config that it does not check
        return None
    bare = kind in ("CLIPVisionModel", "MetaClip2VisionModel")  # their tokens have not been through the last norm
    last = [part for name, part in network.named_modules() if bare and name.endswith("post_layernorm")]
    return images, last[0](tokens) if last else tokens


def differs(kind: str, config: str, settings: dict[str, Any], folder: Path) -> str:
    """What is wrong with our reading of a folder; nothing where the numbers are the same or it is refused."""
    theirs = compute_theirs(kind, config, settings, folder)
    if theirs is None:
        return ""
    try:
        ours = load(folder)
    except VitrailError:
        return ""
    images, tokens = theirs
    height, width = ours.config.image  # pixels beyond the last patch are seen by none
    images = images[:, :, :height, :width]
    with torch.no_grad():
        found = ours.forward_features(images) if tokens.ndim == 3 else ours.patch_map(images)
    if found.shape != tokens.shape:
        return f"{tuple(found.shape)}, not {tuple(tokens.shape)}"
    far = float((found - tokens).abs().max() / tokens.abs().max())
    return "" if far < TOLERANCE else f"{far:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_changed_field_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    config, settings = NETWORKS[kind]
    assert compute_theirs(kind, config, settings, tmp_path / "base") is not None
    assert not differs(kind, config, settings, tmp_path / "base")
    stated = getattr(transformers, config)(**settings).to_dict()
    wrong: dict[str, str] = {}
    changes = [(name, other) for name, value in stated.items() for other in vary(name, value)]
    for at, (name, value) in enumerate(changes):
        if fault := differs(kind, config, {**settings, name: value}, tmp_path / str(at)):
            wrong[f"{name}={value!r}"] = fault
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_field_of_any_type_is_read_or_refused(kind: str) -> None:
    """Without a traceback, whatever a config.json says."""
    config, settings = NETWORKS[kind]
    with torch.device("meta"):
        network = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    path, tensors, stated = Path(kind), network.state_dict(), json.loads(network.config.to_json_string())
    for name in (*stated, "id2label", "architectures", "architecture"):
        for value in JUNK:
            changed = {**stated, name: value}
            with suppress(VitrailError):
                form, modern = recognise(path, tensors, changed)
                form.infer(TensorShapes(path=path, tensors=modern, settings=changed, facts={}))
