"""Sets of image files: right images, right labels, right splits, from archives and from what they unpack to."""

import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.datasets import writers
from tests.data.datasets.writers import jpeg, put, shade
from vitrail.core.errors import BadImage, BadLabels, DataError
from vitrail.data.dataset import ImageDataset, Labels
from vitrail.data.datasets import natural_sets, open_by_name, structured_sets
from vitrail.data.datasets.file_formats import ZipDataset, ZipTree


def grey(source: ImageDataset, index: int) -> int:
    """The shade of an image; a JPEG is off by one at most."""
    pixels = np.asarray(source.open_image(index).rgb())
    assert pixels.ndim == 3
    assert pixels.std() < 1
    return round(float(pixels.mean()))


def labels(source: ImageDataset) -> list[int]:
    return source.labels.values.tolist()


def names(source: ImageDataset) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_pets_follow_the_lists(tmp_path: Path) -> None:
    writers.pets(tmp_path)
    splits = natural_sets.read_pets(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 30, "test": 6}
    assert splits["test"].classes == ("Abyssinian", "american bulldog", "Birman")
    assert labels(splits["test"]) == [0, 1, 2, 0, 1, 2]
    assert splits["train"].name(4) == "american_bulldog_4.jpg"
    assert abs(grey(splits["train"], 4) - shade(4)) <= 1
    assert not list(tmp_path.glob(".vitrail-*")), "nothing is left over from unpacking"


def test_a_picture_that_the_list_names_but_is_not_there_is_named(tmp_path: Path) -> None:
    writers.pets(tmp_path)
    source = natural_sets.read_pets(tmp_path)["train"]
    (tmp_path / "images" / "Birman_2.jpg").unlink()
    with pytest.raises(BadImage):
        source.open_image(2)


def test_pets_lists_with_a_gap_in_the_classes_are_refused(tmp_path: Path) -> None:
    writers.pets(tmp_path)
    natural_sets.read_pets(tmp_path)
    for name in ("trainval.txt", "test.txt"):
        path = tmp_path / "annotations" / name
        path.write_text("\n".join(line for line in path.read_text().splitlines() if " 2 " not in line))
    with pytest.raises(BadLabels):
        natural_sets.read_pets(tmp_path)


@pytest.mark.slow
def test_flowers_follow_the_mat_files(tmp_path: Path) -> None:
    writers.flowers102(tmp_path)
    splits = natural_sets.read_flowers102(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 20, "val": 10, "test": 10}
    assert names(splits["val"])[:2] == ["image_00002.jpg", "image_00004.jpg"]
    assert labels(splits["val"])[:2] == [6, 12]
    assert splits["val"].classes[6] == "moon orchid"
    assert abs(grey(splits["val"], 1) - shade(4)) <= 1


def test_textures_are_the_first_fold(tmp_path: Path) -> None:
    writers.dtd(tmp_path)
    splits = natural_sets.read_dtd(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 21, "val": 12, "test": 9}
    assert splits["val"].classes == ("banded", "blotchy", "braided")
    assert splits["val"].name(1) == "blotchy/blotchy_0007.jpg"
    assert labels(splits["val"])[:4] == [0, 1, 2, 0]


def test_caltech_draws_thirty_a_class_the_same_every_time(tmp_path: Path) -> None:
    writers.caltech101(tmp_path)
    splits = natural_sets.read_caltech101(tmp_path)
    again = natural_sets.read_caltech101(tmp_path)
    assert splits["train"].classes == ("BACKGROUND_Google", "Faces", "accordion")
    assert np.bincount(splits["train"].labels.values).tolist() == [30, 30, 30]
    assert np.bincount(splits["test"].labels.values).tolist() == [3, 4, 5]
    assert names(splits["train"]) == names(again["train"])
    assert not set(names(splits["train"])) & set(names(splits["test"]))
    assert names(splits["train"])[:3] != [f"BACKGROUND_Google/image_{i:04d}.jpg" for i in (1, 2, 3)] or (
        names(splits["test"])[0] != "BACKGROUND_Google/image_0031.jpg"
    ), "not just the first thirty"


def test_caltech_with_too_few_pictures_of_a_class_is_refused(tmp_path: Path) -> None:
    for i in range(30):
        put(tmp_path / "101_ObjectCategories" / "ant" / f"image_{i:04d}.jpg", b"")
    with pytest.raises(DataError):
        natural_sets.read_caltech101(tmp_path)


def test_sun_is_drawn_where_the_lists_are_missing(tmp_path: Path) -> None:
    writers.sun397(tmp_path)
    splits = natural_sets.read_sun397(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 35, "val": 4, "test": 9}
    assert splits["train"].classes == ("abbey", "church/indoor", "church/outdoor")
    every = [name for source in splits.values() for name in names(source)]
    assert len(set(every)) == 48
    assert natural_sets.SUN_SKIPPED not in every


def test_sun_follows_the_lists_where_they_are(tmp_path: Path) -> None:
    writers.sun397(tmp_path)
    every = [f"{name}/sun_{chr(97 + i)}.jpg" for i in range(16) for name in writers.SUN_CLASSES]
    for file, chosen in (("tr", every[:40]), ("va", every[40:44]), ("te", every[44:])):
        put(tmp_path / f"sun397_tfds_{file}.txt", "\n".join(chosen) + "\n")
    splits = natural_sets.read_sun397(tmp_path)
    assert names(splits["val"]) == [name[1:] for name in every[40:44]]
    assert labels(splits["val"]) == [1, 2, 0, 1]
    put(tmp_path / "sun397_tfds_te.txt", "/a/abbey/sun_zz.jpg\n")
    with pytest.raises(DataError, match=r"lists a/abbey/sun_zz.jpg"):
        natural_sets.read_sun397(tmp_path)


def test_the_sizes_of_sun_come_out_as_published() -> None:
    splits = natural_sets.draw_sun_splits([str(i) for i in range(108753)])
    assert [len(names) for names in splits.values()] == [76128, 10875, 21750]


def test_a_zip_file_and_what_it_unpacks_to_are_the_same(tmp_path: Path) -> None:
    writers.eurosat(tmp_path)
    packed = natural_sets.read_eurosat(tmp_path)["train"]
    open_by_name.extract(tmp_path / "EuroSAT.zip", tmp_path / "loose")
    loose = natural_sets.read_eurosat(tmp_path / "loose")["train"]
    assert packed.classes == loose.classes == ("AnnualCrop", "Forest")
    assert labels(packed) == labels(loose)
    assert [packed.read(i) for i in range(30)] == [loose.read(i) for i in range(30)]
    assert [name.removeprefix("2750/") for name in names(packed)] == names(loose)


def test_resisc_may_have_one_folder_more_around_it_in_a_zip(tmp_path: Path) -> None:
    members = {f"data/NWPU-RESISC45/{name}/{name}_1.jpg": jpeg(i) for i, name in enumerate(("beach", "cloud"))}
    writers.zipped(tmp_path / "NWPU-RESISC45.zip", members)
    source = natural_sets.read_resisc45(tmp_path)["train"]
    assert (source.classes, labels(source)) == (("beach", "cloud"), [0, 1])


def test_a_damaged_member_of_a_zip_file_is_named(tmp_path: Path) -> None:
    path = writers.zipped(tmp_path / "EuroSAT.zip", {f"2750/Forest/Forest_{i}.jpg": jpeg(i) for i in (1, 2)})
    source = natural_sets.read_eurosat(tmp_path)["train"]
    data = bytearray(path.read_bytes())
    data[data.index(b"Forest_1.jpg") + 60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BadImage):
        source.open_image(0)
    assert abs(grey(source, 1) - shade(2)) <= 1
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as opened:
        opened.writestr("2750/Forest/Forest_1.jpg", jpeg(1))
    stored = natural_sets.read_eurosat(tmp_path)["train"]
    whole = path.read_bytes()
    path.write_bytes(whole.replace(jpeg(1)[-9:], bytes(9)))
    with pytest.raises(BadImage):
        stored.open_image(0)
    path.write_bytes(data[:100])
    with pytest.raises(DataError):
        natural_sets.read_eurosat(tmp_path)


def test_a_member_that_would_unpack_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    path = writers.zipped(tmp_path / "a.zip", {"a.jpg": bytes(10_000_000)})
    source = ZipTree(path).select(["a.jpg"], Labels.none(1), ())
    assert isinstance(source, ZipDataset)
    source.table[0, 2] = 100
    with pytest.raises(BadImage):
        source.read(0)


def test_clevr_counts_objects_and_bins_the_nearest(tmp_path: Path) -> None:
    writers.clevr(tmp_path)
    counted, measured = structured_sets.read_clevr_count(tmp_path), structured_sets.read_clevr_distance(tmp_path)
    assert {split: len(source) for split, source in counted.items()} == {"train": 24, "val": 5}
    assert labels(counted["train"])[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert counted["train"].classes[0] == "3"
    assert labels(measured["train"])[:8] == [0, 0, 1, 2, 3, 4, 4, 5]
    assert grey(measured["val"], 3) == shade(3)


def test_a_damaged_scene_file_is_named(tmp_path: Path) -> None:
    put(tmp_path / "CLEVR_v1.0" / "scenes" / "CLEVR_train_scenes.json", '{"scenes": [{"objects": []}]}')
    with pytest.raises(DataError):
        structured_sets.read_clevr_count(tmp_path)


def test_kitti_measures_the_nearest_vehicle(tmp_path: Path) -> None:
    writers.kitti(tmp_path)
    splits = structured_sets.read_kitti_distance(tmp_path)
    assert sum(len(source) for source in splits.values()) == 60
    for source in splits.values():
        for i, label in enumerate(labels(source)):
            metres = int(Path(source.name(i)).stem)
            assert label == (3 if metres % 5 == 0 else 0 if metres <= 8 else 1 if metres <= 20 else 2)
            assert grey(source, i) == shade(metres)


def test_kitti_never_splits_a_drive(tmp_path: Path) -> None:
    writers.kitti(tmp_path)
    kit, folder = structured_sets.find_kitti(tmp_path, "mapping", "devkit_object.zip")
    drives = structured_sets.read_drives(kit, folder)
    split_of = structured_sets.split_drives(drives)
    assert len(set(zip(drives, split_of, strict=True))) == len(set(drives)) == 20
    assert [len({d for d, s in zip(drives, split_of, strict=True) if s == split}) for split in ("val", "test")] == [
        2,
        2,
    ]


def test_kitti_draws_the_drives_as_its_publication_did() -> None:
    """The stream of numpy's older generator is fixed; these are its first draws with seed 123."""
    drives = [f"d{i:02d}" for i in range(20)]
    split_of = dict(zip(drives, structured_sets.split_drives(drives), strict=True))
    state = np.random.RandomState(123)
    test = state.permutation(20)[:2]
    assert sorted(drive for drive, split in split_of.items() if split == "test") == sorted(drives[i] for i in test)


def test_kitti_unpacked_as_torchvision_does(tmp_path: Path) -> None:
    writers.kitti(tmp_path)
    packed = structured_sets.read_kitti_distance(tmp_path)
    raw = tmp_path / "raw"
    for name in ("data_object_image_2.zip", "data_object_label_2.zip", "devkit_object.zip"):
        open_by_name.extract(tmp_path / name, raw)
        (tmp_path / name).unlink()
    loose = structured_sets.read_kitti_distance(tmp_path)
    assert {split: labels(source) for split, source in packed.items()} == {s: labels(x) for s, x in loose.items()}


def test_a_bad_line_of_kitti_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        structured_sets.distance_class("Car 0.00\n", "000001.txt")


def test_retinopathy_follows_the_tables(tmp_path: Path) -> None:
    writers.retinopathy(tmp_path)
    splits = natural_sets.read_retinopathy(tmp_path)
    assert {split: len(source) for split, source in splits.items()} == {"train": 18, "val": 6, "test": 12}
    assert names(splits["val"])[:3] == ["0_right.jpeg", "3_right.jpeg", "6_right.jpeg"]
    assert labels(splits["val"])[:3] == [0, 3, 1]
    assert abs(grey(splits["test"], 0) - shade(101)) <= 1


def test_eyes_are_brought_to_one_size_and_brightness(tmp_path: Path) -> None:
    """A bright disc of radius 150 on black: radius 300 after scaling, cropped to 270, grey where it is even."""
    y, x = np.ogrid[:400, :500]
    disc = ((y - 200) ** 2 + (x - 250) ** 2 < 150**2)[..., None] * np.array([180, 90, 30])
    out = natural_sets.normalise_eye(disc.astype(np.uint8))
    assert out.shape == (540, 540, 3)
    assert (out[0, 0] == 128).all(), "grey in the corners, outside of the circle"
    assert abs(out[270, 270].astype(int) - 128).max() <= 1, (
        "grey in the middle, where nothing differs from its surroundings"
    )
    black = natural_sets.normalise_eye(np.zeros((40, 60, 3), np.uint8))
    assert black.shape == (540, 540, 3)


def test_nothing_leaves_the_folder_when_an_archive_is_unpacked(tmp_path: Path) -> None:
    root = tmp_path / "set"
    writers.tar(root / "SUN397.tar.gz", {"../escaped.jpg": jpeg(0), "SUN397/a/abbey/sun_a.jpg": jpeg(1)})
    with pytest.raises(DataError):
        natural_sets.read_sun397(root)
    assert not (tmp_path / "escaped.jpg").exists()
    assert sorted(path.name for path in root.iterdir()) == ["SUN397.tar.gz"]


def test_an_archive_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    writers.dtd(tmp_path)
    path = tmp_path / "dtd-r1.0.1.tar.gz"
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(DataError):
        natural_sets.read_dtd(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_unpacking_where_nothing_may_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers.dtd(tmp_path)

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError):
        natural_sets.read_dtd(tmp_path)


def test_a_second_process_that_unpacks_is_no_harm(tmp_path: Path) -> None:
    writers.dtd(tmp_path)
    natural_sets.read_dtd(tmp_path)
    shutil.move(tmp_path / "dtd", tmp_path / "elsewhere")
    assert len(natural_sets.read_dtd(tmp_path)["train"]) == 21
