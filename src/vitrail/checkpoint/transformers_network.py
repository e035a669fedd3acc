"""Runs a Hugging Face folder in transformers: its network, its layers, and its outputs in our form."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import read_json
from vitrail.checkpoint.formats.huggingface.folder import find_family
from vitrail.core.text import Pair
from vitrail.models.family import ModelConfig
from vitrail.models.layers import pool
from vitrail.models.query_output import QueryOutput, flatten_output
from vitrail.models.vit_config import ViTConfig, vit_config


class TransformersNetwork(NamedTuple):
    network: nn.Module
    units: list[nn.Module]
    logits: Callable[[Any], Tensor]
    tokens: Callable[[Tensor], Tensor]  # converts tokens between units to [B, T, D]


class PatchInput(nn.Module):
    """A network that takes the pixels of patches, channels last, and the shape of their grid (SigLIP 2)."""

    def __init__(self, network: nn.Module, patch: Pair):
        super().__init__()
        self.network, self.patch = network, patch

    def forward(self, images: Tensor) -> Any:
        """[B, C, H, W] -> the network's output for patches [B, N, P·P·C]."""
        (high, wide), batch = self.patch, images.shape[0]
        grid = images.unflatten(3, (-1, wide)).unflatten(2, (-1, high))  # [B, C, rows, P, columns, P]
        pixels = grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        shapes = torch.tensor([[grid.shape[2], grid.shape[4]]] * batch, device=images.device)
        mask = torch.ones(pixels.shape[:2], dtype=torch.long, device=images.device)
        return self.network(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes)


def load_with_transformers(config: ModelConfig, folder: Path) -> TransformersNetwork:
    """The network of a folder, loaded by the class that its config.json names."""
    transformers: Any = importlib.import_module("transformers")  # untyped: it has thousands of files
    transformers.utils.logging.disable_progress_bar()
    settings = read_json(folder / "config.json")
    kind: Any = getattr(transformers, settings["architectures"][0])
    family = find_family(settings)
    # A pooler that is missing in the folder would be initialised at random.
    poolerless = family is not None and not family.pooled(vit_config(config))
    takes_pooler = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    without = {"add_pooling_layer": False} if poolerless and takes_pooler else {}
    network: Any = kind.from_pretrained(str(folder), dtype=torch.float32, **without).eval()
    if family is None:
        inner = getattr(network, "bit", network)
        units = [layer for stage in inner.encoder.stages for layer in stage.layers]
        return TransformersNetwork(network, units, lambda out: _read_bit(config, out), lambda z: z)
    c = vit_config(config)
    units = next(list(m) for m in network.modules() if isinstance(m, nn.ModuleList) and len(m) == c.depth)
    takes_patches = "num_patches" in settings
    return TransformersNetwork(
        PatchInput(network, c.patch) if takes_patches else network,
        units,
        lambda out: _read(c, out, pooled=family.pooled(c)),
        _flatten_last if family.model_type == "vitdet" else _flatten_first,
    )


def _read(c: ViTConfig, out: Any, *, pooled: bool) -> Tensor:
    """Logits, or our network's output if it has none: [B, K] or [B, D]."""
    if c.has_queries:
        return flatten_output(QueryOutput(out.class_queries_logits, out.masks_queries_logits))
    if c.classes:
        return out.logits
    if c.projection:
        return out.image_embeds
    if pooled:
        return out.pooler_output
    z: Tensor = out.last_hidden_state
    return z.mean(dim=(2, 3)) if z.ndim == 4 else pool(z, c)


def _read_bit(config: ModelConfig, out: Any) -> Tensor:
    return out.logits if config.classes else out.pooler_output.flatten(1)


def _flatten_first(z: Tensor) -> Tensor:
    """[B, rows, columns, D] -> [B, T, D]."""
    return z.flatten(1, 2) if z.ndim == 4 else z


def _flatten_last(z: Tensor) -> Tensor:
    """[B, D, rows, columns] -> [B, T, D]."""
    return z.flatten(2).transpose(1, 2) if z.ndim == 4 else z
