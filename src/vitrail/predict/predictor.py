"""`Predictor`: a network that is ready to predict from images.

    predictor = vitrail.Predictor("model.safetensors")
    predictor("cat.jpg").label                    # "cat"
    predictor(["a.jpg", "b.jpg"], topk=3)         # a Prediction for each
    predictor.features(images)                  # [N, D]: the input of the last layer
    predictor.tokens(images)                    # [N, rows, columns, D]: a vector for each patch

The type of a prediction depends on the task that the weights were trained for. Threads may share a predictor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, cast, overload

import torch
from torch import Tensor

from vitrail.checkpoint.bundle import get_card
from vitrail.checkpoint.find_weights import find_weights
from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.checkpoint.onnx_network import OnnxNetwork, is_onnx, open_onnx
from vitrail.checkpoint.weights import build_network, replace_head_and_resize, to_bundle
from vitrail.core.errors import BadImage, ConfigError, UnknownName
from vitrail.core.precision import PrecisionChoice
from vitrail.core.text import Pair, format_size
from vitrail.data.decode.image import upright_rgb
from vitrail.data.preprocessing import Preprocessing, normalise_pixels
from vitrail.data.targets import Geometry
from vitrail.distributed.process_group import find_device
from vitrail.models.build import Model
from vitrail.models.inference import choose_precision, set_precision
from vitrail.models.query_output import Output, map_output
from vitrail.predict.image_input import ImageInput, describe_input, image_from, is_one, prepare_ahead, split_batches
from vitrail.predict.recordings import FEW, RecordedCalls
from vitrail.tasks.classification.prediction import Prediction, rank_classes
from vitrail.tasks.classification.task import ClassificationTask
from vitrail.tasks.mask_queries.decode import to_dense
from vitrail.tasks.registry import find_task
from vitrail.tasks.segmentation.prediction import PredictedMask
from vitrail.tasks.segmentation.task import SegmentationTask
from vitrail.tasks.segmentation.windows import Scale, SlidingWindows, segment_windows
from vitrail.tasks.task import PredictionOptions, Task

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    PredictionT = TypeVar("PredictionT", default=Prediction)
else:
    from typing import TypeVar

    PredictionT = TypeVar("PredictionT")

TOPK: Final = 5


class View(NamedTuple):
    """What a network sees of one image: uint8 [3, H, W], and where in the image these pixels come from."""

    pixels: Tensor
    geometry: Geometry


class Predictor(Generic[PredictionT]):
    """A network with its preprocessing and class names, ready for images.

    The task of the weights decides what it returns for an image: a classifier returns a `Prediction`. Type checkers
    assume a classifier; for another task, annotate the type, as in
    `predictor: Predictor[PredictedMask] = Predictor("model.safetensors")`.

    `weights` is a network or any weights that vitrail reads: a file, a folder, a run folder, public weights as
    NAME:TAG, or the name of bundled weights. It may also be an ONNX file that vitrail wrote, which ONNX Runtime runs on
    the CPU. `image_size` resizes the positions, `patch` the kernels as well. `labels` names the classes and overrides
    the names in the weights. `precision` is the inference precision; "auto" is bfloat16 on a GPU and float32 elsewhere
    for weights given by name, and for a network the type that it has. The network runs on `batch` images at a time.
    With `urls`, a string that is an http(s) address is fetched. `threshold` is the probability from which classes of a
    multi-label network are chosen (0.5), or the score from which objects (0.5) and segments of panoptic maps (0.8) are
    kept. With `windows`, a segmentation network slides over each image, resized until its shorter side fits ("fit") or
    at its own size ("full"). A network that is passed is itself moved to the device and put in evaluation mode, unless
    it is resized."""

    def __init__(
        self,
        weights: str | Path | Model = DEFAULT_WEIGHTS,
        *,
        preprocessing: Preprocessing | None = None,
        labels: Iterable[str] | None = None,
        device: str | torch.device = "auto",
        image_size: int | Pair | None = None,
        patch: int | Pair | None = None,
        precision: PrecisionChoice = "auto",
        batch: int = 32,
        urls: bool = False,
        threshold: float | None = None,
        windows: SlidingWindows | Scale | None = None,
    ) -> None:
        self.device = find_device(str(device))
        network = load_network(weights, image_size, patch)
        config, known = network.config, get_card(network)
        try:
            self.task: Task = find_task(known.task)
        except UnknownName as error:
            whose = f"{weights}: " if isinstance(weights, str | Path) else ""
            raise UnknownName(f"{whose}{error}; import the module that registers it first") from None
        if config.channels not in (1, 3):
            raise ConfigError(f"this network takes {config.channels} channels; images are prepared in 3, or grey")
        if batch < 1:
            raise ConfigError(f"batch={batch} must be at least 1")
        threshold = self.task.threshold if threshold is None else threshold
        if not 0 <= threshold <= 1:
            raise ConfigError(f"threshold={threshold} must be between 0 and 1")
        self.network: Model = network.eval().to(self.device)
        self.precision: str = precision
        if isinstance(network, OnnxNetwork):
            network.check_precision(precision)
            self.precision = network.precision
        elif precision != "auto" or isinstance(weights, str | Path):
            chosen = choose_precision(precision, self.device)
            set_precision(self.network, chosen, self.device)
            self.precision = chosen
        recorded = self.device.type == "cuda" and not isinstance(network, OnnxNetwork)
        self._recorded = RecordedCalls(network, self.device) if recorded else None
        self.preprocessing = (preprocessing or known.preprocessing).adapt_channels(config.channels)
        names = known.labels if labels is None else tuple(labels)
        numbered = tuple(f"class {index}" for index in range(config.classes))
        self.labels: tuple[str, ...] = numbered if names is None else self._check_names(names)
        self.batch, self.urls = batch, urls
        self.multi_label, self.threshold = known.multi_label, threshold
        self.windows = SlidingWindows(windows) if isinstance(windows, str) else windows
        if windows is not None and not isinstance(self.task, SegmentationTask):
            raise ConfigError(f"windows are for classes of pixels, and these weights are for {self.task.name}")
        self._channels = self.preprocessing.channel_tensors(self.device)
        self._type = next(network.parameters()).dtype

    def rename_classes(self, names: Iterable[str]) -> "Predictor[PredictionT]":
        """The same network with other class names."""
        renamed = copy(self)
        renamed.labels = self._check_names(tuple(names))
        return renamed

    def _check_names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(names) != self.network.config.classes:
            raise ConfigError(f"{len(names)} labels for {self.network.config.classes} classes")
        return names

    # Images in, predictions out.

    @overload
    def __call__(self, pictures: "ImageInput", topk: int | None = None) -> PredictionT: ...
    @overload
    def __call__(self, pictures: "Iterable[ImageInput]", topk: int | None = None) -> list[PredictionT]: ...
    def __call__(
        self, pictures: "ImageInput | Iterable[ImageInput]", topk: int | None = None
    ) -> PredictionT | list[PredictionT]:
        """The prediction for one image, or a list for several. For a classifier these are the `topk` (5) likeliest
        classes. Anything that is not an image raises BadImage."""
        answers = list(self.stream(pictures, topk))
        return answers[0] if is_one(pictures) else answers

    def stream(self, pictures: "ImageInput | Iterable[ImageInput]", topk: int | None = None) -> Iterator[PredictionT]:
        """Predictions one by one, for more images than fit into memory: images are read ahead, two batches of them at
        most."""
        self.options(topk)
        for views in self._batches(pictures):
            if self.windows is not None:
                yield from cast("Iterable[PredictionT]", map(self.slide, views))
                continue
            outputs = self.outputs(torch.stack([view.pixels for view in views]))
            yield from self.interpret(outputs, [view.geometry for view in views], topk)

    def features(self, pictures: "ImageInput | Iterable[ImageInput]") -> Tensor:
        """The input of the last layer: float32 [N, D] on the CPU. For a ViT this is the representation y (Eq. 4), after
        the hidden layer if there is one; for a ResNet it is the pooled map."""
        return self._gather(pictures, "features", self.network.features)

    def tokens(self, pictures: "ImageInput | Iterable[ImageInput]") -> Tensor:
        """A vector for each patch after the last layer and norm: float32 [N, rows, columns, D] on the CPU. For a ResNet
        this is the last feature map."""
        return self._gather(pictures, "tokens", lambda x: self.network.patch_map(x).permute(0, 2, 3, 1))

    # The single steps, for callers that do their own batching: prepare in threads, stack, run the network once.

    def prepare(self, picture: "ImageInput") -> Tensor:
        """One image, resized and cropped as the weights need it: uint8 [3, H, W]."""
        return self.view(picture).pixels

    def view(self, picture: "ImageInput") -> View:
        """One image, resized and cropped as the weights need it, with the geometry of that; with `windows` the whole
        image, for `slide`."""
        image = image_from(picture, urls=self.urls)
        try:
            upright = upright_rgb(image)
            whole = (upright.height, upright.width)
            if self.windows is not None:
                pixels = self.windows.cut(upright, self.preprocessing)
                return View(pixels, Geometry(whole=whole, box=(0, 0, *whole), inner=(pixels.shape[1], pixels.shape[2])))
            pixels = self.preprocessing.pixels(upright)
        except BadImage as error:
            raise BadImage(f"{describe_input(picture)}: {error}") from None
        return View(pixels, self.preprocessing.geometry(whole))

    def slide(self, view: View) -> PredictedMask:
        """The class of each pixel of one image by sliding windows, given its `view`."""
        windows, window = self.windows or SlidingWindows(), self.preprocessing.image
        segment = lambda views: to_dense(self.outputs(views), window)  # noqa: E731
        mask = segment_windows(segment, view.pixels, view.geometry.whole, windows, window, self.batch)
        return PredictedMask(mask, self.labels)

    def normalise(self, batch: Tensor) -> Tensor:
        """Prepared images, uint8 [N, 3, H, W], as the network takes them: normalised, on its device and in its type."""
        self._check_prepared(batch)
        return self._normalise(batch)

    def _check_prepared(self, batch: Tensor) -> None:
        if batch.dtype != torch.uint8 or batch.ndim != 4 or tuple(batch.shape[1:]) != (3, *self.preprocessing.image):
            shape = ", ".join(map(str, ("N", 3, *self.preprocessing.image)))
            rule = f"prepared images are torch.uint8 [{shape}]: stack what `prepare` gives"
            raise ConfigError(f"a batch of {batch.dtype} {list(batch.shape)}; {rule}")

    def _normalise(self, batch: Tensor) -> Tensor:
        return normalise_pixels(batch.to(self.device, non_blocking=True), *self._channels).to(self._type)

    def logits(self, batch: Tensor) -> Tensor:
        """The network's outputs for prepared images: uint8 [N, 3, H, W] -> float32 [N, K] on the CPU, or [N, K, H, W]
        for classes of pixels. A network with queries has `outputs` instead."""
        found = self.outputs(batch)
        if not isinstance(found, Tensor):
            raise ConfigError("this network has queries, each with a class and a mask; use Predictor.outputs")
        return found

    def outputs(self, batch: Tensor) -> Output:
        """As `logits`, for any network; one with queries gives classes [N, Q, K + 1] and masks [N, Q, h, w]."""
        if not self.labels:
            remedy = "use its features, give it a head with `vitrail fit`, or fine-tune it"
            remedy = "use its features" if isinstance(self.network, OnnxNetwork) else remedy
            raise ConfigError(f"this network has no classes to name; {remedy}")
        return self._compute("outputs", self.network, batch)

    def interpret(
        self, outputs: Output, views: Sequence[Geometry], topk: int | None = None, threshold: float | None = None
    ) -> Sequence[PredictionT]:
        """Predictions from the `outputs`, such as [N, K, ...], for N images that the network saw in these views."""
        found = self.task.predict(outputs, views, self.options(topk, threshold))
        return cast("Sequence[PredictionT]", found)

    def probabilities(self, batch: Tensor) -> Tensor:
        """Prepared images to the probability of each class: uint8 [N, 3, H, W] -> float32 [N, K] on the CPU. Rows sum
        to 1 (softmax), unless the weights are multi-label: then each class has its own probability (sigmoid)."""
        self._check_classifies("probabilities")
        logits = self.logits(batch)
        return logits.sigmoid() if self.multi_label else logits.softmax(-1)

    def embed_batch(self, batch: Tensor) -> Tensor:
        """Prepared images to features: uint8 [N, 3, H, W] -> float32 [N, D] on the CPU."""
        return cast(Tensor, self._compute("features", self.network.features, batch))

    def rank_classes(
        self, probabilities: Tensor, topk: int | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """Predictions from rows [N, K]; of equally likely classes the one with the smaller index comes first. For a
        multi-label network all classes at or above the threshold are chosen, however many there are."""
        self._check_classifies("ranked")
        return rank_classes(probabilities, self.options(topk, threshold))

    def __repr__(self) -> str:
        kind = type(self.network).__name__
        outputs = self.task.describe_outputs(self.labels)
        return f"Predictor({kind}, {format_size(self.preprocessing.image)} px, {outputs}, {self.device})"

    def _compute(self, name: str, read: Callable[[Tensor], Output], batch: Tensor) -> Output:
        """Applies `read` to prepared images; the result is on the CPU."""
        self._check_prepared(batch)

        def compute(pixels: Tensor) -> Output:
            autocast = self.precision == "autocast"  # without its cache, which a recording would outlive
            low = torch.autocast(self.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False)
            with torch.inference_mode(), low:
                return read(self._normalise(pixels))

        if self._recorded is not None and 0 < len(batch) <= FEW:
            return self._recorded.run(name, compute, batch, to_host)
        return map_output(compute(batch), to_host)

    def options(self, topk: int | None = None, threshold: float | None = None) -> PredictionOptions:
        """How outputs become predictions; whatever is not given is this predictor's default."""
        if topk is not None and "topk" not in self.task.prediction_options(multi_label=self.multi_label):
            raise ConfigError(f"topk={topk} is for classification, and these weights are for {self.task.name}")
        if topk is not None and topk < 1:
            raise ConfigError(f"topk={topk} must be at least 1")
        topk, threshold = TOPK if topk is None else topk, self.threshold if threshold is None else threshold
        facts: Any = {"multi_label": self.multi_label, "things": get_card(self.network).things}
        return PredictionOptions(names=self.labels, topk=topk, threshold=threshold, **facts)

    def _check_classifies(self, method: str) -> None:
        if not isinstance(self.task, ClassificationTask):
            kind = f"these weights are for {self.task.name}; use `outputs` and `interpret`"
            raise ConfigError(f"Predictor.{method} is for classification, and {kind}")

    def _batches(self, pictures: "ImageInput | Iterable[ImageInput]") -> Iterator[list[View]]:
        alone = is_one(pictures)
        several = cast("Iterable[ImageInput]", [pictures] if alone else pictures)
        threads = 0 if alone or self.batch == 1 else -1
        with closing(prepare_ahead(several, self.view, ahead=2 * self.batch, threads=threads)) as made:
            for some in split_batches(made, self.batch):
                if error := next((view for _, view in some if isinstance(view, BadImage)), None):
                    raise error
                yield [cast("View", view) for _, view in some]

    def _gather(
        self, pictures: "ImageInput | Iterable[ImageInput]", name: str, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        batches = (torch.stack([view.pixels for view in views]) for views in self._batches(pictures))
        rows = [cast(Tensor, self._compute(name, read, batch)) for batch in batches]
        empty = torch.zeros(0, 3, *self.preprocessing.image, dtype=torch.uint8)
        return torch.cat(rows or [cast(Tensor, self._compute(name, read, empty))])


def to_host(tensor: Tensor) -> Tensor:
    """Copies to float32 on the CPU: an ordinary tensor, not an inference tensor, so it can be trained on."""
    return tensor.to("cpu", torch.float32, copy=True)


def load_network(weights: str | Path | Model, image_size: int | Pair | None, patch: int | Pair | None) -> Model:
    """The network itself, or that of weights given by name, resized if a size is given."""
    if is_onnx(weights):
        return cast("Model", open_onnx(cast("str | Path", weights), image_size=image_size, patch=patch))
    if isinstance(weights, str | Path):
        return build_network(replace_head_and_resize(find_weights(weights), image_size=image_size, patch=patch))
    if image_size is not None or patch is not None:
        resized = replace_head_and_resize(to_bundle(weights), image_size=image_size, patch=patch)
        weights = build_network(resized, next(weights.parameters()).dtype)
    return weights


predictor = Predictor  # an alias, named after what the call returns; without arguments, the bundled weights
