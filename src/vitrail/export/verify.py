"""Checks of exports: the written file and the network run on the same images before an export counts as done.

    report = check(references, candidate, subject="model.onnx", against="onnxruntime 1.31.1")
    report.worst, report.agreement

Images are gradients and waves with seeded noise, at several batch and image sizes. The relative difference is the
largest difference over the largest value, as in the parity check of a conversion.

`score_export` compares the answers of both on given images. `measure_speed` compares the speed of exported files, batch
by batch in turn, so that other load on the machine affects both.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle
from vitrail.core.errors import DataError, ExportFailed
from vitrail.core.text import Pair, format_size
from vitrail.data.targets import CLASS_LABELS
from vitrail.evaluation.metrics import Criterion
from vitrail.export.int8 import ExportImages
from vitrail.models.family import ModelConfig
from vitrail.models.query_output import Output, QueryOutput, output_tensors
from vitrail.tasks.registry import TASKS, find_task

TOLERANCE: Final = 1e-4  # largest difference over largest value
BATCHES: Final = (1, 3, 16)

Forward: TypeAlias = Callable[[Tensor], Any]  # [B, C, H, W] -> an `Output`, or its tensors in order


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedBatch:
    """The check of one batch at one image size. The answer is the largest output, one per image, or one per pixel or
    query (`places`). `agree` counts the answers that are the same; None without classes."""

    image: Pair
    batch: int
    absolute: float
    relative: float
    agree: int | None
    places: int = 1

    @property
    def answers(self) -> int:
        return self.batch * self.places


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """The checked batches, and how far the export is from the network."""

    against: str
    cases: tuple[CheckedBatch, ...]
    tolerance: float | None = TOLERANCE

    @property
    def worst(self) -> float:
        """The largest relative difference; NaN if any is NaN."""
        found = [case.relative for case in self.cases]
        return float("nan") if any(value != value for value in found) else max(found)

    @property
    def agreement(self) -> float | None:
        """The share of answers that are the same; None without classes."""
        known = [(case.agree, case.answers) for case in self.cases if case.agree is not None]
        return sum(agree for agree, _ in known) / sum(answers for _, answers in known) if known else None

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Image, batch, largest difference, relative, same answer: as text for a table."""
        answers = ["-" if case.agree is None else f"{case.agree:,} of {case.answers:,}" for case in self.cases]
        numbers = [(str(case.batch), f"{case.absolute:.2e}", f"{case.relative:.2e}") for case in self.cases]
        sizes = [format_size(case.image) for case in self.cases]
        return [(size, *row, answer) for size, row, answer in zip(sizes, numbers, answers, strict=True)]


def make_noise_images(batch: int, channels: int, image: Pair, *, seed: int = 0, pixels: bool = False) -> Tensor:
    """Gradients, waves and noise, different in every image and channel: [B, C, H, W] of about unit scale, or bytes."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, image[0]), torch.linspace(-1, 1, image[1]), indexing="ij")
    turn = torch.rand(batch, channels, 2, 1, 1, generator=generator) * 6
    smooth = x * turn[:, :, 0].cos() + y * turn[:, :, 0].sin() + (9 * x * y + turn[:, :, 1]).sin()
    images = smooth + 0.5 * torch.randn(batch, channels, *image, generator=generator)
    return (images * 64 + 128).clamp(0, 255).to(torch.uint8) if pixels else images


@torch.inference_mode()
def check_export(
    bundle: Bundle,
    references: Mapping[Pair, Forward],
    candidate: Forward,
    name: str,
    against: str,
    *,
    pixels: bool = False,
    tolerance: float | None = TOLERANCE,
) -> ExportReport:
    """Compares an export with the network on the same images, at every size with a reference. Raises ExportFailed for
    differences above the tolerance; without one (int8), only for those that are not finite. With `pixels` both get
    bytes."""
    task, cases = TASKS.get(bundle.card.task), list[CheckedBatch]()
    # The outputs to take the largest of: none for features, or if the task is unknown or has no classes.
    classes = bundle.config.classes if task is not None and task.has_classes else 0
    for image, reference in references.items():
        for batch in BATCHES:
            images = make_noise_images(batch, bundle.config.channels, image, seed=batch, pixels=pixels)
            cases.append(compare_outputs(image, reference(images), read_output(candidate(images)), classes))
    report = ExportReport(against=against, cases=tuple(cases), tolerance=tolerance)
    bar = sys.float_info.max if tolerance is None else tolerance
    if not report.worst <= bar:
        case = max(cases, key=lambda case: case.relative if case.relative == case.relative else float("inf"))
        found = f"{case.relative:.1e} off the network at {format_size(case.image)} and batch {case.batch}"
        cause = explain_masks(bundle.config)
        raise ExportFailed(f"{name}: in {against} it is {found}, where {bar:g} is allowed{cause}; nothing was written")
    return report


def explain_masks(config: ModelConfig) -> str:
    """A possible cause of a difference: while queries mask attention, rounding may flip a patch at the edge of a
    mask."""
    masked: int = getattr(config, "masked_blocks", 0)
    remedy = "export weights from the end of a run"
    return f" (its queries still mask attention, masked_blocks={masked}: {remedy})" if masked else ""


def read_output(found: Any) -> Output:
    """A runtime's outputs in the network's own form: one tensor, or the classes and masks of queries."""
    if isinstance(found, Tensor | QueryOutput):
        return found
    return QueryOutput(*found)


def compare_outputs(image: Pair, mine: Output, theirs: Output, classes: int) -> CheckedBatch:
    """Compares the outputs of a batch by the tensor that differs most. The answers of queries are their classes."""
    pairs = list(zip(output_tensors(mine), output_tensors(theirs), strict=True))
    for own, other in pairs:
        if own.shape != other.shape:
            raise ExportFailed(f"its output is {list(other.shape)}, but the network's is {list(own.shape)}")
    found = [measure_difference(own, other) for own, other in pairs]
    absolute, relative = max(found, key=lambda one: one[1] if one[1] == one[1] else float("inf"))
    axis = 1 if isinstance(mine, Tensor) else 2
    same = pairs[0][0].argmax(axis) == pairs[0][1].argmax(axis)
    return CheckedBatch(
        image=image,
        batch=len(same),
        absolute=absolute,
        relative=relative,
        agree=int(same.sum()) if classes else None,
        places=same[0].numel(),
    )


def measure_difference(mine: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The largest difference, and the same relative to the largest value."""
    difference = (mine.double() - theirs.double()).abs().max().item()
    scale = mine.double().abs().max().item()
    return difference, difference / scale if scale else difference


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportScores:
    """Scores on `count` readable images: how many have the same answer (`agree`; None for tasks without classes), the
    criterion of the task for both on the `labelled` ones, and the unreadable ones."""

    count: int
    agree: float | None
    criterion: Criterion
    labelled: int = 0
    network: float = 0.0
    export: float = 0.0
    unread: tuple[str, ...] = ()

    @property
    def agreement(self) -> float | None:
        return None if self.agree is None else self.agree / self.count

    @property
    def difference(self) -> float:
        """The export's score minus the network's."""
        return self.export - self.network


@torch.inference_mode()
def score_export(
    bundle: Bundle, reference: Forward, candidate: Forward, images: ExportImages | None, *, pixels: bool = False
) -> ExportScores | None:
    """Scores both networks on every image once, with the metrics of the bundle's task; None without images or classes.
    With `pixels` both get bytes, else normalised images."""
    if images is None or not bundle.config.classes:
        return None
    task, preprocessing, count, shares = find_task(bundle.card.task), bundle.card.preprocessing, 0, list[float]()
    metrics = [task.metric_for(bundle.card, bundle.config.classes, torch.device("cpu")) for _ in range(2)]
    for batch in images.batches(preprocessing, task.targets if images.has_targets else CLASS_LABELS):
        if not bool(batch.valid.any()):
            continue
        shown = batch.pixels if pixels else preprocessing.normalise(batch.pixels)
        own, other = reference(shown), read_output(candidate(shown))
        count += int(batch.valid.sum())
        same = task.agreement(own, other)
        if same is not None:
            shares.append(float(same[batch.valid].sum()))
        if images.has_targets:
            for metric, outputs_of in zip(metrics, (own, other), strict=True):
                metric.update(outputs_of, batch)
    if not count:
        raise DataError("none of the images could be read")
    criterion, labelled, values = task.criteria[0], 0, [0.0, 0.0]
    if images.has_targets:
        with contextlib.suppress(DataError):  # no image had a target
            scores = [metric.result() for metric in metrics]
            labelled, values = scores[0].count, [float(score.row()[criterion.name]) for score in scores]
    return ExportScores(
        count=count,
        agree=sum(shares) if shares else None,
        criterion=criterion,
        labelled=labelled,
        network=values[0],
        export=values[1],
        unread=tuple(map(str, images.ledger.known.values())),
    )


BATCH: Final = 16
LEAST, MOST = 3, 30  # rounds
SECONDS: Final = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSpeed:
    """Images per second by runner, at one batch size."""

    batch: int
    images_per_s: Mapping[str, float]


def measure_speed(runners: Mapping[str, Forward], bundle: Bundle, *, pixels: bool = False) -> ExportSpeed:
    """Times runners in rounds in which each runs once; the first round is a warm-up. Returns medians."""
    images = make_noise_images(BATCH, bundle.config.channels, bundle.config.image, pixels=pixels)
    times: dict[str, list[float]] = {name: [] for name in runners}
    begun, rounds = time.perf_counter(), 0
    while rounds <= LEAST or (rounds <= MOST and time.perf_counter() - begun < SECONDS):
        for name, run in runners.items():
            start = time.perf_counter()
            run(images)
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return ExportSpeed(batch=BATCH, images_per_s={name: BATCH / median(found[1:]) for name, found in times.items()})
