"""Images with masks in folders: every layout, which folders are masks and which are classes, and what is refused."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.collection import Collection, open_collection
from vitrail.data.dataset import ImageDataset
from vitrail.data.decode.image import read_mask
from vitrail.data.readers import masks
from vitrail.data.readers.masks import MaskedFileDataset
from vitrail.data.splits import dev_split, share_split

NAMES = ("wall", "door", "window")


def indices(seed: int, highest: int = 2) -> NDArray[np.uint8]:
    values = np.random.default_rng(seed).integers(0, highest + 1, (6, 8), dtype=np.uint8)
    values[0, 0] = highest
    return values


def write_image(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)).save(path)


def write_mask(path: Path, seed: int = 0, highest: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(indices(seed, highest)).save(path)


def write_set(root: Path, *layout: tuple[str, str], count: int = 3) -> Path:
    """`count` images and masks for each pair of patterns with a place for the number."""
    for image, mask in layout:
        for i in range(count):
            write_image(root / image.format(i), i)
            write_mask(root / mask.format(i), i)
    return root


def masks_of(source: ImageDataset) -> list[NDArray[np.uint8]]:
    return [read_mask(source.mask(i)) for i in range(len(source))]


LAYOUTS = {
    "in splits": [("train/images/{}.jpg", "train/masks/{}.png"), ("val/images/{}.jpg", "val/masks/{}.png")],
    "around splits": [("images/train/{}.jpg", "masks/train/{}.png"), ("images/val/{}.jpg", "masks/val/{}.png")],
    "ADE20k": [
        ("images/training/{}.jpg", "annotations/training/{}.png"),
        ("images/validation/{}.jpg", "annotations/validation/{}.png"),
    ],
    "other words": [("train/img/{}.webp", "train/Labels/{}.png"), ("val/img/{}.webp", "val/Labels/{}.png")],
    "nested": [
        ("images/train/a/{}.jpg", "segmentation/train/a/{}.png"),
        ("images/val/{}.jpg", "segmentation/val/{}.png"),
    ],
    "marked": [("train/images/{}.jpg", "train/masks/{}_mask.png"), ("val/images/{}.jpg", "val/masks/{}.mask.png")],
    "beside": [("train/{}.jpg", "train/{}.png"), ("val/{}.jpg", "val/{}.png")],
    "next to and marked": [("train/{}.png", "train/{}_mask.png"), ("val/{}.jpg", "val/{}.mask.png")],
}
FLAT_LAYOUTS = {
    "folders": [("images/{}.jpg", "masks/{}.png")],
    "beside": [("{}.jpg", "{}.png")],
    "marked": [("{}.png", "{}_mask.png")],
}


@pytest.mark.parametrize("prefix", ["", "masks:"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_with_splits(tmp_path: Path, layout: str, prefix: str) -> None:
    write_set(tmp_path, *LAYOUTS[layout])
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    found = open_collection(f"{prefix}{tmp_path}")
    assert list(found.splits) == ["train", "val"]
    assert (found.pixel_classes, found.classes, found.notes) == (NAMES, (), ())
    for source in found.splits.values():
        assert len(source) == 3
        assert source.pixel_classes == NAMES
        assert all(np.array_equal(mask, indices(i)) for i, mask in enumerate(masks_of(source)))
        assert [source.open_image(i).size for i in range(3)] == [(6, 8)] * 3
    found.need_masks()
    with pytest.raises(BadLabels, match="segmentation"):
        found.need_labels()


@pytest.mark.parametrize("layout", FLAT_LAYOUTS)
def test_layouts_without_splits(tmp_path: Path, layout: str) -> None:
    found = open_collection(write_set(tmp_path, *FLAT_LAYOUTS[layout]))
    assert {split: len(source) for split, source in found.splits.items()} == {"train": 3}
    assert found.pixel_classes == ("class 0", "class 1", "class 2")  # as the masks have them
    assert all(np.array_equal(mask, indices(i)) for i, mask in enumerate(masks_of(found.splits["train"])))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("classes.txt", "wall\ndoor\nwindow\n"),
        ("labels.txt", "wall\ndoor\nwindow"),
        ("classes.json", json.dumps(NAMES)),
        ("classes.txt", "\ufeffwall\r\ndoor\r\nwindow\r\n"),
        ("classes.json", "\ufeff" + json.dumps(NAMES)),
    ],
)
def test_names_of_the_classes(tmp_path: Path, file: str, text: str) -> None:
    write_set(tmp_path, *LAYOUTS["in splits"])
    (tmp_path / file).write_text(text)
    assert open_collection(tmp_path).pixel_classes == NAMES
    assert open_collection(tmp_path / "val").pixel_classes == NAMES  # one split of it


def test_all_splits_have_the_classes_of_the_highest_index(tmp_path: Path) -> None:
    """255 is ignored, and counts for no class."""
    write_set(tmp_path, *LAYOUTS["in splits"])
    write_mask(tmp_path / "val/masks/0.png", highest=4)
    values = indices(0)
    values[3] = 255
    Image.fromarray(values).save(tmp_path / "train/masks/0.png")
    found = open_collection(tmp_path)
    assert {source.pixel_classes for source in found.splits.values()} == {tuple(f"class {i}" for i in range(5))}


def test_indices_of_many_masks_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one of them changes."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(masks, "MANY", 3)
    root = write_set(tmp_path / "set", *FLAT_LAYOUTS["folders"])
    assert len(open_collection(root).pixel_classes) == 3
    with monkeypatch.context() as patch:
        patch.setattr(masks, "survey_indices", lambda _paths: pytest.fail("read again"))
        assert len(open_collection(root).pixel_classes) == 3
    write_mask(root / "masks/1.png", highest=9)
    assert len(open_collection(root).pixel_classes) == 10


def test_split_without_masks(tmp_path: Path) -> None:
    """As published sets have for their test images."""
    for layout, image in (("in splits", "test/images/0.jpg"), ("ADE20k", "images/testing/0.jpg")):
        write_set(tmp_path / layout, *LAYOUTS[layout])
        write_image(tmp_path / layout / image)
        found = open_collection(tmp_path / layout)
        assert {split: len(source.pixel_classes) for split, source in found.splits.items()} == {
            "train": 3,
            "val": 3,
            "test": 0,
        }
        assert "test has no masks" in found.notes
        with pytest.raises(DataError):
            found.splits["test"].mask(0)


def test_splits_of_different_layouts(tmp_path: Path) -> None:
    found = open_collection(write_set(tmp_path, LAYOUTS["in splits"][0], LAYOUTS["next to and marked"][1]))
    assert {split: (len(source), len(source.pixel_classes)) for split, source in found.splits.items()} == {
        "train": (3, 3),
        "val": (3, 3),
    }
    (tmp_path / "test/masks").mkdir(parents=True)
    write_image(tmp_path / "test/images/0.jpg")
    with pytest.raises(DataError, match="test holds"):
        open_collection(tmp_path)


def test_kinds_of_png(tmp_path: Path) -> None:
    """Class indices as they are stored: with a palette, in one bit, in sixteen."""
    values = indices(0)
    for i in range(4):
        write_image(tmp_path / f"images/{i}.jpg")
    (tmp_path / "masks").mkdir()
    palette = Image.fromarray(values)
    palette.putpalette([*range(255, 249, -1), *range(90)])
    palette.save(tmp_path / "masks/0.png")
    Image.fromarray(values).save(tmp_path / "masks/1.png")
    Image.fromarray((values > 0).astype(np.uint8) * 255).convert("1").save(tmp_path / "masks/2.png")
    Image.fromarray(values.astype(np.uint16)).save(tmp_path / "masks/3.png")
    found = masks_of(open_collection(tmp_path).splits["train"])
    assert np.array_equal(found[2], values > 0)
    assert all(np.array_equal(found[i], values) for i in (0, 1, 3))


def drop(name: str, root: Path) -> None:
    (root / name).unlink()


def test_what_does_not_pair_is_refused_with_its_name(tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return write_set(tmp_path / name, *FLAT_LAYOUTS["folders"])

    drop("masks/1.png", broken("a missing mask"))
    drop("images/1.jpg", broken("a mask alone"))
    write_mask(broken("two masks") / "masks/1_mask.png")
    write_image(broken("two images") / "images/1.webp")
    write_image(broken("in colour") / "masks/1.png")
    shutil.copy(broken("no PNG") / "images/1.jpg", tmp_path / "no PNG/masks/1.png")
    for name in os.listdir(tmp_path):
        with pytest.raises(DataError) as caught:
            open_collection(tmp_path / name)
        assert "1." in str(caught.value)
        assert f"classes:{tmp_path / name}" in str(caught.value)  # the way out where these are classes
        assert open_collection(f"classes:{tmp_path / name}").classes == ("images", "masks")


def test_damaged_masks_are_left_to_whoever_reads_them(tmp_path: Path) -> None:
    """As damaged images are: the set opens, and its other samples can be used."""
    write_set(tmp_path, *FLAT_LAYOUTS["folders"], count=5)
    whole = (tmp_path / "masks/0.png").read_bytes()
    (tmp_path / "masks/0.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "masks/1.png").write_bytes(b"")
    (tmp_path / "masks/2.png").unlink()
    (tmp_path / "masks/2.png").symlink_to("nowhere")
    if hasattr(os, "mkfifo"):
        (tmp_path / "masks/3.png").unlink()
        os.mkfifo(tmp_path / "masks/3.png")
    source = open_collection(tmp_path).splits["train"]
    assert source.pixel_classes == ("class 0", "class 1", "class 2")
    assert np.array_equal(read_mask(source.mask(4)), indices(4))
    for i in range(3):
        with pytest.raises((BadImage, OSError)):
            read_mask(source.mask(i))


def test_black_and_white_masks(tmp_path: Path) -> None:
    """255 is not a class: refused where nothing says how many classes there are, else noted."""
    for i in range(2):
        write_image(tmp_path / f"images/{i}.jpg")
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(np.where(indices(i) > 1, 255, 0).astype(np.uint8)).save(tmp_path / f"masks/{i}.png")
    with pytest.raises(DataError, match="255"):
        open_collection(tmp_path)
    (tmp_path / "classes.txt").write_text("no\nyes\n")
    assert any("255" in note for note in open_collection(tmp_path).notes)


@pytest.mark.parametrize("value", [0, 255])
def test_masks_of_a_single_value_are_refused_in_a_whole_sentence(tmp_path: Path, value: int) -> None:
    write_image(tmp_path / "images/0.jpg")
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.full((6, 8), value, np.uint8)).save(tmp_path / "masks/0.png")
    with pytest.raises(DataError) as caught:
        open_collection(tmp_path)
    message = str(caught.value)
    assert "store the" in message
    assert "; or" not in message
    assert "0 and 255 only" not in message  # there may be one of them alone


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    write_set(tmp_path, *LAYOUTS["in splits"])
    (tmp_path / "classes.txt").write_bytes("wall\ndoor\nwindow\n".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-8") as caught:
        open_collection(tmp_path)
    assert "Error(" not in str(caught.value)


def test_an_empty_line_among_names_would_shift_the_classes(tmp_path: Path) -> None:
    write_set(tmp_path, *LAYOUTS["in splits"])
    (tmp_path / "classes.txt").write_text("wall\n\ndoor\nwindow\n")
    with pytest.raises(DataError):
        open_collection(tmp_path)
    (tmp_path / "classes.txt").write_text("wall\ndoor\nwindow\n\n")
    assert open_collection(tmp_path).pixel_classes == ("wall", "door", "window")


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path, *LAYOUTS["in splits"])
    (tmp_path / "classes.txt").write_text("wall\nwall\nwindow\n")
    with pytest.raises(DataError, match="wall"):
        open_collection(tmp_path)


def test_one_is_counted_as_one(tmp_path: Path) -> None:
    write_set(tmp_path, *LAYOUTS["in splits"])
    image = tmp_path / "train/images/0.jpg"
    mask = tmp_path / "train/masks/0.png"
    Image.new("RGB", (8, 6)).save(mask)
    with pytest.raises(DataError):
        open_collection(tmp_path)
    mask.unlink()
    assert image.exists()
    with pytest.raises(DataError):
        open_collection(tmp_path)


def test_too_many_classes(tmp_path: Path) -> None:
    write_set(tmp_path, *FLAT_LAYOUTS["folders"])
    (tmp_path / "classes.txt").write_text("\n".join(f"thing {i}" for i in range(256)))
    with pytest.raises(DataError, match="256"):
        open_collection(tmp_path)


def kind_and_classes(found: Collection) -> tuple[bool, tuple[str, ...]]:
    return bool(found.pixel_classes), found.classes


def test_folders_that_are_no_masks(tmp_path: Path) -> None:
    """Class folders and flat folders stay what they are, and folders of boxes are not taken for masks."""
    write_set(tmp_path / "classes", ("cat/{}.jpg", "cat/{}.png"), ("dog/{}.jpg", "dog/{}_mask.png"))
    assert kind_and_classes(open_collection(tmp_path / "classes")) == (False, ("cat", "dog"))
    for name in ("images", "masks", "cats"):
        for i in range(2):
            write_image(tmp_path / f"three/{name}/{i}.jpg")
    assert kind_and_classes(open_collection(tmp_path / "three")) == (False, ("cats", "images", "masks"))
    for i in range(2):
        write_image(tmp_path / f"formats/{i}.jpg")
        write_image(tmp_path / f"formats/{i}.png")  # the same in colour: another format
    assert len(open_collection(tmp_path / "formats").splits["train"]) == 4
    for i in range(2):
        write_image(tmp_path / f"boxes/images/{i}.jpg")
        (tmp_path / "boxes/labels").mkdir(exist_ok=True)
        (tmp_path / f"boxes/labels/{i}.txt").write_text("0 .5 .5 .1 .1")
    boxes = open_collection(tmp_path / "boxes")
    assert (boxes.kind, boxes.pixel_classes, boxes.splits["train"].boxes_only) == ("YOLO", (), True)


def test_masks_for_some_images_of_a_flat_folder(tmp_path: Path) -> None:
    """All files are images then, as before; a note and the explicit reading say what is missing."""
    write_set(tmp_path, *FLAT_LAYOUTS["marked"])
    drop("1_mask.png", tmp_path)
    found = open_collection(tmp_path)
    assert (len(found.splits["train"]), found.pixel_classes) == (5, ())
    assert any(f"masks:{tmp_path}" in note for note in found.notes)
    with pytest.raises(DataError):
        open_collection(f"masks:{tmp_path}")


def test_third_folder_is_asked_about(tmp_path: Path) -> None:
    write_set(tmp_path, *FLAT_LAYOUTS["folders"])
    write_image(tmp_path / "overlays/0.jpg")
    with pytest.raises(DataError, match="masks:"):
        open_collection(tmp_path)
    assert len(open_collection(f"masks:{tmp_path}").splits["train"]) == 3


def test_a_set_without_masks(tmp_path: Path) -> None:
    write_image(tmp_path / "a.jpg")
    with pytest.raises(BadLabels, match=r"masks/a\.png"):
        open_collection(tmp_path).need_masks()
    with pytest.raises(DataError, match="no masks"):
        open_collection(f"masks:{tmp_path}")
    open_collection("shapes").need_masks()


def test_splits_must_agree(tmp_path: Path) -> None:
    from vitrail.data.collection import build_collection

    sources: dict[str, ImageDataset] = {}
    for split, names in (("train", NAMES), ("val", NAMES[:2])):
        sources[split] = MaskedFileDataset(str(tmp_path), ["a.jpg"], ["a.png"])
        sources[split].pixel_classes = names
    with pytest.raises(BadLabels, match="val"):
        build_collection("x", tmp_path, ("images and masks", sources))


def test_parts_and_dev_splits_keep_masks(tmp_path: Path) -> None:
    """Drawn without regard to class, for there are none."""
    write_set(tmp_path, *FLAT_LAYOUTS["folders"], count=20)
    whole = open_collection(tmp_path).splits["train"]
    rest, held = dev_split(whole, 0.2)
    part = share_split(whole, 0.5).apply(whole)
    train, dev = rest.apply(whole), held.apply(whole)
    assert (len(train), len(dev), len(part)) == (16, 4, 10)
    for source in (train, dev, part):
        assert source.pixel_classes == whole.pixel_classes
        for i in range(len(source)):
            number = int(source.name(i).split("/")[1].removesuffix(".jpg"))
            assert np.array_equal(read_mask(source.mask(i)), indices(number))


def test_identity_of_a_set(tmp_path: Path) -> None:
    """The fingerprint is another when masks or their classes change; the digest of the contents is about images."""
    write_set(tmp_path, *FLAT_LAYOUTS["folders"])

    def opened() -> ImageDataset:
        return open_collection(tmp_path).splits["train"]

    first = opened()
    assert pickle.loads(pickle.dumps(first)).fingerprint == first.fingerprint == opened().fingerprint
    plain = open_collection(tmp_path / "images").splits["train"]
    assert plain.content_digest == first.content_digest
    write_mask(tmp_path / "masks/0.png", highest=7)
    second = opened()
    (tmp_path / "classes.txt").write_text("\n".join("abcdefgh"))
    third = opened()
    assert len({first.fingerprint, second.fingerprint, third.fingerprint}) == 3
    assert first.content_digest == second.content_digest
