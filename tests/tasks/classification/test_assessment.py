"""Answers image by image, and what is summed up of them, against slow counts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed.pair import together
from tests.evaluation.test_accuracy import CLASSES, COUNT, PLAIN, Linear, Torn, logits_of, pictures, scored
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.loader import eval_batches
from vitrail.distributed.process_group import World
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.metrics import ClassificationMetric, ClassPredictions, score_batches
from vitrail.tasks.classification.metrics import Assessment

NAMES = tuple("abcdefg")


def asked(source: ImageDataset, network: Callable[[Tensor], Tensor] | None = None, batch: int = 5) -> ClassPredictions:
    metric = ClassificationMetric(CLASSES, torch.device("cpu"))
    network = Linear() if network is None else network
    score_batches(network, eval_batches(source, PLAIN, batch=batch), PLAIN, metric, device="cpu")
    return metric.predictions()[0]


def assessed(source: ImageDataset, **options: Callable[[Tensor], Tensor]) -> Assessment:
    return Assessment(judged=asked(source, **options).judge(), names=NAMES)


def test_every_row_is_that_of_its_picture() -> None:
    source, network = pictures(), Linear()
    logits, labels = logits_of(source, network), torch.from_numpy(source.labels.values)
    said = asked(source)
    assert said.sample.tolist() == list(range(COUNT))
    assert said.top.tolist() == logits.topk(5).indices.tolist()
    np.testing.assert_allclose(said.confidence, logits.softmax(-1).max(-1).values, rtol=1e-5)
    wanted = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    np.testing.assert_allclose(said.loss, wanted, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 4, 22, 23, 64])
def test_the_count_is_that_of_the_score_of_training(batch: int) -> None:
    """Sets that the batch does not divide."""
    source, score = pictures(), scored(pictures())
    judged = asked(source, batch=batch).judge()
    assert (len(judged), judged.right.sum(), judged.among.sum()) == (score.count, score.correct, score.correct5)
    np.testing.assert_array_equal(judged.confusion_matrix(CLASSES), score.confusion)
    found = Assessment(judged=judged, names=NAMES)
    assert {m.name: m.value for m in found.measures}["loss"] == pytest.approx(score.loss, rel=1e-5)


def test_one_picture_counts_as_one() -> None:
    source = pictures(count=1)
    found = assessed(source)
    right = int(logits_of(source, Linear()).argmax()) == int(source.labels.values[0])
    measures = {measure.name: measure for measure in found.measures}
    assert (measures["top-1"].value, measures["top-1"].count) == (float(right), 1)
    assert (measures["top-1"].low, measures["top-1"].high) == wilson_interval(int(right), 1)
    assert (measures["ECE"].low, measures["ECE"].high) == (None, None)


def test_unreadable_pictures_count_for_nothing() -> None:
    source = pictures()
    torn = Torn(source.pictures, source.labels, source.classes)
    judged = asked(torn).judge()
    assert judged.sample.tolist() == [at for at in range(COUNT) if at not in (3, 22)]
    assert judged.right.sum() == scored(torn).correct


def test_two_labellings_in_one_sweep() -> None:
    """As ImageNet has them: of the second, images may have several labels or none, and those do not count."""
    source = pictures()
    said = logits_of(source, Linear()).argmax(-1).tolist()
    other = [(one + 1) % CLASSES for one in said]
    rows = [[b, a] if at % 2 else [b] for at, (a, b) in enumerate(zip(said, other, strict=True))]
    rows[0], rows[5] = [], []
    real = Labels.several(rows)
    found = asked(source)
    one, two = found.judge(), found.judge(real)
    assert (len(one), int(one.right.sum())) == (COUNT, scored(source).correct)
    score = scored(pictures(real))
    assert (
        (len(two), int(two.right.sum()))
        == (COUNT - 2, sum(len(row) == 2 for row in rows))
        == (score.count, score.correct)
    )
    measures = {m.name: m for m in Assessment(judged=one, names=NAMES, real=two).measures}
    assert (measures["ReaL"].value, measures["ReaL"].count) == (score.accuracy, COUNT - 2)


def test_measures_are_what_their_names_say() -> None:
    source = pictures(count=200)
    found = assessed(source)
    judged, measures = found.judged, {measure.name: measure for measure in found.measures}
    shares = [judged.right[judged.truth == at].mean() for at in range(CLASSES) if (judged.truth == at).any()]
    assert measures["mean per class"].value == pytest.approx(np.mean(shares))
    assert measures["top-1"].value == judged.right.mean()
    assert [(one.right, one.count) for one in found.classes] == [
        (int(judged.right[judged.truth == at].sum()), int((judged.truth == at).sum())) for at in range(CLASSES)
    ]
    for measure in found.measures:
        assert measure.low is not None
        assert measure.high is not None
        assert measure.low <= measure.value <= measure.high
        assert measure.low < measure.high


def test_pairs_are_the_largest_cells_off_the_diagonal() -> None:
    source = pictures(count=200)
    found = assessed(source)
    matrix = found.judged.confusion_matrix(CLASSES)
    assert matrix is not None
    np.fill_diagonal(matrix, 0)
    pairs = found.rank_confusions(4)
    assert [pair.count for pair in pairs] == sorted(matrix.ravel().tolist(), reverse=True)[:4]
    for pair in pairs:
        assert matrix[NAMES.index(pair.truth), NAMES.index(pair.said)] == pair.count
    assert found.details()["confusion"] == found.cells.tolist()


def test_answers_that_are_no_numbers_are_wrong() -> None:
    source = pictures(Labels.several([[0, 1], *([2] for _ in range(COUNT - 1))]))  # rows that are filled up, too
    found = assessed(source, network=lambda x: torch.full((len(x), CLASSES), torch.nan))
    measures = {measure.name: measure.value for measure in found.measures}
    assert measures["top-1"] == measures["top-5"] == 0.0
    assert "loss" not in measures
    assert found.cells.size == 0


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(DataError):
        assessed(pictures(Labels.none(COUNT)))
    with pytest.raises(ConfigError):
        asked(pictures(), network=Linear(3))


def shared(world: World, torn: bool) -> tuple[bytes, ...]:
    source = pictures()
    source = Torn(source.pictures, source.labels, source.classes) if torn else source
    batches = eval_batches(source, PLAIN, batch=5 * world.size, rank=world.rank, world=world.size)
    metric = ClassificationMetric(CLASSES, torch.device("cpu"))
    score_batches(Linear(), batches, PLAIN, metric, device="cpu", world=world)
    said = metric.predictions()[0]
    return tuple(part.tobytes() for part in (said.sample, said.top, said.right, said.confidence, said.loss))


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_two_processes_get_the_answers_of_one_to_the_last_bit(torn: bool) -> None:
    alone = shared(World(device=torch.device("cpu")), torn)
    assert together(shared, torn) == [alone, alone]
