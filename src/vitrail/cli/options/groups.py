"""Options that several commands share."""

import argparse
from pathlib import Path
from typing import Any

from vitrail.cli.options.grammar import command_options, option, word
from vitrail.core.precision import PrecisionChoice
from vitrail.core.text import Pair, join_words
from vitrail.data.class_names import BUNDLED_SETS

SOURCE = "a folder with one subfolder per class, a list, shards, or a data set by name"
WEIGHTS = "a file, a folder, a run or NAME:TAG, in any format that vitrail reads"
IMAGE_SIZE = "pixels per side; position embeddings are resized"
PATCH = "pixels per side of a patch; patch kernels and position embeddings are resized"
CHANNELS = "channels of the images: 1 for grey; kernels are adapted"
DOWNLOAD = "download missing files of a named data set"
DEDUPLICATED = "drop.json of the `vitrail data dedup` whose copies were excluded when these weights were trained"
SEEN = "also score images that the weights were trained on; by default they are skipped"
NO_CACHE = "extract the features again and do not cache them"
RENAME = "rename a class, as in n01440764=tench, or many: a CSV file with lines old,new. Can be repeated"
EPOCHS_HELP = "passes over the training images; not with --steps"
STEPS_HELP = "updates of the weights; not with --epochs"
BATCH_HELP = "images per update"
MINUTES = "time budget: fewer steps and fewer trained layers if the recipe takes longer; none for the whole recipe"
REFERENCE = "preprocess as the reference evaluator does (resize to 8/7, crop the centre), not as the weights ask"
SWEEP = "try every point of a grid on a dev split, then train the best on all images"
LR_HELP = "peak learning rate"
TASK = "classification, segmentation, instances or panoptic"
DECODER = "how patches become masks: linear, eomt (queries in the last blocks) or pmt (queries, frozen encoder)"
WINDOWS = (
    "classes of pixels by sliding windows: over images resized until the shorter side fits the network (fit), or in "
    "their own pixels (full)"
)
BY_NUMBER = "match classes by index instead of by name"


def data_word(help: str, default: Any = ...) -> Any:
    """DATA, or --data; a field of type tuple takes several."""
    return word(default, help, "DATA", older="--data", completes="set")


def labels_option() -> str | None:
    known = join_words(BUNDLED_SETS, last="or")
    text = f"class names, one per line in the order of the classes; or {known} (bundled names)"
    return option(None, text, "FILE", order=2)


def rename_option() -> tuple[str, ...]:
    return option((), RENAME, "OLD=NEW|FILE", repeated=True, order=2)


def settings_option(help: str = "change a field of the recipe. Can be repeated") -> tuple[str, ...]:
    return option((), help, "FIELD=VALUE", flag="--set", repeated=True)


def jobs_option(what: str) -> int:
    return option(1, f"number of {what} to run at once, each in its own process; 0 chooses by the machine", "N")


def workers_option(what: str = "loader processes", *, group: str = "") -> int:
    return option(-1, what, "N", usually="by the number of cores", group=group)


def precision_option() -> PrecisionChoice:
    return option("auto", "precision of the computation", usually="bfloat16 on a GPU, float32 on a CPU")


def length_option(metavar: str, help: str, usually: str = "the recipe's") -> None:
    return option(None, help, metavar, usually=usually)


def parse_image_size(text: str) -> int | Pair:
    """224, or 224x320 as (height, width)."""
    try:
        parts = [int(part) for part in text.lower().split("x")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not an image size; give 224, or 224x320 for height x width")
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def parse_minutes(text: str) -> float:
    """Minutes of a time budget; 0 stands for none."""
    try:
        minutes = 0.0 if text.strip().lower() == "none" else float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes; give one above 0, or none for no limit")
    return minutes


@command_options
class DeviceOptions:
    """Where a command computes."""

    device: str = option("auto", "auto, cpu, cuda or mps", completes="device", order=2)


@command_options
class WeightsOptions(DeviceOptions):
    """Weights that are applied to a collection of images, and how it is loaded; the results do not depend on that."""

    weights: str = word(..., WEIGHTS, "WEIGHTS", order=0, completes="weights")
    batch: int = option(0, "images per batch", "N", usually="by the device", order=2)
    workers: int = option(-1, "loader processes", "N", usually="by the number of cores", order=2)
    download: bool = option(False, DOWNLOAD, order=2)


@command_options
class FrozenOptions(WeightsOptions):
    """What `fewshot`, `probe` and `knn` share, apart from their data."""

    image_size: int | None = option(None, IMAGE_SIZE, "N")
    patch: int | None = option(None, PATCH, "P")
    held_out: float | None = option(None, "score on this share of each class of train, learn from the rest", "SHARE")
    reference: bool = option(False, REFERENCE)
    precision: PrecisionChoice = precision_option()
    no_cache: bool = option(False, NO_CACHE)
    out: Path | None = option(None, "write the result as JSON", "FILE")
    deduplicated_by: Path | None = option(None, DEDUPLICATED, "FILE")
    include_seen: bool = option(False, SEEN)


@command_options
class NamesOptions(DeviceOptions):
    """Class names other than those of the weights."""

    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()


@command_options
class TrainingOptions(NamesOptions):
    """What `pretrain` and `finetune` share."""

    recipe: str
    data: str | None
    epochs: float | None = length_option("E", EPOCHS_HELP)
    steps: int | None = length_option("N", STEPS_HELP)
    batch: int | None = length_option("N", BATCH_HELP)
    lr: float | None = length_option("R", LR_HELP)
    image_size: int = option(0, IMAGE_SIZE, "N", usually="the recipe's")
    patch: int = option(0, PATCH, "P", usually="the recipe's, or that of the weights")
    task: str = option("", TASK, "NAME", usually="the recipe's, or the data's")
    decoder: str = option("", DECODER, "NAME", usually="linear for classes of pixels, eomt for segments")
    settings: tuple[str, ...] = settings_option()
    minutes: float | None = option(
        None, MINUTES, "N", parse=parse_minutes, usually="5 for finetune on a CPU, unless its length is set; else none"
    )
    seed: int | None = option(None, "random seed", usually="0")
    out: Path | None = option(None, "the run's folder; an existing run is resumed", "RUN", completes="file")
    resume: str | None = option(None, "resume the run in this folder", "RUN", nargs="?", completes="file")
    force: bool = option(False, "resume even though the config has changed")
    dry_run: bool = option(False, "build everything, time a few steps, print what to expect, and stop")
    sweep: tuple[str, ...] | None = option(None, SWEEP, "FIELD=V,V", nargs="*", usually="the recipe's grid")
    jobs: int = jobs_option("sweep points")
    download: bool = option(False, DOWNLOAD)
