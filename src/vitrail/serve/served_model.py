"""What is served: a predictor, its name, and the three things it is asked for.

Where the network looks, for one image: rollout over all layers, and every head of one layer, a byte a weight.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.data.decode.image import EncodedImage
from vitrail.data.targets import Geometry
from vitrail.inspection.layer_taps import (
    TokenLayout,
    get_token_layout,
    has_attention,
    iterate_layers,
    select_output,
    to_float32,
    to_grid,
)
from vitrail.inspection.rollout import roll_layer
from vitrail.predict.predictor import Predictor
from vitrail.serve.batch_queue import Reservation, Room, Ticket
from vitrail.serve.http_errors import Refused
from vitrail.serve.settings import Settings


def shape(network: nn.Module) -> dict[str, Any]:
    """What the maps of a network look like; empty where there are none."""
    if not has_attention(network):
        return {}
    tokens = get_token_layout(network)
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
    tokens = get_token_layout(network)
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
    """Of one prepared image [1, C, H, W]. Rollout is scaled so that its largest patch is 1."""
    tokens = get_token_layout(network)
    through: Tensor | None = None
    maps: Tensor | None = None
    for view in iterate_layers(network, images):
        through = roll_layer(to_float32(view.attention.mean(dim=1)), through)
        if view.layer == layer:
            maps = to_float32(seen(view.attention[0], tokens))
        del view
    assert through is not None
    lit = to_grid(select_output(through, network), tokens).flatten()
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


def seen(attention: Tensor, tokens: TokenLayout) -> Tensor:
    """How class token and patches see the patches, without registers: [k, T, T] -> [k, T', N]."""
    rows = [attention[:, :1]] if tokens.class_token else []
    return torch.cat([*rows, attention[:, tokens.prefix :]], dim=1)[:, :, tokens.prefix :]


def scaled(values: Tensor) -> Tensor:
    """Each row by its own largest value; a row of zeros stays one."""
    return values / values.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)


SHOWN: Final = 1400  # pixels of the longer side of a drawing, at most


@dataclass(frozen=True, slots=True)
class Seen:
    """The upright image that came, and the part of it that the network is shown, in its pixels."""

    size: tuple[int, int]  # (width, height)
    crop: tuple[float, float, float, float]  # left, top, width, height
    geometry: Geometry


class Served:
    """A predictor behind a server. `prepare` may run in many threads, `compute` in one."""

    def __init__(self, predictor: Predictor[Any], name: str, settings: Settings) -> None:
        self.predictor, self.name, self.settings = predictor, name, settings
        self.room = Room(settings.decode_bytes, settings.timeout_s)

    def prepare(self, data: bytes) -> tuple[Tensor, Seen]:
        """Bytes to prepared pixels; BadImage where they are none, or too many by what their header says. Refused
        where the images of others take the memory for decoding for too long."""
        # Without antialiasing the whole image becomes floats, 12 bytes a pixel, before it is resized.
        times = 1 if self.predictor.preprocessing.antialias else 2
        with Reservation(self.room) as reservation:
            image = EncodedImage(
                data, max_pixels=self.settings.max_pixels, reserve=lambda size: reservation.take(times * size)
            ).rgb()
            return self._prepared(image)

    def _prepared(self, image: Image.Image) -> tuple[Tensor, Seen]:
        preparation = self.predictor.preprocessing
        left, top, right, bottom = (
            (0.0, 0.0, float(image.width), float(image.height))
            if preparation.resize is None
            else preparation.centre(image)
        )
        pixels, geometry = self.predictor.view(image)
        return pixels, Seen(image.size, (left, top, right - left, bottom - top), geometry)

    def compute(self, tickets: Sequence[Ticket]) -> Sequence[Any]:
        """Answers of one batch, of one kind."""
        batch = torch.stack([ticket.pixels for ticket in tickets if ticket.pixels is not None])
        match tickets[0].kind:
            case "predict":
                # Here and one by one: outputs and masks of dense tasks are much larger than what is sent of them.
                outputs = self.predictor.logits(batch).split(1)
                return [self._predicted(output, ticket) for output, ticket in zip(outputs, tickets, strict=True)]
            case "embed":
                return self.predictor.embedded(batch).unbind(0)
            case "attention":
                looked = attend(self.predictor.network, self.predictor.normalise(batch), tickets[0].layer)
                return [looked]

    def _predicted(self, output: Tensor, ticket: Ticket) -> tuple[dict[str, Any], Any]:
        """A prediction as data, and itself where it is to be shown."""
        (prediction,) = self.predictor.interpret(output, [ticket.facts.geometry], **ticket.options)
        return prediction.to_dict(), prediction if ticket.show else None

    def show(self, prediction: Any, data: bytes) -> dict[str, Any]:
        """A prediction for people: its text, its bars, and a drawing of it over the image, as PNG."""
        task = self.predictor.task
        with Reservation(self.room) as reservation:
            image = EncodedImage(data, max_pixels=self.settings.max_pixels, reserve=reservation.take).rgb()
            image.thumbnail((SHOWN, SHOWN), Image.Resampling.BICUBIC, reducing_gap=2.0)
            drawing, content = task.draw(prediction, image), io.BytesIO()
            if drawing is not None:
                drawing.save(content, "PNG")
        return {
            "text": str(prediction),
            "bars": [bar._asdict() for bar in task.bars(prediction)],
            "png": None if drawing is None else base64.b64encode(content.getvalue()).decode("ascii"),
        }

    def warm(self) -> None:
        """Once through everything, so that the first request finds it loaded."""
        content = io.BytesIO()
        Image.new("RGB", (8, 8)).save(content, "PNG")
        pixels, _ = self.prepare(content.getvalue())
        self.predictor.embedded(pixels[None])

    @property
    def options(self) -> tuple[str, ...]:
        """What a request may say of how outputs become predictions: "topk", "threshold"."""
        return self.predictor.task.prediction_options(multi_label=self.predictor.multi_label)

    @property
    def transformer(self) -> bool:
        return has_attention(self.predictor.network)

    def about(self) -> dict[str, Any]:
        """The answer of /model."""
        predictor, settings = self.predictor, self.settings
        shown = shape(predictor.network)
        return {
            "name": self.name,
            "network": type(predictor.network).__name__,
            "parameters": sum(parameter.numel() for parameter in predictor.network.parameters()),
            "image_size": list(predictor.preprocessing.image),
            "device": str(predictor.device),
            "task": predictor.task.name,
            "outputs": predictor.task.describe_outputs(predictor.labels),
            "options": list(self.options),
            "labels": list(predictor.labels),
            "multi_label": predictor.multi_label,
            **({"threshold": predictor.threshold} if predictor.multi_label else {}),
            "attention": bool(shown),
            **shown,
            "limits": {
                "max_bytes": settings.max_bytes,
                "max_pixels": settings.max_pixels,
                "max_images": settings.most_images,
                "queue": settings.queue,
                "batch": settings.batch,
                "timeout_s": settings.timeout_s,
            },
        }
