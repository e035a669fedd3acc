"""Options that several commands share."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.cli.options.grammar import add_data_word
from vitrail.data.class_names import BUNDLED_SETS
from vitrail.evaluation.defaults import Precision

SOURCE = "a folder with one subfolder per class, a list, shards, or a data set by name"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingOptions:
    """How images are loaded; it does not change the results."""

    batch: int = 0  # by the device
    workers: int = -1  # by the cores
    download: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsOptions(LoadingOptions):
    """Weights that are applied to a collection of images."""

    weights: str
    device: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenOptions(WeightsOptions):
    """What `fewshot`, `probe` and `knn` have in common, apart from their data."""

    image_size: int | None = None
    held_out: float | None = None
    reference: bool = False
    precision: Precision = "float32"
    no_cache: bool = False
    out: Path | None = None
    deduplicated_by: Path | None = None
    include_seen: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """What `pretrain` and `finetune` have in common."""

    recipe: str = ""
    data: str | None = None
    epochs: float | None = None
    steps: int | None = None
    batch: int | None = None
    lr: float | None = None
    image_size: int = 0
    task: str = ""
    settings: tuple[str, ...] = ()
    labels: str | None = None
    rename: tuple[str, ...] = ()
    minutes: float | None = None
    seed: int | None = None
    out: Path | None = None
    resume: str | None = None  # empty: the run of --out
    force: bool = False
    dry_run: bool = False
    sweep: tuple[str, ...] | None = None  # empty: the recipe's own grid
    jobs: int = 1
    download: bool = False
    device: str = "auto"


def add_weights(parser: argparse.ArgumentParser, *, sizes: bool = False, optional: bool = False) -> None:
    """WEIGHTS, --image-size (with `sizes` several of them, as a list) and --device. Where WEIGHTS are `optional`, those
    that come with the package stand in."""
    parser.add_argument(
        "weights",
        metavar="WEIGHTS",
        nargs="?" if optional else None,
        default=DEFAULT_WEIGHTS,
        help="a file, a folder, a run or NAME:TAG, in any format that vitrail reads"
        + (f" (default: {DEFAULT_WEIGHTS}, which comes with it)" if optional else ""),
    )
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+" if sizes else None,
        default=None,
        metavar="N",
        help=f"pixels a side; positions are resized{'. Of several, each is scored' if sizes else ''}",
    )
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")


def add_data(parser: argparse.ArgumentParser) -> None:
    add_data_word(parser, f"{SOURCE}; DATA@SPLIT for one split")
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """--batch, --workers and --download: how images are come by, not what comes out."""
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="images at once (default: by the device)")
    parser.add_argument("--workers", type=int, default=-1, metavar="N", help="loader processes (default: by the cores)")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")


def add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="float32", help="to compute in (default: float32)"
    )


def add_deduplicated(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deduplicated-by",
        type=Path,
        metavar="FILE",
        help="the drop.json of `vitrail data dedup` that was left out when these weights were trained",
    )


def add_include_seen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--include-seen",
        action="store_true",
        help="score the images that the weights were trained on, too; without it they are left out",
    )


def add_labels(parser: argparse.ArgumentParser, *, rename: bool = True) -> None:
    """--labels and, with `rename`, --rename."""
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help=f"class names, one per line in class order; or {', '.join(BUNDLED_SETS)} for the bundled names",
    )
    if rename:
        parser.add_argument(
            "--rename",
            action="append",
            default=[],
            metavar="OLD=NEW|FILE",
            help="rename a class, as in n01440764=tench, or several: a CSV file with lines old,new. Can be repeated",
        )


def add_frozen(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """WEIGHTS, DATA and the rest; with `several` DATA and --test may be given more than once, and are lists."""
    add_weights(parser)
    more = "; several sets one after the other" if several else ""
    action: Any = "append" if several else "store"
    add_data_word(
        parser, f"{SOURCE}; its train split is learnt from, its test (or val) split is scored{more}", several=several
    )
    parser.add_argument(
        "--test", metavar="DATA", action=action, help="where the images to score are, if they are not in DATA"
    )
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="score on this share of every class of train, and learn from the rest",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="cut images as the reference's evaluator does (to a square of 8/7 the size, then its centre: 256 and "
        "224), not as the weights say",
    )
    add_precision(parser)
    parser.add_argument("--no-cache", action="store_true", help="extract the features again, and do not keep them")
    add_loading(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    add_deduplicated(parser)
    add_include_seen(parser)


def parse_minutes(text: str) -> float:
    """Minutes of a time budget; 0 stands for none."""
    try:
        minutes = 0.0 if text.strip().lower() == "none" else float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes; give one above 0, or none for no limit")
    return minutes


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        dest="settings",
        help="change a field of the recipe",
    )


def add_jobs(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help=f"{what} at once, each in a process of its own; 0 for as many as make sense (default: 1)",
    )


def add_training(parser: argparse.ArgumentParser, *, epochs: str, steps: str, batch: str, lr: str) -> None:
    """What `pretrain` and `finetune` have in common; the texts say what is chosen where nothing is given."""
    parser.add_argument(
        "--epochs", type=float, metavar="E", help=f"how often each image is seen; not with --steps (default: {epochs})"
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"updates of the weights; not with --epochs (default: {steps})"
    )
    parser.add_argument("--batch", type=int, metavar="N", help=f"images per update (default: {batch})")
    parser.add_argument("--lr", type=float, metavar="R", help=f"peak learning rate (default: {lr})")
    parser.add_argument("--image-size", type=int, default=0, metavar="N", help="pixels per side; positions are resized")
    parser.add_argument(
        "--task",
        default="",
        metavar="NAME",
        help="classification or segmentation (default: the recipe's, or the data's)",
    )
    add_settings(parser)
    add_labels(parser)
    parser.add_argument(
        "--minutes",
        type=parse_minutes,
        metavar="N",
        help="a time budget: fewer steps and fewer layers where the recipe takes longer; none for the whole recipe "
        "(default: 5 for finetune on a CPU, unless its length is set; else none)",
    )
    parser.add_argument("--seed", type=int, default=None, help="of everything that is random (default: 0)")
    parser.add_argument("--out", type=Path, metavar="RUN", help="the run's folder; a run that is there resumes")
    parser.add_argument(
        "--resume", nargs="?", const="", default=None, metavar="RUN", help="resume a run as its folder says"
    )
    parser.add_argument("--force", action="store_true", help="resume although the config has changed")
    parser.add_argument(
        "--dry-run", action="store_true", help="read, build, time a few steps, say what to expect, stop"
    )
    parser.add_argument(
        "--sweep",
        nargs="*",
        metavar="FIELD=V,V",
        help="try every point of a grid on a dev split, then train the best on all (default: the recipe's grid)",
    )
    add_jobs(parser, "points of a sweep")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")
    add_device(parser)
