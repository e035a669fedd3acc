"""Options of the commands that look at networks, data, the installation and the shell."""

import re
from pathlib import Path
from typing import Final, Literal

from vitrail.cli.options.grammar import command_options, option, word
from vitrail.cli.options.groups import DOWNLOAD, DeviceOptions, parse_image_size, precision_option
from vitrail.core.errors import ConfigError
from vitrail.core.precision import PrecisionChoice
from vitrail.core.text import Pair

SHARD_SIZE: Final = 256_000_000
SET: Final = "a path or a name, optionally with @SPLIT"
PIN: Final = "record the checksum of public weights, downloading them if needed; later files must match it"
STRICT: Final = "stop at the first unreadable file"


def parse_bytes(text: str) -> int:
    """256MB -> 256000000; KiB, MiB and GiB are powers of two."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f"{text!r} is not a size; write 256MB, 1GiB or a number of bytes")
    base = 1024 if found[3] else 1000
    return round(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))


def process_option() -> int | None:
    return option(None, "number of processes", usually="one per core")


@command_options
class ModelsOptions:
    """List the networks by name: parameters, sequence length and multiply-accumulates, at two image sizes or at their
    own. --weights lists their public weights, with licences.

    examples:
      vitrail models
      vitrail models 'r50*'
      vitrail models dinov2 --weights
    """

    pattern: str = word("*", "part of a name or a shell pattern: 'vit-*/16'", usually="all", completes="model")
    classes: int = option(1000, "classes of the head")
    weights: bool = option(False, "list public weights instead: size, classes, licence and access")
    json: bool = option(False, "exact numbers, one JSON object per line")
    pin: tuple[str, ...] = option((), PIN, "NAME:TAG", repeated=True, exclusive="check")
    verify: bool = option(False, "check all cached public weights against their checksums", exclusive="check")


@command_options
class TraceOptions:
    """Follow one image through a network: every step with its output shape, parameters and multiply-accumulates.

    examples:
      vitrail trace ViT-L/32 --image-size 256
    """

    model: str = word(..., "a network, as in ViT-L/32 or vit_l_32", completes="model")
    image_size: int | Pair | None = option(None, "pixels per side, or HEIGHTxWIDTH", parse=parse_image_size)
    classes: int | None = option(None, "classes of the head", usually="1000")
    all: bool = option(False, "show every block; by default identical blocks are folded")


@command_options
class CostOptions(DeviceOptions):
    """Show what a network costs: parameters, multiply-accumulates, exaFLOPs of training, memory; and its speed here.

    A network is named as in `vitrail models`, or given as weights. Training is counted by the paper's formula (Table 6)
    for its own three data sets, or for yours. --measure runs the network: images per second and memory over batch and
    image sizes on this device (D.5), as a table, a figure and JSON.

    examples:
      vitrail cost ViT-L/16 BiT-R50x1
      vitrail cost runs/photos --measure
    """

    models: tuple[str, ...] = word(..., "a network by name, or weights: a file, NAME:TAG", "MODEL", completes="model")
    image_size: tuple[int, ...] = option((), "pixels per side; one or several", "N")
    classes: int | None = option(None, "classes of the head", "N", usually="the network's own")
    data: str = option("", "training data: jft, or any DATA of the other commands", "NAME")
    images: int = option(0, "number of training images", "N", usually="those of --data")
    epochs: float = option(0.0, "passes over the training images", "E", usually="the paper's")
    measure: bool = option(False, "run the network: images per second and memory over batch and image sizes")
    batch: tuple[int, ...] = option((), "batch sizes to measure", "N", usually="1, 2, 4, ...")
    precision: PrecisionChoice = precision_option()
    seconds: float = option(0.0, "time to measure each network", "S", usually="60; 120 on a GPU")
    out: Path | None = option(None, "folder for the results", "DIR", usually="runs/cost-NAME, if measured")


@command_options
class DataOptions:
    """Show what is in a data set: images, classes, sizes, splits, unreadable files; and draw a contact sheet. Without
    SOURCE, list the data sets that have a name. `vitrail data pack` writes tar shards, `vitrail data dedup` compares
    data sets; write ./pack for a folder called pack. Exit status 1: --check found unreadable files.

    examples:
      vitrail data
      vitrail data photos --check
      vitrail data cifar10@test --download --sheet cifar10.png
    """

    source: str | None = word(None, f"{SET}: photos/, list.csv, shards/, cifar10, pets:DIR@test", completes="set")
    sheet: str | None = option(None, "the contact sheet", "OUT.png", usually="contact-sheet-NAME.png", completes="file")
    no_sheet: bool = option(False, "do not draw a contact sheet")
    check: bool = option(False, "decode every image, not just the headers of some")
    strict: bool = option(False, STRICT)
    workers: int | None = process_option()
    download: bool = option(False, DOWNLOAD)
    json: bool = option(False, "print one JSON object; draws a sheet only with --sheet")


@command_options
class PackOptions:
    """Write a data set as tar shards: from any source, in parallel, verified; an interrupted command resumes.

    examples:
      vitrail data pack photos --out packed --shard-size 256MB --max-side 512
    """

    source: str = word(..., f"{SET}, as for `vitrail data`", "DATA", order=0, completes="set")
    out: str = word(..., "the folder to write", "OUT", older="--out", completes="file")
    shard_size: int = option(SHARD_SIZE, "size of a tar file", parse=parse_bytes, usually="256MB")
    max_side: int | None = option(None, "shrink images whose longer side exceeds this")
    quality: int = option(92, "JPEG quality of shrunk images")
    workers: int | None = process_option()
    strict: bool = option(False, STRICT)
    download: bool = option(False, DOWNLOAD)


@command_options
class DedupOptions:
    """Find images of test sets in a training set: exact copies, near copies by perceptual hash and, with --embed,
    images with similar features.

    Prints a table and writes into the output folder: pairs.csv, a page that shows the pairs side by side (pairs.html),
    what was compared and how (dedup.json), and a list that excludes the copies from training (drop.json). Under
    torchrun the processes share the work.

    examples:
      vitrail data dedup photos --against photos@test cifar10@test --out copies
    """

    train: str = word(..., "the training set, as for `vitrail data`; its train split without @SPLIT", completes="set")
    against: tuple[str, ...] = option((), "test sets; their test or val split without @SPLIT", "TEST", completes="set")
    within: bool = option(False, "also compare the training set with itself")
    exact: bool = option(False, "only identical pixels: for drawn images that all look alike")
    embed: str | None = option(None, "also compare the features of this network", "WEIGHTS", completes="weights")
    cosine: float = option(0.95, "similarity of features from which two images count as copies")
    out: str = option("dedup", "the folder to write", "DIR", completes="file")
    workers: int | None = process_option()
    download: bool = option(False, DOWNLOAD)


@command_options
class DoctorOptions:
    """Check the installation: versions, devices, threads, extras, caches and the bundled weights.

    Ends with one line: everything is fine, or what to do first. Exit status 1: something that vitrail needs is broken.
    For a bug report use --json; secrets and the name of your home folder are removed.

    examples:
      vitrail doctor
      vitrail doctor --json > doctor.json
    """

    json: bool = option(False, "print everything as one JSON object, for a bug report")


@command_options
class CompletionOptions:
    """Print a script that completes commands, options, recipes, networks, data sets and files as you type.

    The script is self-contained: vitrail does not run while you type. Print it again after an update, and open a new
    shell afterwards; for zsh the folder has to be in fpath before compinit is called.

    examples:
      vitrail completion bash > ~/.local/share/bash-completion/completions/vitrail
      vitrail completion zsh > ~/.zfunc/_vitrail
      vitrail completion fish > ~/.config/fish/completions/vitrail.fish
    """

    shell: Literal["bash", "zsh", "tcsh", "fish"] = word(..., "the shell")
