"""Options of the commands that look at networks, data, the installation and the shell."""

import re
from pathlib import Path
from typing import ClassVar, Final, Literal

from vitrail.cli.options.grammar import command_options, option, word
from vitrail.cli.options.groups import DOWNLOAD, device_option, parse_image_size
from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair
from vitrail.evaluation import Precision

SHARD_SIZE: Final = 256_000_000
SET: Final = "a path or a name, optionally with @SPLIT"
STRICT: Final = "stop at the first unreadable file"


def parse_bytes(text: str) -> int:
    """256MB -> 256000000; KiB, MiB and GiB are powers of two."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"{text!r} is not a size; write 256MB, 1GiB or a number of bytes")
    base = 1024 if found[3] else 1000
    return round(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))


def process_option() -> int | None:
    return option(None, default_text="one per core", help="number of processes")


@command_options
class ModelsOptions:
    """List the networks by name: parameters, sequence length and multiply-accumulates at two image sizes."""

    EXAMPLES: ClassVar = ("models", "models 'r50*'")
    pattern: str = word(
        "*", default_text="all", completes="model", help="part of a name or a shell pattern: 'vit-*/16'"
    )
    classes: int = option(1000, help="classes of the head")
    json: bool = option(False, help="exact numbers, one JSON object per line")
    pin: tuple[str, ...] = option(
        (),
        metavar="NAME:TAG",
        repeated=True,
        exclusive="check",
        help="record the checksum of public weights, downloading them if needed; later files must match it",
    )
    verify: bool = option(False, exclusive="check", help="check all cached public weights against their checksums")


@command_options
class TraceOptions:
    """Follow one image through a network: every step with its output shape, parameters and multiply-accumulates."""

    EXAMPLES: ClassVar = ("trace ViT-L/32 --image-size 256",)
    model: str = word(completes="model", help="a network, as in ViT-L/32 or vit_l_32")
    image_size: int | Pair | None = option(None, parse=parse_image_size, help="pixels per side, or HEIGHTxWIDTH")
    classes: int | None = option(None, default_text="1000", help="classes of the head")
    all: bool = option(False, help="show every block; by default identical blocks are folded")


@command_options
class CostOptions:
    """Show what a network costs: parameters, multiply-accumulates, exaFLOPs of training, memory; and its speed here.

    A network is named as in `vitrail models`, or given as weights. Training is counted by the paper's formula (Table 6)
    for its own three data sets, or for yours. --measure runs the network: images per second and memory over batch and
    image sizes on this device (D.5), as a table, a figure and JSON."""

    EXAMPLES: ClassVar = ("cost ViT-L/16 BiT-R50x1", "cost runs/photos --measure")
    models: tuple[str, ...] = word(
        metavar="MODEL", completes="model", help="a network by name (ViT-B/16, vit_b_16), or weights: a file, NAME:TAG"
    )
    image_size: tuple[int, ...] = option((), metavar="N", help="pixels per side; one or several")
    classes: int | None = option(None, metavar="N", default_text="the network's own", help="classes of the head")
    data: str = option("", metavar="NAME", help="training data: jft, or any DATA of the other commands")
    images: int = option(0, metavar="N", default_text="those of --data", help="number of training images")
    epochs: float = option(0.0, metavar="E", default_text="the paper's", help="passes over the training images")
    measure: bool = option(False, help="run the network: images per second and memory over batch and image sizes")
    batch: tuple[int, ...] = option((), metavar="N", default_text="1, 2, 4, ...", help="batch sizes to measure")
    precision: Literal["auto"] | Precision = option(
        "auto",
        choices=("auto", "float32", "autocast", "bfloat16"),
        default_text="bfloat16 on a GPU, float32 on a CPU",
        help="precision of the measurement",
    )
    seconds: float = option(0.0, metavar="S", default_text="60; 120 on a GPU", help="time to measure each network")
    device: str = device_option()
    out: Path | None = option(
        None, metavar="DIR", default_text="runs/cost-NAME, if measured", help="folder for the JSON files and the figure"
    )


@command_options
class DataOptions:
    """Show what is in a data set: images, classes, sizes, splits, unreadable files; and draw a contact sheet. Without
    SOURCE, list the data sets that have a name. `vitrail data pack` writes tar shards, `vitrail data dedup` compares
    data sets; write ./pack for a folder called pack. Exit status 1: --check found unreadable files."""

    EXAMPLES: ClassVar = ("data", "data photos --check", "data cifar10@test --download --sheet cifar10.png")
    source: str | None = word(
        None, completes="set", help=f"{SET}: photos/, list.csv, shards/, digits, cifar10, pets:DIR@test"
    )
    sheet: str | None = option(
        None, metavar="OUT.png", default_text="contact-sheet-NAME.png", completes="file", help="the contact sheet"
    )
    no_sheet: bool = option(False, help="do not draw a contact sheet")
    check: bool = option(False, help="decode every image, not just the headers of some")
    strict: bool = option(False, help=STRICT)
    workers: int | None = process_option()
    download: bool = option(False, help=DOWNLOAD)
    json: bool = option(False, help="print one JSON object; draws a sheet only with --sheet")


@command_options
class PackOptions:
    """Write a data set as tar shards: from any source, in parallel, verified; an interrupted command resumes."""

    EXAMPLES: ClassVar = ("data pack photos --out packed --shard-size 256MB --max-side 512",)
    source: str = word(metavar="DATA", order=0, completes="set", help=f"{SET}, as for `vitrail data`")
    out: str = word(metavar="OUT", older="--out", completes="file", help="the folder to write")
    shard_size: int = option(SHARD_SIZE, parse=parse_bytes, default_text="256MB", help="size of a tar file")
    max_side: int | None = option(None, help="shrink images whose longer side exceeds this")
    quality: int = option(92, help="JPEG quality of shrunk images")
    workers: int | None = process_option()
    strict: bool = option(False, help=STRICT)
    download: bool = option(False, help=DOWNLOAD)


@command_options
class DedupOptions:
    """Find images of test sets in a training set: exact copies, near copies by perceptual hash, and with --embed those
    that a network finds alike.

    Prints a table and writes into the output folder: pairs.csv, a page that shows the pairs side by side (pairs.html),
    what was compared and how (dedup.json), and a list that excludes the copies from training (drop.json). Under
    torchrun the processes share the work."""

    EXAMPLES: ClassVar = ("data dedup photos --against photos@test cifar10@test --out copies",)
    train: str = word(completes="set", help="the training set, as for `vitrail data`; its train split without @SPLIT")
    against: tuple[str, ...] = option(
        (), metavar="TEST", completes="set", help="test sets; their test or val split without @SPLIT"
    )
    within: bool = option(False, help="also compare the training set with itself")
    exact: bool = option(False, help="only identical pixels: for drawn images that all look alike")
    embed: str | None = option(
        None, metavar="WEIGHTS", completes="weights", help="also compare the features of this network"
    )
    cosine: float = option(0.95, help="similarity of features from which two images count as copies")
    out: str = option("dedup", metavar="DIR", completes="file", help="the folder to write")
    workers: int | None = process_option()
    download: bool = option(False, help=DOWNLOAD)


@command_options
class DoctorOptions:
    """Check the installation: versions, devices, threads, extras, caches and the bundled weights.

    Ends with one line: everything is fine, or what to do first. Exit status 1: something that vitrail needs is broken.
    For a bug report use --json; secrets and the name of your home folder are removed."""

    EXAMPLES: ClassVar = ("doctor", "doctor --json > doctor.json")
    json: bool = option(False, help="print everything as one JSON object, for a bug report")


@command_options
class CompletionOptions:
    """Print a script that completes commands, options, recipes, networks, data sets and files as you type.

    The script is self-contained: vitrail does not run while you type. Print it again after an update, and open a new
    shell afterwards; for zsh the folder has to be in fpath before compinit is called."""

    EXAMPLES: ClassVar = (
        "completion bash > ~/.local/share/bash-completion/completions/vitrail",
        "completion zsh > ~/.zfunc/_vitrail",
        "completion fish > ~/.config/fish/completions/vitrail.fish",
    )
    shell: Literal["bash", "zsh", "tcsh", "fish"] = word(help="the shell")
