"""Options that several commands share."""

import argparse
from pathlib import Path
from typing import Any

from vitrail.cli.options.grammar import command_options, option, word
from vitrail.core.text import Pair, join_words
from vitrail.data.class_names import BUNDLED_SETS
from vitrail.evaluation import Precision

SOURCE = "a folder with one subfolder per class, a list, shards, or a data set by name"
WEIGHTS = "a file, a folder, a run or NAME:TAG, in any format that vitrail reads"
IMAGE_SIZE = "pixels per side; position embeddings are resized"
DOWNLOAD = "download missing files of a named data set"
DEDUPLICATED = "drop.json of the `vitrail data dedup` whose copies were excluded when these weights were trained"
NO_CACHE = "extract the features again and do not cache them"
EPOCHS_HELP = "passes over the training images; not with --steps"
STEPS_HELP = "updates of the weights; not with --epochs"
BATCH_HELP = "images per update"
LR_HELP = "peak learning rate"
BY_NUMBER = "match classes by index instead of by name"


def device_option() -> str:
    return option("auto", completes="device", help="auto, cpu, cuda or mps")


def data_word(help: str) -> Any:
    """DATA, or --data; a field of type tuple takes several."""
    return word(metavar="DATA", older="--data", completes="set", help=help)


def optional_data_word(help: str) -> str | None:
    return word(None, metavar="DATA", older="--data", completes="set", help=help)


def labels_option() -> str | None:
    known = join_words(BUNDLED_SETS, last="or")
    return option(
        None, metavar="FILE", help=f"class names, one per line in the order of the classes; or {known} (bundled names)"
    )


def rename_option() -> tuple[str, ...]:
    return option(
        (),
        metavar="OLD=NEW|FILE",
        repeated=True,
        help="rename a class, as in n01440764=tench, or many: a CSV file with lines old,new. Can be repeated",
    )


def settings_option(
    flag: str = "--set", help: str = "change a field of the recipe. Can be repeated"
) -> tuple[str, ...]:
    return option((), flag=flag, metavar="FIELD=VALUE", repeated=True, help=help)


def jobs_option(what: str) -> int:
    return option(
        1, metavar="N", help=f"number of {what} to run at once, each in its own process; 0 chooses by the machine"
    )


def workers_option(what: str = "loader processes", *, group: str = "") -> int:
    return option(-1, metavar="N", default_text="by the number of cores", group=group, help=what)


def precision_option() -> Precision:
    return option("float32", help="precision of the computation")


def length_option(metavar: str, help: str, default_text: str = "the recipe's") -> None:
    return option(None, metavar=metavar, default_text=default_text, help=help)


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
class LoadingOptions:
    """How images are loaded; the results do not depend on it."""

    batch: int = option(0, metavar="N", default_text="by the device", help="images per batch")
    workers: int = workers_option()
    download: bool = option(False, help=DOWNLOAD)


@command_options
class WeightsOptions(LoadingOptions):
    """Weights that are applied to a collection of images."""

    weights: str = word(metavar="WEIGHTS", order=0, completes="weights", help=WEIGHTS)
    device: str = device_option()


@command_options
class FrozenOptions(WeightsOptions):
    """What `fewshot`, `probe` and `knn` share, apart from their data."""

    image_size: int | None = option(None, metavar="N", help=IMAGE_SIZE)
    held_out: float | None = option(
        None, metavar="SHARE", help="score on this share of every class of train, and learn from the rest"
    )
    reference: bool = option(
        False,
        help="preprocess images as the reference evaluator does (resize to 8/7 of the size, then crop the centre: 256 "
        "and 224) instead of as the weights ask",
    )
    precision: Precision = precision_option()
    no_cache: bool = option(False, help=NO_CACHE)
    out: Path | None = option(None, metavar="FILE", help="write the result as JSON")
    deduplicated_by: Path | None = option(None, metavar="FILE", help=DEDUPLICATED)
    include_seen: bool = option(
        False, help="also score images that the weights were trained on; by default they are skipped"
    )


@command_options
class TrainingOptions:
    """What `pretrain` and `finetune` share."""

    recipe: str
    data: str | None
    epochs: float | None = length_option("E", EPOCHS_HELP)
    steps: int | None = length_option("N", STEPS_HELP)
    batch: int | None = length_option("N", BATCH_HELP)
    lr: float | None = length_option("R", LR_HELP)
    image_size: int = option(0, metavar="N", default_text="the recipe's", help=IMAGE_SIZE)
    task: str = option(
        "", metavar="NAME", default_text="the recipe's, or the data's", help="classification or segmentation"
    )
    settings: tuple[str, ...] = settings_option()
    labels: str | None = labels_option()
    rename: tuple[str, ...] = rename_option()
    minutes: float | None = option(
        None,
        metavar="N",
        parse=parse_minutes,
        default_text="5 for finetune on a CPU, unless its length is set; else none",
        help="time budget: fewer steps and fewer trained layers if the recipe takes longer; none for the whole recipe",
    )
    seed: int | None = option(None, default_text="0", help="random seed")
    out: Path | None = option(
        None, metavar="RUN", completes="file", help="the run's folder; an existing run is resumed"
    )
    resume: str | None = option(
        None, metavar="RUN", nargs="?", completes="file", help="resume the run in this folder with its own settings"
    )
    force: bool = option(False, help="resume even though the config has changed")
    dry_run: bool = option(False, help="build everything, time a few steps, print what to expect, and stop")
    sweep: tuple[str, ...] | None = option(
        None,
        metavar="FIELD=V,V",
        nargs="*",
        default_text="the recipe's grid",
        help="try every point of a grid on a dev split, then train the best on all images",
    )
    jobs: int = jobs_option("sweep points")
    download: bool = option(False, help=DOWNLOAD)
    device: str = device_option()
