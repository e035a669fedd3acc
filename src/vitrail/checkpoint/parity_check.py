"""A parity report: which tensors are read back unchanged from a written file, and how far the other library's network
differs from ours.

Both networks run on one seeded batch. The largest difference is measured after the stem, after every block and at the
logits, relative to the largest value there. The other library's network is built around the file that was just written,
with `strict=True`, so the report also shows that the library accepts the file. Without the library, the report says
that it is not installed.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.files.checks import shorten
from vitrail.checkpoint.files.read_weights import read_weights
from vitrail.checkpoint.formats.registry import FORMATS, find_format
from vitrail.checkpoint.transformers_network import load_with_transformers
from vitrail.checkpoint.weights import build_network
from vitrail.core.errors import ConfigError, ExportRefused
from vitrail.models.build import Model
from vitrail.models.family import ModelConfig
from vitrail.models.query_output import flatten_output
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig, vit_config


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A foreign network, and the modules whose outputs are compared."""

    library: str
    network: nn.Module
    blocks: list[nn.Module]
    logits: Callable[[Any], Tensor] | None = None
    tokens: Callable[[Tensor], Tensor] = lambda z: z  # converts tokens between blocks to our form


def build_reference(format_name: str, config: ModelConfig, target: Path) -> ReferenceModel | str:
    """The other library's network with the written weights, or the reason why there is none."""
    builders = {"timm": build_timm, "huggingface": build_huggingface, "torchvision": build_torchvision}
    family = FORMATS[format_name].library if format_name in FORMATS else format_name
    library = {"huggingface": "transformers"}.get(family, family)
    if family not in builders:
        return "there is no other library to compare with"
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    try:
        return builders[family](config, target)
    except (ConfigError, ExportRefused, RuntimeError, ValueError, AssertionError) as error:
        return f"{library} cannot build this network ({shorten(error)})"


def build_timm(config: ModelConfig, target: Path) -> ReferenceModel:
    import timm

    file = target / "model.safetensors" if target.is_dir() else target
    network: Any
    # Its initial weights would be overwritten; modules other than the plain ViT also compute tables.
    bare = find_format("timm", config).name == "timm"
    with torch.random.fork_rng(devices=[]), torch.device("meta" if bare else "cpu"):
        if isinstance(config, ResNetConfig):
            network = build_timm_bit(config)
        else:
            name, given = describe_for_timm(config)
            args: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
            network = timm.create_model(name, pretrained=False, **args)
    network.load_state_dict(_floats(file), strict=True, assign=True)
    staged = hasattr(network, "stages")
    units = [block for stage in network.stages for block in stage.blocks] if staged else list(network.blocks)
    tokens = nn.Flatten(1, 2) if hasattr(network, "neck") else nn.Identity()  # SAM's stand on their grid
    return ReferenceModel(f"timm {timm.__version__}", network.eval(), units, open_pooling(network, config), tokens)


def describe_for_timm(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """A timm name and the arguments for `create_model`; ExportRefused if timm has no such network."""
    describe = find_format("timm", config).settings
    assert describe is not None
    settings = describe(config)
    return settings["architecture"], settings["model_args"]


def open_pooling(network: Any, config: ModelConfig) -> Callable[[Any], Tensor] | None:
    """Pools in a way that the library does not have, class token and mean side by side, from all its tokens."""
    if not isinstance(config, ViTConfig) or config.pool != "token+mean":
        return None
    network.global_pool = ""
    return lambda tokens: torch.cat([tokens[:, 0], tokens[:, config.prefix :].mean(dim=1)], dim=1)


def load_with_timm(name: str, args: dict[str, Any], target: Path) -> nn.Module:
    """Loads a file or a folder with timm's own functions, by the call that the documentation shows."""
    import timm

    if target.is_dir():
        return timm.create_model(f"local-dir:{target}", pretrained=True).eval()
    return timm.create_model(name, checkpoint_path=str(target), **args).eval()


def build_timm_bit(config: ResNetConfig) -> Any:
    """timm's BiT of any depth and width, also those it has no name for."""
    from timm.layers.std_conv import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    if config.factor % 1 or config.groups != 32 or config.unit != "preactivation":
        raise ExportRefused(f"factor={config.factor}, groups={config.groups}, unit={config.unit!r}")
    sizes: Any = {"layers": list(config.blocks), "width_factor": int(config.factor), "num_classes": config.classes}
    return ResNetV2(**sizes, in_chans=config.channels, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8))


def build_huggingface(config: ModelConfig, target: Path) -> ReferenceModel:
    network, units, logits, tokens = load_with_transformers(config, target)
    return ReferenceModel(f"transformers {version('transformers')}", network, units, logits, tokens)


def build_torchvision(config: ModelConfig, target: Path) -> ReferenceModel:
    import torchvision
    from torchvision.models.vision_transformer import VisionTransformer

    config = vit_config(config, "torchvision's format")
    with torch.device("meta"):
        sizes: Any = {"image_size": config.image[0], "patch_size": config.patch[0], "hidden_dim": config.width}
        sizes |= {"num_layers": config.depth, "num_heads": config.heads, "mlp_dim": config.mlp_width}
        hidden = config.width if config.head == "tanh" else None
        network = VisionTransformer(**sizes, num_classes=config.classes or 1, representation_size=hidden)
    if not config.classes:
        del network.heads.head
    network.load_state_dict(_floats(target), strict=True, assign=True)
    layers = list(network.encoder.layers.children())
    return ReferenceModel(f"torchvision {torchvision.__version__}", network.eval(), layers)


def _floats(file: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in read_weights(file).tensors.items()}


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference at one place in the network: largest absolute difference, absolute and relative to the largest
    value."""

    place: str
    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How many of the tensors were read back bit for bit, and the rows of the comparison with `peer`, or why there are
    none."""

    identical: int
    tensors: int
    reference: str | None
    why_not: str | None
    rows: list[Difference]

    @property
    def worst(self) -> float:
        return max((row.relative for row in self.rows), default=0.0)


def check_parity(bundle: Bundle, back: Bundle, format_name: str, target: Path) -> ParityReport:
    """Compares what was read back with what was written, and with the library that the format belongs to."""
    pairs = [(tensor, back.tensors.get(name)) for name, tensor in bundle.tensors.items()]
    same = sum(b is not None and a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in pairs)
    built = build_reference(format_name, bundle.config, target)
    if isinstance(built, str):
        return ParityReport(same, len(pairs), None, built, [])
    return ParityReport(same, len(pairs), built.library, None, compare(build_network(bundle), built))


def compare(model: Model, other: ReferenceModel, seed: int = 0) -> list[Difference]:
    """Compares the two networks on one seeded batch of two."""
    config = model.config
    images = torch.randn(2, config.channels, *config.image, generator=torch.Generator().manual_seed(seed))
    mine = collect_activations(model, model.units(), images)
    theirs = collect_activations(other.network, other.blocks, images, other.logits, other.tokens)
    rows: list[Difference] = []
    for place, value in mine.items():
        difference = (value.double() - theirs[place].double()).abs().max().item()
        scale = theirs[place].double().abs().max().item()
        rows.append(Difference(place, difference, difference / scale if scale else difference))
    return rows


@torch.no_grad()
def collect_activations(
    model: nn.Module,
    blocks: list[nn.Module],
    images: Tensor,
    logits: Callable[[object], Tensor] | None = None,
    tokens: Callable[[Tensor], Tensor] = lambda z: z,
) -> dict[str, Tensor]:
    """Activations after the stem, after each block and at the end, by forward hooks."""
    seen: dict[str, Tensor] = {}

    def note(place: str, value: Any) -> None:
        seen[place] = tokens(value[0] if isinstance(value, tuple) else value)

    hooks = [blocks[0].register_forward_pre_hook(lambda _, inputs: note("stem", inputs))]
    for i, block in enumerate(blocks, start=1):
        hooks += [block.register_forward_hook(lambda _module, _inputs, output, i=i: note(f"block {i}", output))]
    try:
        out: Any = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return seen | {"logits": logits(out) if logits else flatten_output(out)}
