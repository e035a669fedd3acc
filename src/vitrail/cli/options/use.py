"""Options of the commands that use a model: predict, fit, embed, inspect, serve, export and convert."""

from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias, get_args

from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.cli.options.grammar import command_options, option, word
from vitrail.cli.options.groups import (
    BY_NUMBER,
    DOWNLOAD,
    IMAGE_SIZE,
    NO_CACHE,
    SOURCE,
    WEIGHTS,
    WeightsOptions,
    data_word,
    device_option,
    labels_option,
    optional_data_word,
    parse_image_size,
    precision_option,
    rename_option,
    workers_option,
)
from vitrail.core.text import Pair
from vitrail.evaluation import SHARE, Precision, Stored
from vitrail.models.family import Position

SUFFIX: Final = ".safetensors"
TOKEN: Final = "VITRAIL_TOKEN"
Form: TypeAlias = Literal["onnx", "torch-export", "hf", "timm", "npz", "torchvision"]
FORMS: Final = get_args(Form)
NumberType: TypeAlias = Literal["float32", "bfloat16", "float16"]


@command_options
class PredictOptions:
    """Classify images: the most likely classes of each, in the order given. Segmentation weights predict a mask per
    image, which --out writes as PNG.

    WEIGHTS is optional: the first word is taken for weights unless it is an image, a folder without weights, or -; then
    the bundled model is used (CIFAR-10's ten classes). Folders are searched in the order of names; - reads file names
    from stdin, one per line. Unreadable images are named on stderr and skipped, and the exit status is then 1."""

    EXAMPLES: ClassVar = (
        "predict cat.jpg",
        "predict runs/flowers photos --topk 3 --csv > answers.csv",
        "predict cat.jpg --attention looked",
        "predict runs/shapes photos --out masks",
    )
    USAGE: ClassVar = "%(prog)s [WEIGHTS] IMAGE|FOLDER|-... [options]"
    words: tuple[str, ...] = word(
        metavar="[WEIGHTS] IMAGE|FOLDER|-", completes="weights", help="weights, then images and folders"
    )
    weights: str | None = option(
        None, metavar="WEIGHTS", completes="weights", help="the weights; then every word is an image or a folder"
    )
    topk: int | None = option(None, metavar="N", default_text="5", help="number of classes per image")
    threshold: float | None = option(
        None, metavar="P", default_text="0.5", help="multi-label weights: lowest probability of a predicted class"
    )
    json: bool = option(False, exclusive="form", help="print one JSON object per line, also for unreadable images")
    csv: bool = option(False, exclusive="form", help="print one row per prediction, under a header")
    out: Path | None = option(
        None,
        metavar="DIR",
        help="folder for predictions that are files, such as masks, each with an overlay (NAME.overlay.png)",
    )
    attention: Path | None = option(
        None,
        metavar="OUT",
        completes="file",
        help="folder for attention maps (attention rollout) over each image, as PNG",
    )
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    device: str = device_option()
    precision: Literal["float32", "bfloat16"] = option("float32", help="precision of the computation")
    batch: int | None = option(None, metavar="N", default_text="by the device", help="images per batch")
    workers: int = workers_option("threads that read images")


@command_options
class FitOptions(WeightsOptions):
    """Build a classifier from your images in seconds; a CPU will do.

    The network's features stay as they are; a linear classifier on top of them is computed in closed form (least
    squares, Section 4.1), with its L2 penalty chosen on held-out images, and becomes the network's last layer. The file
    is a network like any other, for predict, serve, evaluate or as a start for finetune. Features are cached, so that
    another --l2 or --shots takes a moment."""

    EXAMPLES: ClassVar = (
        "fit vitrail-cifar10 photos --out photos.safetensors",
        "fit WEIGHTS photos --shots 10 --out ten.safetensors",
    )
    data: str = data_word(f"{SOURCE}; learns from its train split")
    out: Path = option(metavar="FILE", completes="file", help=f"the network to write, {SUFFIX}")
    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    test: str | None = option(
        None, metavar="DATA", completes="set", help="images to score, if they are not the test or val split of DATA"
    )
    l2: float | None = option(None, metavar="L2", default_text="the best on dev", help="penalty of the classifier")
    dev: float = option(
        SHARE,
        metavar="SHARE",
        help="share of every class held out to choose the penalty and the scale of the logits; the final fit uses all",
    )
    shots: int | None = option(None, metavar="N", help="learn from at most N images per class")
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    no_cache: bool = option(False, help=NO_CACHE)


@command_options
class EmbedOptions(WeightsOptions):
    """Write the features of a whole collection to one file: one row per image, with its name and its label.

    Features are the input of the network's last layer. The work is done in parts, so that the same command resumes an
    interrupted one; under torchrun the processes share the parts. The file is the same to the byte."""

    EXAMPLES: ClassVar = (
        "embed vitrail-cifar10 photos --out photos.parquet",
        "embed WEIGHTS cifar10@test --out features.npz --type float16",
    )
    data: str = data_word("a folder, a list, shards, or a data set by name; all of its splits")
    out: Path = word(
        metavar="OUT", older="--out", order=2, completes="file", help="FILE.parquet, or FILE.npz for a small collection"
    )
    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    split: str | None = option(None, metavar="NAME", help="one split only; the same as DATA@NAME")
    type: Stored = option("float32", help="number type in the file")
    force: bool = option(False, help="replace a file made from other weights, images or settings")
    precision: Precision = precision_option()


@command_options
class InspectOptions(WeightsOptions):
    """Look inside a network: where it attends on your images, and what it has learned.

    Writes a self-contained page (report.html, with an explorer of all layers and heads) and every figure as PNG and
    SVG. A run's folder stands for its best weights so far, also while it trains."""

    EXAMPLES: ClassVar = (
        "inspect vitrail-cifar10 cat.jpg dog.jpg --out look",
        "inspect runs/flowers flowers --only rollout,distance",
    )
    weights: str = word(DEFAULT_WEIGHTS, metavar="WEIGHTS", order=0, completes="weights", help=WEIGHTS)
    words: tuple[str, ...] = word(
        (),
        metavar="DATA|IMAGE",
        completes="set",
        help="a folder or a data set by name, for statistics over many images (distance, entropy, CKA); image files",
    )
    images: tuple[str, ...] = option((), metavar="IMAGE", completes="file", help="image files to show")
    data: str | None = option(None, metavar="DATA", hidden=True, help="")  # the older form
    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    count: int = option(128, metavar="N", help="number of images of the data set")
    out: Path = option(Path("inspection"), metavar="DIR", help="the folder to write")
    only: str | None = option(None, metavar="KINDS", help="some kinds of figure, as in rollout,distance,explorer")
    layers: tuple[int, ...] = option((), metavar="N", help="layers to show, from 1")
    asked: str | None = option(None, flag="--class", metavar="CLASS", help="the class to explain: its name or number")
    patch: str | None = option(None, metavar="ROW,COLUMN", help="the patch to compare with the others, from 1")
    labels: str | None = labels_option()


@command_options
class ServeOptions:
    """Serve a model over HTTP, with a page to try it: /predict, /attention and /embed take images, /docs explains them.

    Without WEIGHTS, the bundled model is served. SIGTERM or Ctrl-C answers the requests in flight and stops; a second
    one stops at once."""

    EXAMPLES: ClassVar = ("serve", "serve runs/photos --port 8080")
    weights: str | None = word(
        None,
        metavar="WEIGHTS",
        default_text="the bundled model",
        completes="weights",
        help="a file, a folder or a name",
    )
    host: str = option("127.0.0.1", default_text="127.0.0.1, this machine only", help="address to listen on")
    port: int = option(8000, metavar="N", help="port to listen on; 0 picks a free port")
    token: str | None = option(None, metavar="T", default_text=f"${TOKEN}", help="bearer token required from clients")
    origin: tuple[str, ...] = option(
        (), metavar="URL", repeated=True, help="additional allowed CORS origin. Can be repeated"
    )
    queue: int = option(256, metavar="N", help="maximum number of waiting images")
    batch: int | None = option(None, metavar="N", default_text="16; 64 on a GPU", help="maximum batch size")
    wait_ms: float = option(2.0, metavar="MS", help="maximum time to wait for a full batch")
    timeout: float = option(30.0, metavar="S", help="maximum seconds until a request is answered")
    read_timeout: float = option(20.0, metavar="S", help="maximum seconds to receive a request body")
    max_bytes: int = option(20 * 2**20, metavar="N", default_text="20 MiB", help="maximum size of a request body")
    max_pixels: int = option(40_000_000, metavar="N", default_text="40 million", help="maximum pixels of one image")
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    device: str = device_option()
    threads: int | None = option(
        None, metavar="N", default_text="one less than the number of cores", help="threads of the network on a CPU"
    )
    access_log: bool = option(False, help="log one line per request on stderr")


@command_options
class ExportOptions:
    """Write a network for other runtimes and libraries, and check it against the original before it gets its name.

    onnx is a file for ONNX Runtime and others, with preprocessing and class names in its metadata; --int8 makes it
    about a quarter of the size. torch-export is a graph that needs only torch. hf, timm, npz and torchvision are
    weights for other libraries, loaded there if they are installed."""

    EXAMPLES: ClassVar = (
        "export runs/photos --to onnx --out photos.onnx",
        "export runs/photos photos --to onnx --int8",
        "export runs/photos --to hf --out photos-hf",
    )
    weights: str = word(metavar="WEIGHTS", order=0, completes="weights", help="a file, a run's folder or a name")
    data: str | None = optional_data_word("onnx: images to score both networks on, and to calibrate int8 with")
    to: Form = option(help="the format to write")
    out: Path | None = option(
        None, metavar="PATH", default_text="in this folder, named after the weights", help="the file or folder to write"
    )
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    fixed_size: bool = option(False, help="onnx, torch-export: accept this image size only")
    int8: bool = option(False, group="onnx", help="matrix products and convolutions in eight bits")
    with_preprocessing: bool = option(
        False, group="onnx", help="take bytes of 0 to 255 and normalise them in the graph"
    )
    opset: int = option(20, metavar="N", group="onnx", help="version of the ONNX operators, 18 to 23")
    by_number: bool = option(False, group="onnx", help=BY_NUMBER)
    agreement: float = option(
        0.95, metavar="SHARE", group="onnx", help="int8: minimum share of images with identical top-1"
    )
    workers: int = workers_option(group="onnx")
    download: bool = option(False, group="onnx", help=DOWNLOAD)


@command_options
class ConvertOptions:
    """Rewrite weights in another format, and print how they compare with the original."""

    EXAMPLES: ClassVar = (
        "convert google.npz --out mine.safetensors",
        "convert mine.safetensors --out theirs.pth --to torchvision",
    )
    source: str = word(
        metavar="WEIGHTS", order=0, completes="weights", help="a weight file or folder; its format is detected"
    )
    target: str = word(
        metavar="OUT", older="--out", completes="file", help="MODEL.safetensors, MODEL.npz, MODEL.pth or a folder"
    )
    to: str | None = option(
        None,
        metavar="FORMAT",
        completes="format",
        help="vitrail (default for .safetensors), npz, npz-linen, npz-big-vision, npz-bit, hf (default for a folder), "
        "timm, torchvision",
    )
    type: NumberType | None = option(None, default_text="unchanged", help="number type")
    heads: int | None = option(None, help="attention heads, if they cannot be inferred from an unusual width")
    position: Position | None = option(
        None,
        choices=get_args(Position),
        default_text="big_vision's sincos2d",
        help="position embedding of a file that stores none",
    )
    image_size: int | Pair | None = option(
        None, metavar="N", parse=parse_image_size, help="image size of a file that does not say: N or HEIGHTxWIDTH"
    )
    unofficial: bool = option(False, help="write a .npz even if Google's code would read it as another network")
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
