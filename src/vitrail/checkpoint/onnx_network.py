"""A network in an ONNX file written by `vitrail export`, run by ONNX Runtime on the CPU.

Prediction, scoring and `vitrail serve` accept it instead of weights. On a CPU it is often faster than torch.

    network = OnnxNetwork(Path("photos.onnx"))
    network(images)  # normalised images [B, C, H, W] -> logits [B, K]

The file itself describes its input, its class names and its preprocessing.
"""

import importlib.util
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import parse_description
from vitrail.core.errors import ConfigError, MismatchedWeights
from vitrail.models.query_output import Output, QueryOutput, map_output

SUFFIX: Final = ".onnx"
REMEDY: Final = "use the weights that it was exported from"
DESCRIPTION: Final = ("config", "labels", "provenance")  # a file without these was not written by vitrail


class OnnxSession:
    """A loaded file: [B, C, H, W] -> [B, K], [B, K, H, W] or a `QueryOutput`. With `threads=0` the runtime
    chooses the number of threads."""

    def __init__(self, path: Path, *, threads: int = 0):
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3  # errors are raised as exceptions; warnings are not for the user
        options.intra_op_num_threads = threads
        self.inner: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.input = str(self.inner.get_inputs()[0].name)
        self.version = f"onnxruntime {onnxruntime.__version__}"

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.inner.get_modelmeta().custom_metadata_map)

    def __call__(self, images: Tensor) -> Output:
        found = [torch.from_numpy(one) for one in self.inner.run(None, {self.input: images.contiguous().numpy()})]
        return found[0] if len(found) == 1 else QueryOutput(*found)


class OnnxNetwork(nn.Module):
    """An ONNX file as a network to predict and score with. It uses as many threads as torch has when it is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if importlib.util.find_spec("onnxruntime") is None:
            raise ConfigError(f"{path}: an ONNX file needs onnxruntime to run: pip install 'vitrail[export]'")
        try:
            self.session = OnnxSession(path, threads=torch.get_num_threads())
        except Exception as error:  # the runtime has many exception types of its own
            raise MismatchedWeights(f"{path}: ONNX Runtime cannot load it: {str(error).splitlines()[0]}") from None
        self.config, self.card = read_metadata(path, self.session.metadata)
        self.precision = self.session.metadata.get("quantisation", "float32")
        self.hash = sha256(path.read_bytes()).hexdigest()
        self.takes_bytes = self.session.input == "pixels"
        # A placeholder for the weights, which belong to the runtime: it has their number and type.
        self.weights = nn.Parameter(torch.empty(self.config.parameters, device="meta"), requires_grad=False)

    def forward(self, images: Tensor) -> Output:
        """Takes normalised images on any device."""
        given = images.to("cpu", torch.float32)
        if self.takes_bytes:
            mean, std = self.card.preprocessing.channel_tensors(torch.device("cpu"))
            given = (255 * (given * std + mean)).round().clamp(0, 255).byte()
        return map_output(self.session(given), lambda found: found.to(images.device))

    @property
    def features_obstacle(self) -> str:
        """Why there are no features; empty if the file has no head, so that features are its output."""
        return f"an ONNX file only gives the output of its head; {REMEDY}" if self.config.classes else ""

    def features(self, images: Tensor) -> Tensor:
        if obstacle := self.features_obstacle:
            raise ConfigError(obstacle)
        found = self(images)
        assert isinstance(found, Tensor)
        return found

    def patch_map(self, images: Tensor) -> Tensor:
        raise ConfigError(f"an ONNX file has no tokens; {REMEDY}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "OnnxNetwork":
        """Ignores `to` and the like: the file computes on the CPU, in its own types. A change of type is refused."""
        if fn(torch.zeros(1)).dtype != torch.float32:
            raise ConfigError("the precision of an ONNX file is fixed at export; do not give one")
        return self


def is_onnx(weights: object) -> bool:
    return isinstance(weights, str | Path) and str(weights).lower().endswith(SUFFIX) and Path(weights).is_file()


def open_onnx(weights: str | Path, *, image_size: object = None, patch: object = None) -> OnnxNetwork:
    """The network of a file, at the size that it was exported with."""
    if image_size is not None or patch is not None:
        name, option = ("image size", "--image-size") if patch is None else ("patch size", "--patch")
        raise ConfigError(f"{weights}: the {name} of an ONNX file is fixed at export; export it again with {option}")
    return OnnxNetwork(Path(weights)).eval()


def read_metadata(path: Path, metadata: dict[str, str]) -> tuple[Any, Any]:
    """The config and card stored in a file's metadata."""
    if missing := [name for name in DESCRIPTION if name not in metadata]:
        lacks = ", ".join(missing)
        raise MismatchedWeights(f"{path}: its metadata lacks {lacks}; only files written by `vitrail export` can run")
    try:
        found = {name: json.loads(text) for name, text in metadata.items() if name not in ("vitrail", "quantisation")}
        return parse_description(found)
    except (ValueError, ConfigError) as error:
        raise MismatchedWeights(f"{path}: its metadata cannot be read: {error}") from None
