"""Tiny networks of other libraries with a random value in every parameter, and what each computes, stage by stage.

`judge(name)` builds one of `NAMES`. A judge's tensors are named as its library names them; its reference values have
our order of tokens: class tokens, registers, patches row by row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.parity.networks import Tensors, pictures
from vitrail.core.text import Pair

Library = Literal["timm", "huggingface", "meta"]
PACKAGES: dict[Library, str] = {"timm": "timm", "huggingface": "transformers", "meta": "transformers"}


@dataclass(frozen=True, slots=True)
class Reference:
    """What a judge computes: before the first block, behind each, behind the final norm, and in the end.

    `output` is None where the library itself does not pool. `neck` is SAM's map, [B, C, h, w].
    """

    stem: Tensor
    blocks: list[Tensor]
    tokens: Tensor
    output: Tensor | None
    neck: Tensor | None = None


Finish = Callable[[nn.Module, Tensor, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Judge:
    """A network of another library as its files hold it, and what an importer is expected to make of it.

    `expected` holds fields of a ViTConfig; those of a nested dataclass (rotary, windows) stand in a dictionary.
    `older` are the tensors by the names of an earlier generation of files, where those differ. `dropped` are the
    beginnings of names that an importer leaves out, and `parts` cut out of a tensor what it keeps. `other` is a second
    size, not square, or None where the library has none, for the reason in `fixed`. `facts` are what the files do not
    say. `resample` is how the library resizes positions where that is not how the family's own code does it.
    """

    name: str
    library: Library
    network: nn.Module
    blocks: list[nn.Module]
    tensors: Tensors
    settings: dict[str, Any] | None
    expected: dict[str, Any]
    call: Callable[[Tensor], Any]
    finish: Finish
    native: Pair
    other: Pair | None
    fixed: str = ""
    older: Tensors | None = None
    dropped: tuple[str, ...] = ()
    parts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    resample: str = ""

    @property
    def sizes(self) -> list[Pair]:
        return [self.native, self.other] if self.other else [self.native]

    def images(self, size: Pair) -> Tensor:
        return pictures(size, seed=3)

    @torch.no_grad()
    def run(self, images: Tensor) -> Reference:
        """Every stage of one forward pass, as [B, T, D]."""
        found: list[Tensor] = []

        def see_input(_module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            found.append(as_tokens(inputs[0] if inputs else named["hidden_states"], self.network_width).clone())

        def see_output(_module: nn.Module, _inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            found.append(as_tokens(value, self.network_width).clone())

        hooks = [self.blocks[0].register_forward_pre_hook(see_input, with_kwargs=True)]
        hooks += [block.register_forward_hook(see_output) for block in self.blocks]
        try:
            out = self.call(images)
        finally:
            for hook in hooks:
                hook.remove()
        return Reference(stem=found[0], blocks=found[1:], **self.finish(self.network, found[-1], out))

    @property
    def network_width(self) -> int:
        return self.expected["width"]


def as_tokens(value: Tensor, width: int) -> Tensor:
    """[B, T, D] from that itself, from [B, h, w, D], or from [B, D, h, w]."""
    if value.ndim == 3:
        return value
    return value.flatten(1, 2) if value.shape[-1] == width else value.flatten(2).transpose(1, 2)


def join_readouts(tokens: Tensor, prefix: int) -> Tensor:
    """The usual readout of DINO's features: the class token next to the mean of the patches, [B, 2D]."""
    return torch.cat([tokens[:, 0], tokens[:, prefix:].mean(1)], dim=1)


@torch.no_grad()
def fill(network: nn.Module, seed: int = 0) -> Any:
    """A random value in every parameter: none is 0 or 1, and activations stay of order one."""
    generator = torch.Generator().manual_seed(seed)
    scales = {id(part.weight) for part in network.modules() if is_norm(part)}
    for name, tensor in network.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        last = name.rsplit(".", 1)[-1]
        if id(tensor) in scales or last.startswith(("gamma", "lambda")):
            tensor.copy_(1 + 0.3 * noise)
        elif last == "bias" or last.endswith("_bias"):
            tensor.copy_(0.2 * noise)
        elif last == "in_proj_weight" or (last == "weight" and not name.endswith("position_embedding.weight")):
            shift = torch.randn(len(tensor), *[1] * (tensor.ndim - 1), generator=generator)
            tensor.copy_((noise + 0.3 * shift) * tensor[0].numel() ** -0.5)
        else:  # tokens, positions, tables, frequencies
            tensor.copy_(0.5 * noise)
    return network.eval().requires_grad_(False)


def is_norm(part: nn.Module) -> bool:
    return "norm" in type(part).__name__.lower() and getattr(part, "weight", None) is not None


def own(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def _tables() -> dict[str, Callable[[], Judge]]:
    from tests.parity.judges_huggingface import HUGGINGFACE
    from tests.parity.judges_meta import META
    from tests.parity.judges_timm import TIMM

    return {**TIMM, **HUGGINGFACE, **META}


def library_of(name: str) -> Library:
    """The part of a judge's name in front of the colon."""
    return name.split(":")[0]  # pyright: ignore[reportReturnType]


@cache
def judge(name: str) -> Judge:
    return _tables()[name]()


def names() -> list[str]:
    return list(_tables())
