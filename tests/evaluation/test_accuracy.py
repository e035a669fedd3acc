"""Scores count every image once, whatever the batch, the process or the network's wrapping."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models.tiny import VIT
from vitrail.core.errors import BadImage, ConfigError, DataError
from vitrail.data.dataset import ArrayDataset, Encoded, ImageDataset, Labels
from vitrail.data.loader import Batch, eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation import metrics as accuracy
from vitrail.evaluation.metrics import ClassificationMetric, ClassificationScore, score_batches
from vitrail.models.build import build

SIDE, CLASSES, COUNT = 4, 7, 23
PLAIN = Preprocessing(image=(SIDE, SIDE), mean=(0.2, 0.4, 0.6), std=(0.3, 0.5, 0.7))


def evaluate(
    network: Callable[[Tensor], Tensor],
    batches: Iterable[Batch],
    preprocessing: Preprocessing,
    *,
    classes: int,
    device: str,
    extremes: int = 0,
    **options: Any,
) -> ClassificationScore:
    metric = ClassificationMetric(classes, torch.device(device), extremes)
    return score_batches(network, batches, preprocessing, metric, device=device, **options)


class Linear(nn.Module):
    """Logits that differ from image to image."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(3 * SIDE * SIDE, classes, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight


def pictures(labels: Labels | None = None, count: int = COUNT) -> ArrayDataset:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
    labels = Labels(rng.integers(0, CLASSES, count)) if labels is None else labels
    return ArrayDataset(pixels, labels, tuple(map(str, range(CLASSES))), called="set")


def scored(
    source: ImageDataset, network: Callable[[Tensor], Tensor] | None = None, batch: int = 5, extremes: int = 0
) -> ClassificationScore:
    return evaluate(
        Linear() if network is None else network,
        eval_batches(source, PLAIN, batch=batch),
        PLAIN,
        classes=CLASSES,
        device="cpu",
        extremes=extremes,
    )


def logits_of(source: ImageDataset, network: nn.Module) -> Tensor:
    images = torch.stack([PLAIN(source.open_image(at).rgb()) for at in range(len(source))])
    return network(images).detach()


def test_every_number_is_that_of_a_slow_count() -> None:
    source, network = pictures(), Linear()
    logits, labels = logits_of(source, network), torch.from_numpy(source.labels.values)
    score = scored(source, network)
    order = logits.argsort(-1, descending=True)
    confusion = np.zeros((CLASSES, CLASSES), np.int64)
    for truth, said in zip(labels.tolist(), order[:, 0].tolist(), strict=True):
        confusion[truth, said] += 1
    assert (score.count, score.unreadable) == (COUNT, 0)
    assert score.correct == np.trace(confusion) > 0
    assert score.correct5 == sum(label in row[:5] for label, row in zip(labels.tolist(), order.tolist(), strict=True))
    assert score.confusion is not None
    np.testing.assert_array_equal(score.confusion, confusion)
    assert score.loss == pytest.approx(nn.functional.cross_entropy(logits.double(), labels).item(), rel=1e-6)
    assert score.accuracy == score.correct / COUNT
    assert score.top5 == score.correct5 / COUNT


@pytest.mark.parametrize("batch", [1, 4, 23, 64])
def test_the_batch_changes_nothing(batch: int) -> None:
    one, other = scored(pictures(), batch=7, extremes=6), scored(pictures(), batch=batch, extremes=6)
    assert (one.count, one.correct, one.correct5) == (other.count, other.correct, other.correct5)
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    assert [a.sample for a in one.best] == [a.sample for a in other.best]
    assert [a.sample for a in one.worst] == [a.sample for a in other.worst]


class Torn(ArrayDataset):
    """Two of its images cannot be read."""

    def read(self, index: int) -> Encoded:
        if index in (3, 22):
            raise BadImage("torn")
        return super().read(index)


def test_unreadable_pictures_are_counted_and_left_out() -> None:
    source = pictures()
    torn = Torn(source.pictures, source.labels, source.classes)
    score, whole = scored(torn), scored(source)
    assert (score.count, score.unreadable) == (COUNT - 2, 2)
    said = logits_of(source, Linear()).argmax(-1)
    lost = sum(int(said[at]) == int(source.labels.values[at]) for at in (3, 22))
    assert score.correct == whole.correct - lost


def test_any_of_several_labels_is_right() -> None:
    source = pictures()
    said = logits_of(source, Linear()).argmax(-1).tolist()
    other = [(one + 1) % CLASSES for one in said]
    rows = [[b, a] if at % 2 else [b] for at, (a, b) in enumerate(zip(said, other, strict=True))]
    rows[0] = []  # an image without a label counts for nothing
    score = scored(pictures(Labels.several(rows)))
    assert (score.count, score.correct) == (COUNT - 1, COUNT // 2)
    assert score.confusion is not None
    assert (np.trace(score.confusion), score.confusion.sum()) == (COUNT // 2, COUNT - 1)
    chances = logits_of(source, Linear()).double().softmax(-1)
    losses = [-chances[at, row].sum().log().item() for at, row in enumerate(rows) if row]
    assert score.loss == pytest.approx(np.mean(losses), rel=1e-6)


def test_the_extremes_are_the_surest_right_and_the_dearest() -> None:
    source, network = pictures(), Linear()
    chances = logits_of(source, network).softmax(-1)
    labels = source.labels.values
    score = scored(source, network, extremes=4)
    right = [at for at in range(COUNT) if int(chances[at].argmax()) == labels[at]]
    right.sort(key=lambda at: -chances[at].max().item())
    dear = sorted(range(COUNT), key=lambda at: chances[at, labels[at]].item())
    assert [answer.sample for answer in score.best] == right[:4]
    assert [answer.sample for answer in score.worst] == dear[:4]
    for answer in (*score.best, *score.worst):
        assert answer.label == labels[answer.sample]
        assert answer.predicted == int(chances[answer.sample].argmax())
        assert answer.probability == pytest.approx(chances[answer.sample].max().item(), rel=1e-5)
    assert all(answer.label == answer.predicted for answer in score.best)


def test_fewer_right_answers_than_asked_for_are_all_there_are() -> None:
    score = scored(pictures(), extremes=100)
    assert len(score.best) == score.correct
    assert len(score.worst) == COUNT


def test_equal_answers_come_in_the_order_of_the_set() -> None:
    score = scored(pictures(Labels(np.zeros(COUNT, np.int64))), lambda x: torch.zeros(len(x), CLASSES), extremes=5)
    assert [answer.sample for answer in score.best] == [0, 1, 2, 3, 4]
    assert [answer.sample for answer in score.worst] == [0, 1, 2, 3, 4]


def test_a_network_that_has_lost_its_numbers_is_scored_as_such() -> None:
    score = scored(pictures(), lambda x: torch.full((len(x), CLASSES), torch.nan), extremes=3)
    assert np.isnan(score.loss)
    assert len(score.worst) == 3
    assert score.best == ()


def test_few_and_very_many_classes() -> None:
    source = pictures(Labels(np.arange(COUNT) % 3))
    few = evaluate(Linear(3), eval_batches(source, PLAIN, batch=5), PLAIN, classes=3, device="cpu")
    assert few.correct5 is None
    assert few.top5 is None
    many = accuracy.CONFUSION + 1
    score = evaluate(Linear(many), eval_batches(source, PLAIN, batch=5), PLAIN, classes=many, device="cpu")
    assert score.confusion is None


class Rank:
    """One of several processes, played by threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: list[Tensor | None]) -> None:
        self.rank, self.size, self.barrier, self.table = rank, size, barrier, table

    def sum_(self, tensor: Tensor) -> None:
        self.table[self.rank] = tensor.clone()
        self.barrier.wait(30)
        tensor.copy_(torch.stack([one for one in self.table if one is not None]).sum(0))
        self.barrier.wait(30)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_a_split_all_get_the_score_of_the_whole(size: int) -> None:
    source, whole = pictures(), scored(pictures(), extremes=5)
    barrier, table, scores = threading.Barrier(size), [None] * size, [whole] * size

    def part(rank: int) -> None:
        world = Rank(rank, size, barrier, table)
        batches = eval_batches(source, PLAIN, batch=2 * size, rank=rank, world=size)
        scores[rank] = evaluate(Linear(), batches, PLAIN, classes=CLASSES, device="cpu", world=world, extremes=5)

    threads = [threading.Thread(target=part, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for score in scores:
        assert score is not whole
        assert (score.count, score.correct, score.correct5) == (whole.count, whole.correct, whole.correct5)
        assert score.loss == pytest.approx(whole.loss, rel=1e-6)
        np.testing.assert_array_equal(score.confusion, whole.confusion)
        assert [a.sample for a in score.best] == [a.sample for a in whole.best]
        assert [a.sample for a in score.worst] == [a.sample for a in whole.worst]


def batches_for(network_image: tuple[int, int], count: int = 6) -> Iterator[Batch]:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (count, *network_image, 3), dtype=np.uint8)
    return eval_batches(
        ArrayDataset(pixels, Labels(np.arange(count) % 5), tuple("abcde"), called="set"),
        of_size(network_image),
        batch=4,
    )


def of_size(image: tuple[int, int]) -> Preprocessing:
    return Preprocessing(image=image)


def test_the_network_is_scored_at_rest_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    network = build(replace(VIT, dropout=0.5))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.2)
    network.train()
    frozen = network.get_submodule("embedding")
    frozen.eval()
    before = [part.training for part in network.modules()]
    seen: list[bool] = []
    network.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled() or network.training))
    scores = [evaluate(network, batches_for(VIT.image), of_size(VIT.image), classes=5, device="cpu") for _ in range(2)]
    assert seen == [False] * 4
    assert scores[0].loss == scores[1].loss
    assert [part.training for part in network.modules()] == before
    assert frozen.training is False


def test_the_mode_comes_back_after_a_failure() -> None:
    network = build(VIT).train()
    with pytest.raises(ConfigError):
        evaluate(network, batches_for(VIT.image), of_size(VIT.image), classes=6, device="cpu")
    assert network.training


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_half_the_bits_give_nearly_the_same_loss(precision: str) -> None:
    torch.manual_seed(0)
    network = build(VIT)
    nn.init.normal_(network.head.classifier.weight)
    losses: list[float] = []
    for chosen in ("float32", precision):
        network = network.to(torch.bfloat16 if chosen == "bfloat16" else torch.float32)
        score = evaluate(
            network,
            batches_for(VIT.image),
            of_size(VIT.image),
            classes=5,
            device="cpu",
            precision=chosen,
        )
        losses.append(score.loss)
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_batch() -> None:
    network = Linear().cuda()
    batches = [batch.to("cuda") for batch in eval_batches(pictures(), PLAIN, batch=5)]

    def watched() -> Iterator[Batch]:
        torch.cuda.set_sync_debug_mode("error")
        yield from batches
        torch.cuda.set_sync_debug_mode("default")

    try:
        score = evaluate(network, watched(), PLAIN, classes=CLASSES, device="cuda", extremes=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    whole = scored(pictures(), extremes=4)
    assert (score.count, score.correct, score.correct5) == (whole.count, whole.correct, whole.correct5)
    assert [answer.sample for answer in score.worst] == [answer.sample for answer in whole.worst]


def test_an_unknown_precision_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="float32"):
        evaluate(Linear(), [], PLAIN, classes=CLASSES, device="cpu", precision="float16")


@pytest.mark.parametrize("labels", [Labels.none(COUNT), Labels(np.zeros(0, np.int64))])
def test_nothing_to_score_is_an_error_and_not_a_zero(labels: Labels) -> None:
    with pytest.raises(DataError):
        scored(pictures(labels, len(labels)))


class Wrapped(nn.Module):
    """As torch.compile and the parallel wrappers do it: another module around the network."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images)


@pytest.mark.slow
def test_wrapped_and_compiled_networks_score_alike() -> None:
    network = Linear().train()
    compiled: Sequence[Callable[[Tensor], Tensor]] = (Wrapped(network), torch.compile(network, backend="eager"))
    for one in compiled:
        assert scored(pictures(), one).row() == scored(pictures(), network).row()
        assert network.training
