"""What is said of a collection, against images whose every property is known; and which of them a sheet shows."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.core.errors import BadImage, WorkerDied
from vitrail.data.collection import Collection, open_collection, unify_classes
from vitrail.data.dataset import ArrayDataset, ImageDataset, Labels, SubsetDataset
from vitrail.data.datasets.builtin_sets import ShapesDataset
from vitrail.data.datasets.scenes import SceneDataset
from vitrail.data.tools import overview


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, three formats, five files that are not images in different ways."""
    for name, size, mode in (
        ("a/1.jpg", (30, 20), "RGB"),
        ("a/2.jpg", (50, 40), "L"),
        ("a/3.png", (10, 10), "P"),
        ("b/1.webp", (100, 80), "RGB"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.effect_noise(size, 60).convert(mode).save(tmp_path / name)
    (tmp_path / "b/empty.jpg").touch()
    (tmp_path / "b/text.jpg").write_text("no image at all")
    Image.effect_noise((20, 30), 60).convert("RGB").save(tmp_path / "b/cut.jpg", quality=95)
    whole = (tmp_path / "b/cut.jpg").read_bytes()
    (tmp_path / "b/cut.jpg").write_bytes(whole[: len(whole) * 3 // 4])
    (tmp_path / "b/gone.png").symlink_to("nowhere")
    return tmp_path


def one(source: ImageDataset, name: str = "x") -> Collection:
    return Collection(name=name, kind="arrays", path=None, splits={"train": source})


def test_every_number(photos: Path) -> None:
    found = overview.summarise(open_collection(photos))["train"]
    assert (found.images, found.classes, found.counts.tolist()) == (8, ("a", "b"), [3, 5])
    assert (found.looked, found.decoded, found.labelled, found.labels, found.multiple) == (8, False, 8, 8, False)
    assert found.formats == {"JPEG RGB": 2, "JPEG L": 1, "PNG P": 1, "WEBP RGB": 1}
    assert found.median == (30, 30)
    assert found.extreme(np.argmin) == (10, 10)
    assert found.extreme(np.argmax) == (80, 100)
    assert {name for name, _ in found.unreadable} == {"b/empty.jpg", "b/text.jpg", "b/gone.png"}
    assert dict(found.unreadable)["b/gone.png"] == "No such file or directory"
    assert found.all_bytes == sum(
        (photos / n).stat().st_size for n in ("a/1.jpg", "a/2.jpg", "a/3.png", "b/1.webp", "b/cut.jpg")
    )


def test_check_decodes(photos: Path) -> None:
    found = overview.summarise(open_collection(photos), check=True)["train"]
    assert found.decoded
    assert {name for name, _ in found.unreadable} == {"b/empty.jpg", "b/text.jpg", "b/gone.png", "b/cut.jpg"}


def test_masks_are_counted_and_checked(tmp_path: Path) -> None:
    """One of another size and one with a class that has no name are found by decoding."""
    for i in range(4):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.effect_noise((8, 6), 60).save(tmp_path / f"images/{i}.jpg")
        Image.new("L", (8 if i else 9, 6), i % 3).save(tmp_path / f"masks/{i}.png")
    (tmp_path / "classes.txt").write_text("wall\ndoor\n")
    found = overview.summarise(open_collection(tmp_path))["train"]
    assert (found.masks, found.unreadable) == (4, ())
    found = overview.summarise(open_collection(tmp_path), check=True)["train"]
    assert {name for name, _ in found.unreadable} == {"images/0.jpg", "images/2.jpg"}


@pytest.mark.parametrize("name", ["scenes", "shapes@test"])
def test_generated_images_are_not_drawn_for_their_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the segments of some are looked at."""

    def refuse(*_: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(overview, "GENERATED", 4)
    for dataset in (SceneDataset, ShapesDataset):
        monkeypatch.setattr(dataset, "read", refuse)
    for found in overview.summarise(open_collection(name)).values():
        assert (found.looked, found.unreadable) == (min(found.images, 1000), ())
        side = 128 if name == "scenes" else 64
        assert (found.median, found.extreme(np.argmax)) == ((side, side), (side, side))
        assert found.all_bytes == found.images * side * side * 3
        assert (found.segments is None) == (name != "scenes")
        assert found.segments is None or len(found.segments.per_image) == 4
    with pytest.raises(AssertionError, match="drawn"):
        overview.summarise(open_collection(name), check=True, workers=1)


def test_what_is_said_of_generated_images_is_what_drawing_them_shows() -> None:
    for source in (SceneDataset(3, size=40), ShapesDataset(3, size=24), SubsetDataset(SceneDataset(9), [1, 5])):
        known = list(overview.inspect_samples(source, range(len(source))))
        assert known == [overview.inspect_sample(source, at, decode=False) for at in range(len(source))]


def test_strict_stops_at_the_first(photos: Path) -> None:
    with pytest.raises(BadImage, match=r"^b/cut.jpg: .*"):
        overview.summarise(open_collection(photos), check=True, strict=True)
    with pytest.raises(BadImage, match=r"^b/empty.jpg: .*empty"):
        overview.summarise(open_collection(photos), strict=True)


def test_large_sets_are_sampled_the_same_way_each_time() -> None:
    source = ArrayDataset(np.zeros((5000, 3, 4), np.uint8))
    first, again = (overview.summarise(one(source), sample=100)["train"] for _ in range(2))
    assert first.looked == 100
    assert first.all_bytes == 5000 * 12
    assert first.sizes.tolist() == again.sizes.tolist()
    chosen = overview.choose_samples(5000, 100)
    assert len(set(chosen)) == 100
    assert max(chosen) > 4500  # from all over


def test_several_labels() -> None:
    source = ArrayDataset(np.zeros((3, 2, 2), np.uint8), Labels.several([[0, 1], [], [1]]), ("a", "b"))
    found = overview.summarise(one(source))["train"]
    assert (found.labelled, found.labels, found.multiple, found.counts.tolist()) == (2, 3, True, [1, 2])


@pytest.mark.slow
def test_processes_see_what_one_sees(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FEW", 1)
    monkeypatch.setattr(overview, "CHUNK", 3)
    source = open_collection(photos).split("train")
    alone = list(overview.inspect_samples(source, range(len(source)), decode=True, workers=1))
    heard: list[int] = []
    together = list(overview.inspect_samples(source, range(len(source)), decode=True, workers=2, progress=heard.append))
    assert together == alone
    assert heard == [3, 3, 2]


class Deadly(ArrayDataset):
    """Ends the process that reads the fourth sample, as a crashing decoder would."""

    def read(self, index: int) -> np.ndarray:
        import os

        if index == 3:
            os._exit(1)
        return super().read(index)


@pytest.mark.slow
def test_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FEW", 1)
    monkeypatch.setattr(overview, "CHUNK", 2)
    source = Deadly(np.zeros((6, 2, 2), np.uint8), called="deadly")
    with pytest.raises(WorkerDied, match=r"deadly\["):
        list(overview.inspect_samples(source, range(6), decode=True, workers=2))


def test_summary_as_plain_values(photos: Path) -> None:
    import json

    plain = overview.summarise(open_collection(photos))["train"].to_dict()
    assert json.loads(json.dumps(plain))["size"]["largest"] == [80, 100]
    assert plain["classes"] == {"a": 3, "b": 5}


# Sheets.


def coloured(values: list[int], classes: int, several: bool = False) -> ArrayDataset:
    """Each image is as bright as its class number, times ten."""
    pixels = np.broadcast_to((np.array(values) * 10 + 5)[:, None, None, None], (len(values), 4, 4, 3)).astype(np.uint8)
    labels = Labels.several([v] for v in values) if several else Labels(np.array(values))
    return ArrayDataset(pixels, labels, tuple(f"class {k}" for k in range(classes)))


@pytest.mark.parametrize("several", [False, True])
def test_samples_belong_to_their_class(several: bool) -> None:
    source = coloured([i % 7 for i in range(100)], 7, several)
    chosen = overview.pick_samples(source.labels, np.array([2, 5]), 4)
    assert chosen.keys() == {2, 5}
    for k, indices in chosen.items():
        assert len(set(indices.tolist())) == 4
        assert all(source.labels[int(i)] == (k,) for i in indices)


def test_sheet_shows_classes_that_are_there_and_counts_the_rest() -> None:
    few = overview.make_sheet(one(coloured([0, 0, 2, 2], 4)), "train")
    many = overview.make_sheet(one(coloured([i % 25 for i in range(50)], 25)), "train")
    assert few.size[1] < many.size[1]
    huge = ArrayDataset(np.zeros((3000, 2, 2), np.uint8), Labels(np.arange(3000) // 3), tuple(map(str, range(1000))))
    agreed, _ = unify_classes("x", {"train": huge})
    assert overview.make_sheet(one(agreed["train"]), "train").size[1] < 3000


def test_sheet_of_what_has_no_labels_or_cannot_be_read(photos: Path) -> None:
    for text in (f"flat:{photos}", str(photos)):
        collection = open_collection(text)
        image = overview.make_sheet(collection, "train")
        reddish = np.asarray(image).astype(int)
        assert (reddish[..., 0] - reddish[..., 1] > 60).sum() > 300  # the cracks of four broken panes


def test_pixels_for_a_tile_are_not_many(tmp_path: Path) -> None:
    Image.effect_noise((900, 600), 60).save(tmp_path / "1.jpg")
    Image.effect_noise((900, 600), 60).save(tmp_path / "2.png")
    source = open_collection(tmp_path).split("train")
    for i in range(2):
        pixels = overview.load_tile(source, i)
        assert pixels is not None
        assert overview.TILE_SIDE <= min(pixels.shape[:2]) <= 2 * overview.TILE_SIDE
        assert pixels.shape[1] / pixels.shape[0] == pytest.approx(1.5, abs=0.02)


def test_names_for_people() -> None:
    assert overview.printable_name("caf\udce9") == "caf�"
    assert Collection(name="a/b", kind="", path=Path("a/b"), splits={}).title == "b"
    assert Collection(name="digits", kind="", path=None, splits={}).title == "digits"
