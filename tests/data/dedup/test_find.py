"""The whole comparison on sets in which it is known what is where."""

import csv
import os
from multiprocessing import current_process
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.data.dedup.planted import COPIES, Files, encoded, mirrored, plant, scenes, score
from vitrail.core.errors import ConfigError, DataError, WorkerDied
from vitrail.data.dataset import ArrayDataset, ImageDataset
from vitrail.data.dedup import deduplicate as module
from vitrail.data.dedup.deduplicate import DedupJob, DedupRecord, DedupResult, deduplicate, write_page
from vitrail.data.dedup.fingerprints import Fingerprints, compute_fingerprints
from vitrail.data.dedup.match import KINDS, MatchRule
from vitrail.data.splits import Selection


def run(tmp_path: Path, train: ImageDataset, *, out: str = "out", cache: str = "cache", **rest: object) -> DedupResult:
    tests = rest.pop("tests", {})
    return deduplicate(DedupJob(train=train, tests=tests, out=tmp_path / out, cache=tmp_path / cache, **rest))  # type: ignore[arg-type]


def found(outcome: DedupResult) -> set[tuple[int, int]]:
    return set(zip(outcome.pairs["train"].tolist(), outcome.pairs["test"].tolist(), strict=True))


def by_kind(outcome: DedupResult) -> dict[tuple[int, int], str]:
    return {(train, test): KINDS[kind] for _, train, test, kind, _ in outcome.pairs.tolist()}


def test_planted_copies_are_found_and_strangers_are_not(tmp_path: Path) -> None:
    planted = plant(scenes(10, 1), scenes(12, 2))
    outcome = run(tmp_path, planted.train, tests={"test": planted.test})
    result = score(planted, found(outcome))
    assert result.precision == 1, result.wrong
    for kind, recall in result.recall.items():
        assert recall >= (0.95 if "crop" in kind else 1), kind
    kinds = by_kind(outcome)
    names = list(COPIES)
    assert kinds[0, names.index("exact")] == "exact"
    assert kinds[0, names.index("jpeg 50")] == "near"
    assert kinds[0, names.index("flip")] == "flipped"
    one = outcome.record.checked[0]
    assert one.kinds["exact"] == 10
    assert one.duplicates == sum(one.kinds.values()) == len({test for _, test in found(outcome)})


def test_the_selection_drops_the_duplicates_and_nothing_else(tmp_path: Path) -> None:
    train, strangers = scenes(18, 1), scenes(5, 2)
    copied = [3, 4, 17]
    test = Files(
        [COPIES["jpeg 50"](train.open_image(i).rgb(), np.random.default_rng(0)) for i in copied], ["a", "b", "c"]
    )
    test = Files(test.files + strangers.files, test.names + strangers.names)
    outcome = run(tmp_path, train, tests={"test": test})
    selection = Selection.load(tmp_path / "out" / "drop.json")
    assert selection.indices.tolist() == copied
    kept = selection.apply(train)
    assert [kept.name(i) for i in range(len(kept))] == [n for i, n in enumerate(train.names) if i not in copied]

    record = DedupRecord.load(tmp_path / "out" / "dedup.json")
    assert record == outcome.record
    assert record.selection == selection.hash
    assert (record.fingerprint, record.filtered) == (train.fingerprint, kept.fingerprint)
    assert [one.fingerprint for one in record.checked] == [test.fingerprint]
    again = run(tmp_path, kept, tests={"test": test})
    assert not len(again.pairs)
    assert not again.selection.indices.size


@pytest.mark.slow
def test_any_block_size_gives_the_same(tmp_path: Path) -> None:
    planted = plant(scenes(5, 1, 48), scenes(4, 2, 48))
    tests = {"test": planted.test, "again": planted.train}
    whole = run(tmp_path, planted.train, tests=tests, within=True)
    assert len(whole.pairs) > 30
    for block in (7, 25):
        other = run(tmp_path, planted.train, tests=tests, within=True, block=block, out=f"out{block}")
        assert other.pairs.tolist() == whole.pairs.tolist()
        assert other.record == whole.record
        assert other.selection.hash == whole.selection.hash


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same(tmp_path: Path) -> None:
    planted = plant(scenes(4, 1, 48), scenes(3, 2, 48))
    tests = {"test": planted.test}
    alone, shared = (
        run(tmp_path, planted.train, tests=tests, block=10, workers=workers, out=f"{workers}", cache=f"cache{workers}")
        for workers in (0, 2)
    )
    assert shared.pairs.tolist() == alone.pairs.tolist()
    assert shared.record == alone.record


class Deadly(Files):
    """A file that ends the process that reads it."""

    def read(self, index: int) -> bytes:
        if index == 3 and current_process().name != "MainProcess":
            os._exit(1)
        return super().read(index)


@pytest.mark.slow
def test_a_process_that_dies_is_reported_with_where_it_was(tmp_path: Path) -> None:
    base = scenes(6, 1, 32)
    with pytest.raises(WorkerDied):
        run(tmp_path, Deadly(base.files, base.names), within=True, block=2, workers=2)


@pytest.mark.slow
def test_ranks_share_the_work_and_all_get_the_whole(tmp_path: Path) -> None:
    planted = plant(scenes(5, 1, 48), scenes(3, 2, 48))
    alone = run(tmp_path, planted.train, tests={"test": planted.test}, within=True, block=5)
    outcomes: dict[int, DedupResult] = {}

    def one(rank: int) -> None:
        job = DedupJob(
            train=planted.train,
            tests={"test": planted.test},
            out=tmp_path / "shared",
            within=True,
            block=5,
            rank=rank,
            world=3,
        )
        outcomes[rank] = deduplicate(job)

    threads = [Thread(target=one, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(outcomes) == {0, 1, 2}
    for outcome in outcomes.values():
        assert outcome.pairs.tolist() == alone.pairs.tolist()
        assert outcome.record == alone.record
    assert DedupRecord.load(tmp_path / "shared" / "dedup.json") == alone.record


@pytest.mark.slow
def test_who_is_train_and_who_is_test_does_not_matter(tmp_path: Path) -> None:
    planted = plant(scenes(5, 1), scenes(3, 2))
    there = run(tmp_path, planted.train, tests={"test": planted.test})
    back = run(tmp_path, planted.test, tests={"test": planted.train}, out="back")
    assert {(train, test) for test, train in found(back)} == found(there)
    assert {(train, test): kind for (test, train), kind in by_kind(back).items()} == by_kind(there)


def test_within_a_set_the_first_of_each_group_stays(tmp_path: Path) -> None:
    base = scenes(6, 1)
    picture = base.open_image(2).rgb()
    copies = [encoded(picture, "JPEG", 60), encoded(mirrored(picture)), encoded(picture)]
    train = Files([*base.files, *copies], [*base.names, "jpeg", "mirrored", "exact"])
    outcome = run(tmp_path, train, within=True, block=4)
    assert outcome.selection.indices.tolist() == [6, 7, 8]
    (row,) = outcome.record.rows()
    assert row[1] == "itself"
    assert outcome.record.checked[0].kinds == {"exact": 1, "near": 1, "flipped": 1, "embedding": 0}


def test_unreadable_pictures_are_named_counted_and_never_alike(tmp_path: Path) -> None:
    good = scenes(3, 1)
    train = Files([good.files[0], b"", b"<html>", good.files[1][:300]], ["a.png", "empty.png", "page.jpg", "cut.png"])
    test = Files([*good.files, b"", b"<html>"], ["0", "1", "2", "none", "text"])
    outcome = run(tmp_path, train, tests={"test": test})
    assert found(outcome) == {(0, 0)}
    record = DedupRecord.load(tmp_path / "out" / "dedup.json")
    assert (record.unreadable, record.checked[0].unreadable) == (3, 2)
    assert [reason.split(":")[0] for reason in record.bad["train"]] == ["empty.png", "page.jpg", "cut.png"]
    write_page(tmp_path / "page.html", outcome.record, outcome.pairs, train, {"test": test})
    assert "cut.png" in (tmp_path / "page.html").read_text("utf-8")


def test_blank_and_tiny_pictures_are_compared_exactly_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blank = [encoded(Image.new("RGB", (64, 64), (shade, shade, shade))) for shade in (0, 1, 128, 255)]
    tiny = [encoded(Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8))) for _ in range(3)]
    faint = [encoded(Image.fromarray(rng.integers(100, 103, (64, 64), np.uint8))) for _ in range(3)]
    train = Files([*blank, *tiny, *faint], [f"{i}" for i in range(10)])
    outcome = run(tmp_path, train, tests={"test": train})
    assert by_kind(outcome) == {(i, i): "exact" for i in range(10)}
    big = Files([encoded(train.open_image(i).rgb().resize((128, 128))) for i in range(10)], train.names)
    assert not len(run(tmp_path, train, tests={"test": big}, out="big").pairs)


def test_the_same_shape_in_another_colour_is_another_picture(tmp_path: Path) -> None:
    mask = np.asarray(scenes(1, 1).open_image(0).rgb().convert("L"), np.float64)[..., None] / 255

    def tinted(one: list[int], other: list[int]) -> bytes:
        return encoded(Image.fromarray((mask * one + (1 - mask) * other).astype(np.uint8)))

    red, blue, inverse = tinted([255, 0, 0], [0, 60, 0]), tinted([0, 90, 255], [10, 40, 0]), tinted([0] * 3, [255] * 3)
    outcome = run(tmp_path, Files([red], ["red"]), tests={"test": Files([blue, inverse], ["blue", "inverse"])})
    assert not len(outcome.pairs)


def test_many_equal_pictures_make_few_pairs_but_all_are_counted(tmp_path: Path) -> None:
    one, other = scenes(2, 1).files
    near = COPIES["jpeg 50"](scenes(2, 1).open_image(1).rgb(), np.random.default_rng(0))
    train = Files([one] * 30 + [near] * 20, [f"{i}" for i in range(50)])
    test = Files([one] * 25 + [other] * 15, [f"{i}" for i in range(40)])
    outcome = run(tmp_path, train, tests={"test": test})
    assert len(outcome.pairs) == (30 + 25 - 1) + (20 + 15 - 1)
    assert outcome.selection.indices.tolist() == list(range(50))
    assert outcome.record.checked[0].kinds == {"exact": 25, "near": 15, "flipped": 0, "embedding": 0}


def test_prints_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def watch(source: ImageDataset, start: int, stop: int) -> Fingerprints:
        asked.append(stop - start)
        return compute_fingerprints(source, start, stop)

    monkeypatch.setattr(module.fp, "compute_fingerprints", watch)
    train, test, third = scenes(9, 1), scenes(5, 2), scenes(7, 3)
    first = run(tmp_path, train, tests={"test": test})
    assert asked == [5, 9]
    assert run(tmp_path, train, tests={"test": test}).record == first.record
    assert asked == [5, 9]
    run(tmp_path, train, tests={"third": third})
    assert asked == [5, 9, 7]


def test_other_pictures_under_the_same_names_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 255, (5, 40, 40, 3), np.uint8)
    train, changed = ArrayDataset(pictures), ArrayDataset(rng.integers(0, 255, (5, 40, 40, 3), np.uint8))
    assert len(run(tmp_path, train, tests={"test": ArrayDataset(pictures, called="test")}).pairs) == 5
    assert not len(run(tmp_path, changed, tests={"test": ArrayDataset(pictures, called="test")}, out="other").pairs)


def test_a_torn_file_in_the_cache_is_named(tmp_path: Path) -> None:
    train = scenes(3, 1)
    run(tmp_path, train, tests={"test": train})
    (block,) = (tmp_path / "cache").rglob("*.npz")
    block.write_bytes(block.read_bytes()[:500])
    with pytest.raises(DataError, match=r"000000\.npz"):
        run(tmp_path, train, tests={"test": train}, out="other")


def test_embeddings_find_what_the_caller_calls_alike(tmp_path: Path) -> None:
    def colour(pictures: list[Image.Image]) -> NDArray[np.float32]:
        return np.array([np.asarray(p.resize((1, 1)))[0, 0] for p in pictures], np.float32) - 100

    reds = [encoded(Image.new("RGB", (40, 40), (200 + i, 10, 10))) for i in range(3)]
    blue = encoded(Image.new("RGB", (40, 40), (10, 10, 200)))
    train = Files([reds[0], b"", blue], ["red", "bad", "blue"])
    test = Files([reds[1], reds[2]], ["a", "b"])
    method = MatchRule(cosine=0.999, embedding="mean colour")
    outcomes = [
        run(tmp_path, train, tests={"test": test}, method=method, embed=colour, within=True, block=b, out=f"out{b}")
        for b in (1, 2, 100)
    ]
    assert by_kind(outcomes[0]) == {(0, 0): "embedding", (0, 1): "embedding"}
    assert all(outcome.pairs.tolist() == outcomes[0].pairs.tolist() for outcome in outcomes)
    assert outcomes[0].record.method.embedding == "mean colour"
    with pytest.raises(DataError):
        run(
            tmp_path, train, tests={"test": test}, method=method, embed=lambda p: np.zeros((1, 2)), out="wrong", block=5
        )
    with pytest.raises(ConfigError, match="name"):
        run(tmp_path, train, tests={"test": test}, embed=colour)


def test_names_with_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    base = scenes(2, 1)
    train = Files(base.files, ["<b>a</b>.png", 'x" onerror="y.png'])
    job = DedupJob(
        train=train, tests={"<i>test</i>": train}, called="<u>", out=tmp_path, cache=tmp_path / "cache", within=True
    )
    result = deduplicate(job)
    write_page(tmp_path / "pairs.html", result.record, result.pairs, train, job.tests, shown=1)
    text = (tmp_path / "pairs.html").read_text("utf-8")
    assert "<b>a</b>.png" not in text
    assert "&lt;b&gt;a&lt;/b&gt;.png" in text
    assert "<i>test" not in text
    assert "<u>" not in text
    assert "1 more in pairs.csv." in text


def test_every_pair_is_in_the_spreadsheet(tmp_path: Path) -> None:
    train = Files(scenes(2, 1).files, ['a,"b".png', "line\nbreak.png"])
    run(tmp_path, train, tests={"test": train})
    with open(tmp_path / "out" / "pairs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[1:] == [["test", "exact", "0.0000", str(i), n, str(i), n] for i, n in enumerate(train.names)]


def test_the_tables_count_like_bit(tmp_path: Path) -> None:
    a, b = scenes(4, 1), scenes(4, 2)
    both = Files(a.files[:3] + b.files[:1], ["0", "1", "2", "3"])
    records = [
        run(tmp_path, train, tests={"a": a, "b": b}, called=called, out=called).record
        for train, called in ((both, "both"), (b, "only b"))
    ]
    assert [[one.duplicates for one in record.checked] for record in records] == [[3, 1], [0, 4]]
    assert records[0].rows()[0] == ("both", "a", "4", "3", "75.00%", "3", "0", "0", "-", "3", "0")


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    train = scenes(1, 1)
    with pytest.raises(ConfigError, match="nothing"):
        run(tmp_path, train)
    with pytest.raises(ConfigError, match="rank=2"):
        run(tmp_path, train, within=True, rank=2, world=2)
    with pytest.raises(DataError, match="no images"):
        run(tmp_path, Files([], []), within=True)
    with pytest.raises(ConfigError, match="bits=40"):
        MatchRule(bits=40)
    with pytest.raises(ConfigError):
        MatchRule(exact=False, near=False)
    (tmp_path / "dedup.json").write_text("{}")
    with pytest.raises(DataError, match=r"dedup\.json"):
        DedupRecord.load(tmp_path / "dedup.json")


def test_a_set_with_nothing_in_it_has_no_duplicates(tmp_path: Path) -> None:
    outcome = run(tmp_path, scenes(2, 1), tests={"empty": Files([], [])})
    assert outcome.record.checked[0].images == 0
    assert not len(outcome.pairs)
