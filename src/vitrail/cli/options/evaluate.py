"""Options of the commands that evaluate weights, and of `study` and `compare`."""

import argparse
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from vitrail.cli.options import groups
from vitrail.cli.options.grammar import command_options, option, word
from vitrail.cli.options.groups import SOURCE, DeviceOptions, FrozenOptions, WeightsOptions, data_word
from vitrail.core.precision import PrecisionChoice
from vitrail.evaluation import ITERATIONS, TEMPERATURE

ALL: Final = 1 << 53  # shots: every image of train; nothing is drawn
FROZEN: Final = f"{SOURCE}; learns from its train split and scores its test (or val) split"
WITHOUT: Final = "skip the copies that `vitrail data dedup SOURCE --against TRAINED` found: its drop.json"
SHOTS: Final = 'images per class to learn from, or "all"'
TEST: Final = "images to score, if they are not in DATA"
Scale: TypeAlias = Literal["tiny", "small", "paper"]
SCALES: Final = get_args(Scale)


def parse_shots(text: str) -> int:
    if text != "all" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is not a count; give an integer or "all"')
    return ALL if text == "all" else int(text)


@command_options
class EvaluateOptions(WeightsOptions):
    """Score weights on labelled images: top-1 and top-5 accuracy, mean per-class accuracy, calibration and loss, each
    with its 95% interval, and the most frequent confusions. Multi-label weights are scored by mean average precision
    and F1, weights of another task (segmentation) by its own metrics.

    With --real, ImageNet's validation images are also scored on their ReaL labels. Every image counts once; under
    torchrun the processes share the images and print the same numbers. Several image or patch sizes give one row each.

    Images that the weights were trained on are skipped, as far as the weights record which those are: for a fine-tuned
    run, the images that it held out are scored.

    examples:
      vitrail evaluate vitrail-cifar10 cifar10 --download
      vitrail evaluate runs/photos photos@test --page score.html --out photos.json
    """

    data: str = data_word(f"{SOURCE}; DATA@SPLIT for one split")
    image_size: tuple[int, ...] | None = option(None, f"{groups.IMAGE_SIZE}. Several give one row each", "N")
    patch: tuple[int, ...] | None = option(None, f"{groups.PATCH}. Several give one row each", "P")
    real: Path | None = option(None, "real.json: ReaL labels of ImageNet's validation images", "FILE")
    labels: str | None = groups.labels_option()
    by_number: bool = option(False, groups.BY_NUMBER)
    threshold: float | None = option(None, "multi-label weights: lowest probability for F1", "P", usually="0.5")
    windows: Literal["fit", "full"] | None = option(None, f"{groups.WINDOWS}; scored at each image's own size")
    precision: PrecisionChoice = groups.precision_option()
    out: Path | None = option(None, "write the result as JSON", "FILE")
    page: Path | None = option(None, "write an HTML page with images", "FILE")
    answers: Path | None = option(None, "write per-image predictions as CSV", "FILE")
    seed: int = option(0, "random seed of the bootstrap")
    deduplicated_by: Path | None = option(None, groups.DEDUPLICATED, "FILE")
    without: Path | None = option(None, WITHOUT, "FILE")
    include_seen: bool = option(False, groups.SEEN)


@command_options
class FewshotOptions(FrozenOptions):
    """Few-shot accuracy of frozen features (Section 4.1): a linear classifier in closed form from a few images per
    class.

    Follows the reference: features whitened with the training images, a constant feature of 100, targets of -1 and 1,
    a penalty of 1024, and three draws of the images. --sweep is its earlier variant: the first images of each class,
    every penalty from 2^-10 to 2^19, and for each number of shots the penalty that ranks best on average over all data
    sets. Features are cached, also for `vitrail probe` and `vitrail knn`.

    examples:
      vitrail fewshot WEIGHTS photos --shots 1 5 10 25
    """

    data: tuple[str, ...] = data_word(f"{FROZEN}. Several sets are scored one after the other")
    test: tuple[str, ...] | None = option(None, TEST, "DATA", repeated=True, completes="set")
    shots: tuple[int, ...] | None = option(None, SHOTS, "N", parse=parse_shots, usually="1 5 10 25")
    seeds: tuple[int, ...] | None = option(None, "random seeds, one draw of the images each", "S", usually="0 1 2")
    penalty: float | None = option(None, "L2 penalty of the classifier", "L2", usually="1024")
    sweep: bool = option(False, "no draws: try all penalties and take the best one for all sets")


@command_options
class ProbeOptions(FrozenOptions):
    """Linear probe: multinomial logistic regression on frozen features, by L-BFGS until the gradient vanishes.

    The penalty is chosen on a tenth of every class of train, and the probe is then fitted on all of train; or it is
    given. Features are cached, also for `vitrail fewshot` and `vitrail knn`.

    examples:
      vitrail probe WEIGHTS photos --test others --out results/probe.json
    """

    data: str = data_word(FROZEN)
    test: str | None = option(None, TEST, "DATA", completes="set")
    penalty: float | None = option(None, "L2 penalty, added to the mean loss", "L2", usually="the best of 10 to 1e-6")
    iterations: int = option(ITERATIONS, "maximum number of L-BFGS iterations", "N")


@command_options
class KnnOptions(FrozenOptions):
    """Nearest neighbours of frozen features: every image gets the class that its most similar images vote for.

    Similarity is the cosine. A neighbour's vote weighs exp(cosine / temperature), or all votes weigh the same; both
    are shown. Every pair is compared. Features are cached, also for `vitrail fewshot` and `vitrail probe`.

    examples:
      vitrail knn WEIGHTS photos -k 10 20
    """

    data: str = data_word(FROZEN)
    test: str | None = option(None, TEST, "DATA", completes="set")
    neighbours: tuple[int, ...] | None = option(None, "neighbours that vote", "N", flag="-k", usually="1 5 10 20 50")
    temperature: float = option(TEMPERATURE, "temperature of the weighted votes", "T")


@command_options
class VtabOptions(DeviceOptions):
    """Fine-tune weights on the 19 tasks of VTAB-1k, a thousand images each, and print the results next to the paper's.

    One recipe for all tasks, the paper's: 2,500 steps of 512 images at a learning rate of 0.01, 384 px (Table 4). The
    same command resumes where it stopped, task by task; missing data sets are skipped and named.

    examples:
      vitrail vtab WEIGHTS --root sets --dry-run
      vitrail vtab WEIGHTS --root sets --tasks cifar100 pets
    """

    weights: str = word(..., groups.WEIGHTS, "WEIGHTS", completes="weights")
    tasks: tuple[str, ...] = option((), "tasks, or a group: natural, ...", "TASK", usually="all 19", completes="task")
    root: Path | None = option(None, "folder with one subfolder per data set", "DIR", usually="$VITRAIL_DATA")
    out: Path | None = option(None, "folder for the results and a run per task", "DIR", usually="runs/vtab-WEIGHTS")
    image_size: int = option(0, "pixels per side", "N", usually="384, as in the paper")
    settings: tuple[str, ...] = groups.settings_option()
    seed: int | None = option(None, "random seed", usually="0")
    download: bool = option(False, "download the data sets that may be downloaded")
    dry_run: bool = option(False, "print which data sets are available and what it will take, and stop")
    jobs: int = groups.jobs_option("tasks")


@command_options
class StudyOptions(DeviceOptions):
    """Run one of the paper's studies: a grid of trainings, a table, a figure and one sentence of result.

    The same command resumes where it stopped: finished cells stay, an interrupted one resumes from its checkpoint, a
    failed one is retried. --list shows what each cell costs before anything starts; without a name it lists the
    studies.

    Scales: tiny takes a minute or two on two cores and shows that everything works; small is for one GPU and some
    minutes; paper is the paper's own grid with its recipes, if you have its data and the time.

    examples:
      vitrail study --list
      vitrail study positions
      vitrail study data-size --scale small --list
      vitrail study data-size cifar10 --scale small
    """

    name: str = word("", "the study; `vitrail study --list` lists them", order=0, completes="study")
    data: str | None = data_word("a folder, a list, shards, or a data set by name; by default the scale's own", None)
    scale: Scale = option("tiny", "size of the grid and of its networks")
    out: Path | None = option(None, "folder for the results and a run per cell", "DIR", usually="runs/study-NAME-SCALE")
    list: bool = option(False, "show every cell and its cost, and stop; without a name, list the studies")
    jobs: int = option(0, "processes at once", "N", usually="4 per GPU; half the cores of a CPU")
    seeds: int = option(0, "number of seeds per point of the grid", "N", usually="the study's own")
    force: bool = option(False, "retrain cells whose config has changed")


@command_options
class CompareOptions:
    """Compare results in one table: one row per weights, one column per metric and data set, with 95% intervals.

    Reads what `vitrail evaluate`, `fewshot`, `probe`, `knn`, `vtab` and `cost` write with --out: files, or folders with
    everything below them. Warns where two numbers of a column are not comparable: other images, another image size or
    setting, or copies that were excluded from one training only.

    examples:
      vitrail compare results
      vitrail compare results --measures top-1 loss --out table.md
    """

    results: tuple[Path, ...] = word(..., "result files, or folders to search", "RESULTS", completes="file")
    measures: tuple[str, ...] = option((), "metrics to show", "NAME", usually="all")
    out: Path | None = option(None, "write the table: .md, .csv or .html", "FILE")
