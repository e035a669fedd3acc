"""What is called the same, and what is not."""

import math

import pytest
import torch
from torch import Tensor

from tests.models.tiny import VIT
from vitrail.checkpoint.bundle import Bundle, Card
from vitrail.core.errors import ExportFailed
from vitrail.data.preprocessing import Preprocessing
from vitrail.export.verify import BATCHES, CheckedBatch, ExportReport, check_export, make_noise_images
from vitrail.models.zoo import adapt_config

WEIGHT = torch.linspace(-1, 1, 3 * 7).view(3, 7)


def network(images: Tensor) -> Tensor:
    return images.mean(dim=(2, 3)) @ WEIGHT


def bundle(classes: int = 7) -> Bundle:
    card = Card(preprocessing=Preprocessing(image=(6, 4)))
    return Bundle(config=adapt_config(VIT, classes=classes), tensors={}, card=card)


def run(candidate, classes: int = 7, **changes):
    references = {(6, 4): network, (8, 8): network}
    return check_export(bundle(classes), references, candidate, "m.onnx", "a runtime", **changes)


def test_the_network_itself_passes_at_every_batch_and_size() -> None:
    report = run(network)
    assert [(case.image, case.batch) for case in report.cases] == [
        (size, batch) for size in ((6, 4), (8, 8)) for batch in BATCHES
    ]
    assert BATCHES == (1, 3, 16)
    assert report.worst == 0
    assert report.agreement == 1
    assert report.rows()[1] == ("6x4", "3", "0.00e+00", "0.00e+00", "3 of 3")


def test_differences_are_taken_over_the_largest_value() -> None:
    report = run(lambda images: network(images) * (1 + 1e-5))
    assert report.worst == pytest.approx(1e-5, rel=0.1)
    case = report.cases[0]
    assert case.absolute == pytest.approx(
        1e-5 * float(network(make_noise_images(1, 3, (6, 4), seed=1)).abs().max()), rel=0.1
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda images: network(images) * 1.001,
        lambda images: network(images) + torch.nn.functional.one_hot(torch.tensor([3]), 7) * 1e-3,
        lambda images: network(images) * math.nan,
        lambda images: network(images).where(torch.rand(len(images), 7) > 0.5, math.inf),
    ],
)
def test_what_is_off_is_refused_by_name(wrong) -> None:
    with pytest.raises(ExportFailed, match=r"m\.onnx: in a runtime it is .* off the network at .* nothing was written"):
        run(wrong)


def test_one_wrong_size_or_batch_is_enough() -> None:
    def wrong(images: Tensor) -> Tensor:
        return network(images) * (2 if images.shape[2:] == (8, 8) and len(images) == 3 else 1)

    with pytest.raises(ExportFailed, match="at 8x8 and batch 3"):
        run(wrong)


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ExportFailed, match=r"\[1, 6\], but the network's is \[1, 7\]"):
        run(lambda images: network(images)[:, :6])


def test_without_a_tolerance_answers_need_only_be_numbers() -> None:
    report = run(lambda images: -network(images), tolerance=None)
    assert report.worst == pytest.approx(2)
    assert report.agreement == 0
    with pytest.raises(ExportFailed):
        run(lambda images: network(images) * math.nan, tolerance=None)
    with pytest.raises(ExportFailed):
        run(lambda images: network(images) * math.inf, tolerance=None)


def test_features_have_no_answer() -> None:
    report = run(network, classes=0)
    assert report.agreement is None
    assert report.rows()[0][-1] == "-"


def test_bytes_are_given_to_both() -> None:
    seen: list[torch.dtype] = []

    def bytewise(images: Tensor) -> Tensor:
        seen.append(images.dtype)
        return network(images.float())

    check_export(bundle(), {(6, 4): bytewise}, bytewise, "m", "r", pixels=True)
    assert set(seen) == {torch.uint8}
    pixels = make_noise_images(1, 3, (6, 4), pixels=True)
    assert ((make_noise_images(1, 3, (6, 4)) * 64 + 128).clamp(0, 255) - pixels).abs().max() <= 1


def test_pictures_are_the_same_each_time_and_all_different() -> None:
    shown = make_noise_images(4, 3, (5, 9))
    assert torch.equal(shown, make_noise_images(4, 3, (5, 9)))
    assert not torch.equal(shown, make_noise_images(4, 3, (5, 9), seed=1))
    assert len({tuple(plane.flatten().tolist()) for plane in shown.flatten(0, 1)}) == 12


def test_no_number_is_the_worst() -> None:
    cases = tuple(
        CheckedBatch(image=(1, 1), batch=1, absolute=value, relative=value, agree=1) for value in (1.0, math.nan, 2.0)
    )
    assert math.isnan(ExportReport(against="r", cases=cases).worst)
