"""A predictor behind a server: predictions, features and attention.

The attention of an image is the rollout over all layers, and every head of one layer at one byte per weight.
"""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.checkpoint.onnx_network import OnnxNetwork
from vitrail.data.decode.image import EncodedImage
from vitrail.data.targets import Geometry
from vitrail.inspection import layer_taps as taps
from vitrail.inspection.rollout import roll_layer
from vitrail.models.query_output import map_output
from vitrail.predict.predictor import Predictor
from vitrail.serve.batch_queue import MemoryBudget, QueuedImage
from vitrail.serve.http_errors import RequestError, unavailable
from vitrail.serve.settings import ServeSettings

DRAWING_SIDE: Final = 1400  # pixels of the longer side of a drawing, at most


def attention_shape(network: nn.Module) -> dict[str, Any]:
    """The shape of a model's attention maps; empty if it has none."""
    if not taps.has_attention(network):
        return {}
    tokens = taps.get_token_layout(network)
    facts = {"grid": list(tokens.grid), "layers": network.depth, "heads": network.config.heads}
    return {**facts, "class_token": bool(tokens.class_tokens)}


def check_attention(network: nn.Module, layer: int | None, max_bytes: int) -> None:
    """Rejects a model without attention, a layer that does not exist, and maps of more than `max_bytes`."""
    if not taps.has_attention(network):
        raise RequestError(409, "no attention", f"this model, {type(network).__name__}, has none; a ViT has")
    if layer is not None and not 0 <= layer < network.depth:
        raise RequestError(400, "no such layer", f"layer={layer}: this model has layers 0 to {network.depth - 1}")
    tokens, heads = taps.get_token_layout(network), network.config.heads
    weights = 4 * (tokens.prefix + tokens.patches) ** 2 * heads
    maps = heads * (bool(tokens.class_tokens) + tokens.patches) * tokens.patches
    if weights > 16 * max_bytes:
        raise RequestError(409, "attention too large", f"{weights >> 20:,} MiB a layer; serve a smaller --image-size")
    if layer is not None and maps > max_bytes:
        raise RequestError(409, "attention too large", f"{maps >> 20:,} MiB of maps; omit `layer` to get rollout only")


@torch.inference_mode()
def compute_attention(network: nn.Module, images: Tensor, layer: int | None) -> dict[str, Any]:
    """Attention of one prepared image [1, C, H, W]. Rollout is scaled so that its largest patch is 1."""
    tokens = taps.get_token_layout(network)
    rollout: Tensor | None = None
    last: Tensor | None = None
    maps: Tensor | None = None
    for view in taps.iterate_layers(network, images):
        rollout, last = roll_layer(taps.to_float32(view.mean_attention), rollout), view.after
        if view.layer == layer:
            # How the class token, or the mean of several, and the patches attend to the patches: [k, T, T] -> [k, T',
            # N]. Registers are not shown.
            heads, first = view.attention[0], tokens.class_tokens
            rows = [*([heads[:, :first].mean(1, keepdim=True)] if first else []), heads[:, tokens.prefix :]]
            maps = taps.to_float32(torch.cat(rows, dim=1)[:, :, tokens.prefix :])
        del view
    assert rollout is not None
    assert last is not None
    weights = taps.to_grid(taps.read_output(rollout, last, network), tokens).flatten()
    answer = {**attention_shape(network), "layer": layer, "maps": None, "scale": None}
    answer["rollout"] = [round(value, 6) for value in scale_rows(weights).tolist()]
    if maps is not None:
        steps = (scale_rows(maps) * 255).round().to(torch.uint8).cpu().numpy().tobytes()
        answer["maps"] = base64.b64encode(steps).decode("ascii")
        answer["scale"] = [float(f"{value:.6g}") for value in maps.amax(dim=-1).flatten().tolist()]
    return answer


def scale_rows(values: Tensor) -> Tensor:
    """Each row divided by its largest value; a row of zeros stays zero."""
    return values / values.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)


class PreparedImage(NamedTuple):
    """The size of the upright upload, and the part that the model sees, in its pixels; beyond the image are borders."""

    size: tuple[int, int]  # (width, height)
    crop: tuple[float, float, float, float]  # left, top, width, height
    geometry: Geometry


class ServedModel:
    """A predictor behind a server. `prepare` may run in many threads, `compute` in one."""

    def __init__(self, predictor: Predictor[Any], name: str, settings: ServeSettings) -> None:
        self.predictor, self.name, self.settings = predictor, name, settings
        # Memory for decoding, shared by all threads: each reserves what its image needs before it starts.
        busy = partial(unavailable, "no memory to decode", "other images use all the memory for decoding; try again")
        self.memory = MemoryBudget(settings.decode_bytes, busy, settings.timeout_s)

    def prepare(self, data: bytes) -> tuple[Tensor, PreparedImage]:
        """Decodes bytes into prepared pixels. Raises BadImage if they are not an image, or have too many pixels by the
        header; RequestError if other images hold the memory for decoding for too long."""
        preprocessing = self.predictor.preprocessing
        # Without antialiasing the whole image becomes floats, 12 bytes per pixel, before it is resized.
        times = 1 if preprocessing.antialias else 2
        with self.memory.reserve() as grow:
            image = self._decode(data, lambda size: grow(times * size))
            left, top, right, bottom = preprocessing.view_box((image.height, image.width))
            pixels, geometry = self.predictor.view(image)
            return pixels, PreparedImage(image.size, (left, top, right - left, bottom - top), geometry)

    def _decode(self, data: bytes, reserve: Callable[[int], None]) -> Image.Image:
        return EncodedImage(data, max_pixels=self.settings.max_pixels, reserve=reserve).rgb()

    def compute(self, images: Sequence[QueuedImage]) -> Sequence[Any]:
        """Computes the answers for one batch, of one kind."""
        batch = torch.stack([image.pixels for image in images if image.pixels is not None])
        match images[0].kind:
            case "predict":
                # Done here, one by one: outputs and masks of dense tasks are much larger than the response.
                answers: list[tuple[dict[str, Any], Any]] = []
                outputs = self.predictor.outputs(batch)
                for at, image in enumerate(images):
                    one = map_output(outputs, lambda tensor, at=at: tensor[at : at + 1])
                    (prediction,) = self.predictor.interpret(one, [image.facts.geometry], **image.options)
                    answers.append((prediction.to_dict(), prediction if image.show else None))
                return answers
            case "embed":
                return self.predictor.embed_batch(batch).unbind(0)
            case "attention":
                return [compute_attention(self.predictor.network, self.predictor.normalise(batch), images[0].layer)]

    def show(self, prediction: Any, data: bytes) -> dict[str, Any]:
        """A prediction for display: its text, its bars, and a drawing of it over the image, as PNG."""
        task = self.predictor.task
        with self.memory.reserve() as grow:
            image = self._decode(data, grow)
            image.thumbnail((DRAWING_SIDE, DRAWING_SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
            drawing, content, png = task.draw(prediction, image), io.BytesIO(), None
            if drawing is not None:
                drawing.save(content, "PNG")
                png = base64.b64encode(content.getvalue()).decode("ascii")
        return {"text": str(prediction), "bars": [bar._asdict() for bar in task.bars(prediction)], "png": png}

    def warm(self) -> None:
        """Runs everything once, so that the first request is fast."""
        content = io.BytesIO()
        Image.new("RGB", (8, 8)).save(content, "PNG")
        pixels, _ = self.prepare(content.getvalue())
        if self.predictor.labels:
            self.predictor.outputs(pixels[None])
        else:
            self.predictor.embed_batch(pixels[None])

    @property
    def features_obstacle(self) -> str:
        """Why the model cannot return features; empty if it can."""
        network: Any = self.predictor.network
        return network.features_obstacle if isinstance(network, OnnxNetwork) else ""

    @property
    def options(self) -> tuple[str, ...]:
        """Query parameters that control how outputs become predictions: "topk", "threshold"."""
        return self.predictor.task.prediction_options(multi_label=self.predictor.multi_label)

    def describe(self) -> dict[str, Any]:
        """The answer of /model."""
        predictor, settings = self.predictor, self.settings
        attention = attention_shape(predictor.network)
        limits = {name: getattr(settings, name) for name in ("max_bytes", "max_pixels", "queue", "batch", "timeout_s")}
        return {
            "name": self.name,
            "network": type(predictor.network).__name__,
            "parameters": sum(parameter.numel() for parameter in predictor.network.parameters()),
            "image_size": list(predictor.preprocessing.image),
            "device": str(predictor.device),
            "precision": predictor.precision,
            "task": predictor.task.name,
            "outputs": predictor.task.describe_outputs(predictor.labels),
            "options": list(self.options),
            "labels": list(predictor.labels),
            "multi_label": predictor.multi_label,
            **({"threshold": predictor.threshold} if "threshold" in self.options else {}),
            "queries": predictor.network.config.has_queries,
            "attention": bool(attention),
            **attention,
            "limits": {**limits, "max_images": settings.most_images},
        }
