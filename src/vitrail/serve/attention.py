"""Where the network looks, for one picture: rollout over all layers, and every head of one layer, a byte a weight."""

import base64
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.inspection.rollout import onward
from vitrail.inspection.stream import stream
from vitrail.inspection.tokens import Tokens, has_attention, output_row, patches, precise, tokens_of
from vitrail.serve.refusal import Refused


def shape(network: nn.Module) -> dict[str, Any]:
    """What the maps of a network look like; empty where there are none."""
    if not has_attention(network):
        return {}
    tokens = tokens_of(network)
    return {
        "grid": list(tokens.grid),
        "layers": network.depth,
        "heads": network.config.heads,
        "class_token": tokens.class_token,
    }


def check(network: nn.Module, layer: int | None, most: int) -> None:
    """Refuses a network without attention, a layer that is not there, and maps of more than `most` bytes."""
    if not has_attention(network):
        raise Refused(409, "no attention", f"the model is a {type(network).__name__}, which has none; a ViT has")
    count = network.depth
    if layer is not None and not 0 <= layer < count:
        raise Refused(400, "no such layer", f"layer={layer}: this network has the layers 0 to {count - 1}")
    tokens = tokens_of(network)
    held = 4 * (tokens.prefix + tokens.patches) ** 2 * network.config.heads
    if held > 16 * most:
        raise Refused(409, "attention too large", f"one layer takes {held >> 20:,} MiB; serve a smaller --image-size")
    size = network.config.heads * (tokens.class_token + tokens.patches) * tokens.patches
    if layer is not None and size > most:
        raise Refused(
            409,
            "attention too large",
            f"the maps of a layer are {size >> 20:,} MiB; leave `layer` out for rollout alone",
        )


@torch.inference_mode()
def attend(network: nn.Module, images: Tensor, layer: int | None) -> dict[str, Any]:
    """Of one prepared picture [1, C, H, W]. Rollout is scaled so that its largest patch is 1."""
    tokens = tokens_of(network)
    through: Tensor | None = None
    maps: Tensor | None = None
    for view in stream(network, images):
        through = onward(precise(view.attention.mean(dim=1)), through)
        if view.layer == layer:
            maps = precise(seen(view.attention[0], tokens))
        del view
    assert through is not None
    lit = patches(output_row(through, network), tokens).flatten()
    answer: dict[str, Any] = {
        **shape(network),
        "rollout": [round(value, 6) for value in scaled(lit).tolist()],
        "layer": layer,
        "maps": None,
        "scale": None,
    }
    if maps is not None:
        steps = (scaled(maps) * 255).round().to(torch.uint8).cpu().numpy().tobytes()
        answer["maps"] = base64.b64encode(steps).decode("ascii")
        answer["scale"] = [float(f"{value:.6g}") for value in maps.amax(dim=-1).flatten().tolist()]
    return answer


def seen(attention: Tensor, tokens: Tokens) -> Tensor:
    """How class token and patches see the patches, without registers: [k, T, T] -> [k, T', N]."""
    rows = [attention[:, :1]] if tokens.class_token else []
    return torch.cat([*rows, attention[:, tokens.prefix :]], dim=1)[:, :, tokens.prefix :]


def scaled(values: Tensor) -> Tensor:
    """Each row by its own largest value; a row of zeros stays one."""
    return values / values.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
