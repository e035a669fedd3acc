"""Every export is run before it is called done: the written file beside the network, on the same pictures.

    report = check(references, candidate, subject="model.onnx", against="onnxruntime 1.31.1")
    report.worst, report.agreement

Pictures are seeded noise with slopes and waves in it, at several batches and image sizes. The largest difference is
taken over the largest value, as in the certificate of a conversion.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from vitrail.core.errors import ExportFailed
from vitrail.core.shapes import Pair, times

TOLERANCE: Final = 1e-4  # largest difference over largest value
BATCHES: Final = (1, 3, 16)

Forward: TypeAlias = Callable[[Tensor], Tensor]  # [B, C, H, W] -> [B, K], or [B, K, H, W]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One batch at one image size. An image has one answer, its largest output, or as many `places` with one: its
    pixels. To `agree` of them both gave the same; none where there are no classes."""

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
class Report:
    """What was run, and how far it is from the network."""

    against: str
    cases: tuple[Case, ...]
    tolerance: float | None = TOLERANCE

    @property
    def worst(self) -> float:
        """The largest relative difference; not a number where one is none."""
        found = [case.relative for case in self.cases]
        return float("nan") if any(value != value for value in found) else max(found)

    @property
    def agreement(self) -> float | None:
        """The share of images, or of their pixels, with the same answer."""
        known = [(case.agree, case.answers) for case in self.cases if case.agree is not None]
        return sum(agree for agree, _ in known) / sum(answers for _, answers in known) if known else None

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Image, batch, largest difference, relative, same answer: as text for a table."""
        return [
            (
                times(case.image),
                str(case.batch),
                f"{case.absolute:.2e}",
                f"{case.relative:.2e}",
                "-" if case.agree is None else f"{case.agree:,} of {case.answers:,}",
            )
            for case in self.cases
        ]


def pictures(batch: int, channels: int, image: Pair, *, seed: int = 0) -> Tensor:
    """Slopes, waves and grain, other ones in every picture and channel: [B, C, H, W] of about unit scale."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, image[0]), torch.linspace(-1, 1, image[1]), indexing="ij")
    turn = torch.rand(batch, channels, 2, 1, 1, generator=generator) * 6
    smooth = x * turn[:, :, 0].cos() + y * turn[:, :, 0].sin() + (9 * x * y + turn[:, :, 1]).sin()
    return smooth + 0.5 * torch.randn(batch, channels, *image, generator=generator)


def as_bytes(images: Tensor) -> Tensor:
    """The same pictures as pixels of 0 to 255."""
    return (images * 64 + 128).clamp(0, 255).to(torch.uint8)


@torch.inference_mode()
def check(
    references: Mapping[Pair, Forward],
    candidate: Forward,
    *,
    subject: str,
    against: str,
    channels: int,
    classes: int,
    pixels: bool = False,
    batches: tuple[int, ...] = BATCHES,
    tolerance: float | None = TOLERANCE,
) -> Report:
    """Both on the same pictures, at every size that there is a reference for. Beyond the tolerance it raises
    ExportFailed; without one (int8) the answers need only be finite. With `pixels` both get bytes."""
    cases: list[Case] = []
    for image, reference in references.items():
        for batch in batches:
            images = pictures(batch, channels, image, seed=batch)
            images = as_bytes(images) if pixels else images
            cases.append(measured(image, reference(images), candidate(images), classes))
    report = Report(against=against, cases=tuple(cases), tolerance=tolerance)
    bar = float("inf") if tolerance is None else tolerance
    if not report.worst <= bar:
        case = max(cases, key=lambda case: case.relative if case.relative == case.relative else float("inf"))
        raise ExportFailed(
            f"{subject}: in {against} it is {case.relative:.1e} off the network at {times(case.image)} and batch "
            f"{case.batch}, where {bar:g} is allowed; nothing was written"
        )
    return report


def measured(image: Pair, mine: Tensor, theirs: Tensor, classes: int) -> Case:
    if mine.shape != theirs.shape:
        raise ExportFailed(f"it gives {list(theirs.shape)} where the network gives {list(mine.shape)}")
    difference = (mine.double() - theirs.double()).abs().max().item()
    scale = mine.double().abs().max().item()
    said, heard = mine.argmax(1), theirs.argmax(1)
    return Case(
        image=image,
        batch=len(mine),
        absolute=difference,
        relative=difference / scale if scale else difference,
        agree=int((said == heard).sum()) if classes else None,
        places=said[0].numel(),
    )
