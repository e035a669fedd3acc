"""A network in an ONNX file written by `vitrail export`, run by ONNX Runtime on the CPU.

Prediction, scoring and `vitrail serve` accept it instead of weights. On a CPU it is often faster than torch.

    network = OnnxNetwork(Path("photos.onnx"))
    network(images)  # normalised images [B, C, H, W] -> logits [B, K]

The file itself describes its input, its class names and its preprocessing.
"""

import importlib.util
import json
from collections.abc import Callable
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vitrail.checkpoint.bundle import parse_description
from vitrail.core.errors import ConfigError, MismatchedWeights
from vitrail.core.precision import PrecisionChoice
from vitrail.core.text import format_size
from vitrail.models.inference import choose_precision
from vitrail.models.query_configs import QueryConfig
from vitrail.models.query_output import Output, QueryOutput, map_output

SUFFIX: Final = ".onnx"
REMEDY: Final = "use the weights that it was exported from"
EXPORT: Final = "export it again"
DESCRIPTION: Final = ("config", "preprocessing", "labels", "provenance")  # a file without these is not vitrail's
EXTERNAL: Final = b"\x0a\x08location"  # the field of a tensor that is stored in another file
DESCRIBED: Final = (*DESCRIPTION, "multi_label", "task", "things")


class OnnxSession:
    """A loaded file: [B, C, H, W] -> [B, K], [B, K, H, W] or a `QueryOutput`. With `threads=0` the runtime
    chooses the number of threads."""

    def __init__(self, path: Path, *, threads: int = 0):
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4  # errors are raised as exceptions; warnings are not for the user
        options.intra_op_num_threads = threads
        self.inner: Any = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(str(one.name) for one in self.inner.get_inputs())
        self.version = f"onnxruntime {onnxruntime.__version__}"

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.inner.get_modelmeta().custom_metadata_map)

    def __call__(self, images: Tensor) -> Output:
        found = [torch.from_numpy(one) for one in self.inner.run(None, {self.inputs[0]: images.contiguous().numpy()})]
        return found[0] if len(found) == 1 else QueryOutput(*found)


class OnnxNetwork(nn.Module):
    """An ONNX file as a network to predict and score with. It uses as many threads as torch has when it is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if importlib.util.find_spec("onnxruntime") is None:
            raise ConfigError(f"{path}: an ONNX file needs onnxruntime to run: pip install 'vitrail[export]'")
        try:
            self.session = OnnxSession(path, threads=torch.get_num_threads())
            metadata = self.session.metadata
        except Exception as error:  # the runtime has many exception types of its own
            raise MismatchedWeights(f"{path}: ONNX Runtime cannot load it: {summarise(error)}; {EXPORT}") from None
        self.path = path
        self.config, self.card = read_metadata(path, metadata)
        if self.session.inputs not in (("image",), ("pixels",)):
            raise MismatchedWeights(f"{path}: its inputs are not those of a network; {EXPORT}")
        self.precision = "int8" if metadata.get("quantisation") else "float32"
        self.hash = hash_file(path)
        self.takes_bytes = self.session.inputs == ("pixels",)
        # A placeholder for the weights, which belong to the runtime: it has their number and type.
        self.weights = nn.Parameter(torch.empty(self.config.parameters, device="meta"), requires_grad=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or a pickle, opens the file again."""
        return open_onnx, (self.path,)

    def forward(self, images: Tensor) -> Output:
        """Takes normalised images on any device."""
        given = images.detach().to("cpu", torch.float32)
        if not len(given):
            return map_output(self.forward(images.new_zeros(1, *images.shape[1:])), lambda found: found[:0])
        if self.takes_bytes:
            mean, std = self.card.preprocessing.channel_tensors(torch.device("cpu"))
            given = (255 * (given * std + mean)).round().clamp(0, 255).byte()
        try:
            found = self.session(given)
        except Exception as error:  # as above
            size = format_size((given.shape[2], given.shape[3]))
            raise MismatchedWeights(f"{self.path}: cannot run on images of {size}: {summarise(error)}") from None
        self._check_output(found, len(given))
        return map_output(found, lambda part: part.to(images.device))

    def _check_output(self, found: Output, count: int) -> None:
        """MismatchedWeights unless the graph's output is what the metadata promises."""
        queries, classes = isinstance(self.config, QueryConfig), self.config.classes
        if isinstance(found, QueryOutput):
            fits = queries and found.classes.shape[::2] == (count, classes + 1) and found.masks.ndim == 4
        else:
            fits = not queries and found.ndim in (2, 4) and len(found) == count and found.is_floating_point()
            fits = fits and (not classes or found.shape[1] == classes)
        if not fits:
            raise MismatchedWeights(f"{self.path}: its output does not fit its {classes} classes; {EXPORT}")

    def check_precision(self, asked: PrecisionChoice) -> None:
        """ConfigError unless the file has the requested precision."""
        if asked != "auto" and choose_precision(asked, torch.device("cpu")) != self.precision:
            fixed = f"the precision of an ONNX file is fixed at export, here {self.precision}"
            raise ConfigError(f"{self.path}: precision={asked}: {fixed}; use auto")

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
    """The config and card stored in a file's metadata. Entries of other tools are ignored."""
    if missing := [name for name in DESCRIPTION if name not in metadata]:
        lacks = ", ".join(missing)
        raise MismatchedWeights(f"{path}: its metadata lacks {lacks}; only files written by `vitrail export` can run")
    try:
        return parse_description({name: json.loads(metadata[name]) for name in DESCRIBED if name in metadata})
    except (ValueError, ConfigError) as error:
        raise MismatchedWeights(f"{path}: its metadata cannot be read: {error}; {EXPORT}") from None


def summarise(error: Exception) -> str:
    """The runtime's message without its codes: "Protobuf parsing failed."."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].rsplit(" : ", 1)[-1].rsplit("failed:", 1)[-1].strip().rstrip(".")


def hash_file(path: Path) -> str:
    """The SHA-256 of a file and of the files that hold its larger tensors, if there are any."""
    content = path.read_bytes()
    digest = sha256(content)
    if EXTERNAL in content and importlib.util.find_spec("onnx") is not None:
        import onnx

        tensors = onnx.load_from_string(content).graph.initializer
        places = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
        for place in sorted(places):
            with (path.parent / place).open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()
