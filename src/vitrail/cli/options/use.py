"""Options of the commands that use a model: predict, fit, embed, inspect, serve, export and convert."""

from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias, get_args

from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.cli.options import groups
from vitrail.cli.options.grammar import command_options, option, word
from vitrail.cli.options.groups import (
    IMAGE_SIZE,
    PATCH,
    NamesOptions,
    WeightsOptions,
    data_word,
    labels_option,
    rename_option,
)
from vitrail.core.precision import PrecisionChoice
from vitrail.core.text import Pair
from vitrail.evaluation import SHARE, Stored
from vitrail.models.family import Position

SUFFIX: Final = ".safetensors"
TOKEN: Final = "VITRAIL_TOKEN"
Form: TypeAlias = Literal["onnx", "torch-export", "hf", "timm", "npz", "torchvision"]
FORMS: Final = get_args(Form)
TARGETS: Final = "vitrail, npz, npz-linen, npz-big-vision, npz-bit, hf, timm, meta, torchvision"
SIZE: Final = "image size of a file that does not say: N or HEIGHTxWIDTH"
IMAGES: Final = "image files; a folder or a data set by name, for statistics over many images (distance, entropy, CKA)"
DEV: Final = (
    "share of every class, or of images with masks, held out to choose the penalty and the scale of the logits; the "
    "final fit uses all"
)
NumberType: TypeAlias = Literal["float32", "bfloat16", "float16"]


@command_options
class PredictOptions(NamesOptions):
    """Classify images: the most likely classes of each, in the order given. Weights for masks or segments predict
    these, and --out writes them, as PNG or in COCO's formats.

    WEIGHTS is optional: the first word is taken for weights unless it is an image, a folder without weights, or -; then
    the bundled model is used (CIFAR-10's ten classes). Folders are searched in name order; - reads file names
    from stdin, one per line. Unreadable images are named on stderr and skipped, and the exit status is then 1.

    examples:
      vitrail predict cat.jpg
      vitrail predict runs/flowers photos --topk 3 --csv > answers.csv
      vitrail predict cat.jpg --attention looked
      vitrail predict runs/shapes photos --out masks
      vitrail predict runs/shapes aerial.png --windows full --out masks
    """

    USAGE: ClassVar = "%(prog)s [WEIGHTS] IMAGE|FOLDER|-... [options]"
    words: tuple[str, ...] = word(..., "weights, then images, folders", "[WEIGHTS] IMAGE|FOLDER|-", completes="weights")
    weights: str | None = option(None, "the weights; all words are then images", "WEIGHTS", completes="weights")
    topk: int | None = option(None, "number of classes per image", "N", usually="5")
    threshold: float | None = option(
        None, "lowest probability of a label or segment", "P", usually="0.5; panoptic: 0.8"
    )
    json: bool = option(False, "print one JSON object per line, also for unreadable images", exclusive="form")
    csv: bool = option(False, "print one row per prediction, under a header", exclusive="form")
    out: Path | None = option(None, "folder for masks and other files, each with an overlay (NAME.overlay.png)", "DIR")
    attention: Path | None = option(None, "folder for attention maps (rollout), as PNG", "OUT", completes="file")
    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch: int | None = option(None, PATCH, "P")
    windows: Literal["fit", "full"] | None = option(None, groups.WINDOWS)
    precision: PrecisionChoice = groups.precision_option()
    batch: int | None = option(None, "images per batch", "N", usually="by the device")
    workers: int = groups.workers_option("threads that read images")


@command_options
class FitOptions(WeightsOptions):
    """Build a classifier or a segmenter from your images in seconds; a CPU will do.

    The network's features stay as they are. A linear classifier on top of them is computed in closed form (least
    squares, Section 4.1), with its L2 penalty chosen on held-out images, and becomes the network's last layer. The file
    is a network like any other, for predict, serve, evaluate or as a start for finetune. Features are cached, so trying
    another --l2 or --shots takes only a moment.

    Images with masks become a segmentation network in the same way: least squares from patch tokens to the share of
    each class in a patch, with an offset for each class chosen on held-out images.

    examples:
      vitrail fit vitrail-cifar10 photos --out photos.safetensors
      vitrail fit WEIGHTS photos --shots 10 --out ten.safetensors
    """

    data: str = data_word(f"{groups.SOURCE}; learns from its train split")
    out: Path = option(..., f"the network to write, {SUFFIX}", "FILE", completes="file")
    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch: int | None = option(None, PATCH, "P")
    channels: int | None = option(None, groups.CHANNELS, "N", usually="those of the weights")
    task: str = option("", "classification or segmentation", "NAME", usually="the data's")
    test: str | None = option(None, "images to score, if they are not in DATA", "DATA", completes="set")
    l2: float | None = option(None, "L2 penalty of the new last layer", "L2", usually="the best on dev")
    dev: float = option(SHARE, DEV, "SHARE")
    shots: int | None = option(None, "learn from at most N images per class", "N")
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    no_cache: bool = option(False, groups.NO_CACHE)


@command_options
class EmbedOptions(WeightsOptions):
    """Write the features of a whole collection to one file: one row per image, with its name and its label.

    Features are the input of the network's last layer. The work is done in parts, so that the same command resumes an
    interrupted one; under torchrun the processes share the parts. Either way, the file is the same to the byte.

    examples:
      vitrail embed vitrail-cifar10 photos --out photos.parquet
      vitrail embed WEIGHTS cifar10@test --out features.npz --type float16
    """

    data: str = data_word("a folder, a list, shards, or a data set by name; all of its splits")
    out: Path = word(..., "FILE.parquet, or FILE.npz for few images", "OUT", older="--out", order=2, completes="file")
    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch: int | None = option(None, PATCH, "P")
    split: str | None = option(None, "one split only; the same as DATA@NAME", "NAME")
    type: Stored = option("float32", "number type in the file")
    force: bool = option(False, "replace a file made from other weights, images or settings")
    precision: PrecisionChoice = groups.precision_option()


@command_options
class InspectOptions(WeightsOptions):
    """Look inside a network: where it attends on your images, and what it has learned.

    Writes a self-contained page (report.html, with an explorer of all layers and heads) and every figure as PNG and
    SVG. A run's folder stands for its best weights so far, also while it trains.

    examples:
      vitrail inspect vitrail-cifar10 cat.jpg dog.jpg --out look
      vitrail inspect runs/flowers flowers --only rollout,distance
    """

    weights: str = word(DEFAULT_WEIGHTS, groups.WEIGHTS, "WEIGHTS", order=0, completes="weights")
    words: tuple[str, ...] = word((), IMAGES, "DATA|IMAGE", completes="set")
    images: tuple[str, ...] = option((), "image files to show", "IMAGE", completes="file")
    data: str | None = option(None, "", "DATA", hidden=True)  # the older form
    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch_size: int | None = option(None, PATCH, "P")
    count: int = option(128, "number of images of the data set", "N")
    out: Path = option(Path("inspection"), "the folder to write", "DIR")
    only: str | None = option(None, "some kinds of figure, as in rollout,distance,explorer", "KINDS")
    layers: tuple[int, ...] = option((), "layers to show, from 1", "N")
    asked: str | None = option(None, "the class to explain: its name or number", "CLASS", flag="--class")
    patch: str | None = option(None, "the patch to compare with the others, from 1", "ROW,COLUMN")
    labels: str | None = labels_option()


@command_options
class ServeOptions(NamesOptions):
    """Serve a model over HTTP, with a page to try it: /predict, /attention and /embed take images, /docs explains them.

    Without WEIGHTS, the bundled model is served. SIGTERM or Ctrl-C answers the requests in flight and stops; a second
    one stops at once.

    examples:
      vitrail serve
      vitrail serve runs/photos --port 8080
    """

    weights: str | None = word(None, "a file, a folder, a name", "WEIGHTS", usually="bundled ones", completes="weights")
    host: str = option("127.0.0.1", "address to listen on", usually="127.0.0.1, this machine only")
    port: int = option(8000, "port to listen on; 0 picks a free port", "N")
    precision: PrecisionChoice = groups.precision_option()
    token: str | None = option(None, "bearer token required from clients", "T", usually=f"${TOKEN}")
    origin: tuple[str, ...] = option((), "additional allowed CORS origin. Can be repeated", "URL", repeated=True)
    queue: int = option(256, "maximum number of waiting images", "N")
    batch: int | None = option(None, "maximum batch size", "N", usually="16; 64 on a GPU")
    wait_ms: float = option(2.0, "maximum time to wait for a full batch", "MS")
    timeout: float = option(30.0, "maximum seconds until a request is answered", "S")
    read_timeout: float = option(20.0, "maximum seconds to receive a request body", "S")
    max_bytes: int = option(20 * 2**20, "maximum size of a request body", "N", usually="20 MiB")
    max_pixels: int = option(40_000_000, "maximum pixels of one image", "N", usually="40 million")
    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch: int | None = option(None, PATCH, "P")
    threads: int | None = option(None, "threads of the network on a CPU", "N", usually="one less than there are cores")
    access_log: bool = option(False, "log one line per request on stderr")


@command_options
class ExportOptions:
    """Write a network for other runtimes and libraries, and compare it with the original before it gets its name.

    onnx is a file for ONNX Runtime and others, with preprocessing and class names in its metadata; --int8 makes it
    about a quarter of the size. torch-export is a graph that needs only torch. hf, timm, npz and torchvision are
    weights for other libraries; if a library is installed, it loads them as a check.

    examples:
      vitrail export runs/photos --to onnx --out photos.onnx
      vitrail export runs/photos photos --to onnx --int8
      vitrail export runs/photos --to hf --out photos-hf
    """

    weights: str = word(..., "a file, a run's folder or a name", "WEIGHTS", order=0, completes="weights")
    data: str | None = data_word("onnx: images to score both networks on, and to calibrate int8 with", None)
    to: Form = option(..., "the format to write")
    out: Path | None = option(None, "the file or folder to write", "PATH", usually="here, named after the weights")
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch: int | None = option(None, PATCH, "P")
    channels: int | None = option(None, groups.CHANNELS, "N", usually="those of the weights")
    fixed_size: bool = option(False, "onnx, torch-export: accept this image size only")
    int8: bool = option(False, "matrix products and convolutions in eight bits", group="onnx")
    with_preprocessing: bool = option(False, "take bytes of 0 to 255 and normalise them in the graph", group="onnx")
    opset: int = option(20, "version of the ONNX operators, 18 to 23", "N", group="onnx")
    by_number: bool = option(False, groups.BY_NUMBER, group="onnx")
    agreement: float = option(0.95, "int8: minimum share of images with identical top-1", "SHARE", group="onnx")
    workers: int = groups.workers_option(group="onnx")
    download: bool = option(False, groups.DOWNLOAD, group="onnx")


@command_options
class ConvertOptions:
    """Rewrite weights in another format, and print how they compare with the original.

    examples:
      vitrail convert google.npz --out mine.safetensors
      vitrail convert mine.safetensors --out theirs.pth --to torchvision
    """

    source: str = word(..., "a weight file or folder; its format is detected", "WEIGHTS", order=0, completes="weights")
    target: str = word(..., "FILE.safetensors, FILE.npz, FILE.pth or a folder", "OUT", older="--out", completes="file")
    to: str | None = option(None, f"{TARGETS} (default: by the suffix; hf for a folder)", "FORMAT", completes="format")
    type: NumberType | None = option(None, "number type", usually="unchanged")
    heads: int | None = option(None, "attention heads, if they cannot be inferred from an unusual width")
    position: Position | None = option(None, "positions of a file that stores none", usually="big_vision's sincos2d")
    image_size: int | Pair | None = option(None, SIZE, "N", parse=groups.parse_image_size)
    unofficial: bool = option(False, "write a .npz even if Google's code would read it as another network")
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
