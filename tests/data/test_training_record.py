"""Which images weights were trained on: they are recognised by their content, under any name and in any place."""

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.data import training_record
from vitrail.data.collection import open_collection
from vitrail.data.dataset import ArrayDataset, ConcatDataset, ImageDataset, Labels, RelabelledDataset, SubsetDataset
from vitrail.data.training_record import (
    KEY,
    find_exposure,
    hash_contents,
    interleave,
    record_training,
    shorten_provenance,
)

NAMES = ("ant", "bee", "cat")
COUNT = 30


def pixels(seed: int = 0, count: int = COUNT) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for at, image in enumerate(pixels()):
        (tmp_path / "photos" / NAMES[at % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / NAMES[at % 3] / f"{at:02}.png")
    return tmp_path / "photos"


def opened(path: Path | str) -> ImageDataset:
    return next(iter(open_collection(str(path)).splits.values()))


def trained(*sources: ImageDataset, **more: Any) -> dict[str, Any]:
    """The provenance of weights that were trained on these, as it comes back from a file."""
    made = [record_training(one, out_of=len(one), selection={}, others={}) for one in sources]
    return json.loads(json.dumps({KEY: made, **more}))


def seen(provenance: dict[str, Any], source: ImageDataset) -> set[str]:
    """The names of the samples that were trained on, where all is recorded."""
    found = find_exposure(provenance, source)
    assert not found.unrecorded
    return {Path(source.name(at)).name for at in np.flatnonzero(found.seen).tolist()}


def test_images_are_recognised_in_a_copy_a_subset_and_under_other_names(photos: Path, tmp_path: Path) -> None:
    whole = opened(photos)
    kept = np.arange(0, COUNT, 2)
    provenance, names = trained(SubsetDataset(whole, kept)), {Path(whole.name(at)).name for at in kept.tolist()}
    assert seen(provenance, whole) == names
    shutil.copytree(photos, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "bee")
    assert seen(provenance, opened(tmp_path / "copy")) == {n for n in names if (photos / "bee" / n).exists() is False}
    (tmp_path / "flat").mkdir()
    for at in range(COUNT):
        shutil.copy(photos / whole.name(at), tmp_path / "flat" / f"renamed-{at}.png")
    assert len(seen(provenance, opened(tmp_path / "flat"))) == len(kept)


def test_images_are_recognised_in_archives_and_lists(photos: Path, tmp_path: Path) -> None:
    whole = opened(photos)
    provenance = trained(SubsetDataset(whole, np.arange(10)))
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for at in range(COUNT):
            for suffix, body in (("png", whole.read(at)), ("cls", b"%d" % (at % 3))):
                member = tarfile.TarInfo(f"{at:03}.{suffix}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(bytes(body)))
    lines = [f"photos/{whole.name(at)},{NAMES[at % 3]}" for at in range(COUNT)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
    for source in (opened(tmp_path / "set.tar"), opened(tmp_path / "list.csv")):
        assert len(seen(provenance, source)) == 10
    np.savez(tmp_path / "set.npz", images=pixels(), labels=np.arange(COUNT) % 3)
    shutil.copy(tmp_path / "set.npz", tmp_path / "other.npz")
    arrays = trained(SubsetDataset(opened(tmp_path / "set.npz"), [1, 2]))
    assert find_exposure(arrays, opened(tmp_path / "other.npz")).count == 2
    # Pixels and files cannot be compared: that is not known, and not "unseen".
    assert find_exposure(provenance, opened(tmp_path / "other.npz")).unrecorded == ("",)
    assert find_exposure(arrays, whole).unrecorded == ("",)


def test_what_is_built_of_sources_keeps_the_content_of_its_samples() -> None:
    one = ArrayDataset(pixels(), Labels(np.arange(COUNT) % 3), NAMES)
    two = RelabelledDataset(one, Labels(np.zeros(COUNT, np.int64)), ("all",))
    hashes = hash_contents(one)
    assert (hash_contents(two) == hashes).all()
    assert (hash_contents(SubsetDataset(two, [3, 1])) == hashes[[3, 1]]).all()
    assert (hash_contents(ConcatDataset([one, one])) == np.concatenate([hashes, hashes])).all()
    assert (interleave([hash_contents(one, rank=rank, world=4) for rank in range(4)]) == hashes).all()


def test_weights_carry_what_those_they_started_from_have_seen(photos: Path) -> None:
    whole = opened(photos)
    before = trained(SubsetDataset(whole, [0, 1]), weights="first.safetensors")
    after = trained(SubsetDataset(whole, [1, 2]), **{"from": before})
    assert find_exposure(after, whole).count == 3
    assert (
        find_exposure(trained(SubsetDataset(whole, [5]), SubsetDataset(whole, [6])), whole).count == 2
    )  # data changed by force
    public = find_exposure({**trained(SubsetDataset(whole, [0])), "from": {"weights": "deit.npz"}}, whole)
    assert (public.count, public.unrecorded) == (1, ("deit.npz",))
    assert find_exposure({"run": "of 0.1.0"}, whole).unrecorded == ("",)


def test_a_large_set_is_recorded_by_its_source_in_a_few_bytes(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_record, "MOST_IMAGES", 20)
    whole, others = opened(photos), {"val": ArrayDataset(pixels(1), called="val")}
    train = SubsetDataset(SubsetDataset(whole, np.arange(4, COUNT)), np.arange(0, 26))
    record = record_training(train, out_of=COUNT, selection={}, others=others)
    provenance = {KEY: [record]}
    assert "hashes" not in record
    assert find_exposure(provenance, whole).seen.tolist() == [False] * 4 + [True] * 26
    shutil.copytree(photos, tmp_path / "copy")
    assert find_exposure(provenance, opened(tmp_path / "copy")).count == 26
    assert find_exposure(provenance, SubsetDataset(whole, [0, 1, 7])).seen.tolist() == [False, False, True]
    val = find_exposure(provenance, others["val"])
    assert (val.count, val.unrecorded) == (0, ())
    shutil.rmtree(tmp_path / "copy" / "bee")  # a part by hand is another source: not known
    assert find_exposure(provenance, opened(tmp_path / "copy")).unrecorded == ("",)


@pytest.mark.slow
def test_a_million_images_take_little_room() -> None:
    class Many(ArrayDataset):
        fingerprint = content_digest = "many"

    many = Many(np.zeros((1_200_000, 1, 1), np.uint8))
    held = np.random.default_rng(0).choice(len(many), 12_000, replace=False)
    train = SubsetDataset(many, np.setdiff1d(np.arange(len(many)), held))
    train.content_digest = "most of them"
    record = record_training(train, out_of=len(many), selection={}, others={})
    assert (record["images"], record["held_out"]) == (1_188_000, 12_000)
    assert len(json.dumps(record)) < 50_000
    assert find_exposure({KEY: [record]}, many).count == 1_188_000


@pytest.mark.parametrize("broken", [{"hashes": "?"}, {"hashes": 3}, {"hashes": "AAA="}, {}, {"source": 1}, 7, None])
def test_a_damaged_record_says_nothing(photos: Path, broken: Any) -> None:
    found = find_exposure({KEY: [broken]}, opened(photos))
    assert (found.count, found.unrecorded) == (0, ("",))
    assert find_exposure({KEY: broken}, opened(photos)).unrecorded == ("",)


def test_what_people_read_is_without_the_hashes(photos: Path) -> None:
    whole = trained(opened(photos), **{"from": trained(opened(photos))})
    short = shorten_provenance(whole)
    for link in (short, short["from"]):
        assert link[KEY][0]["images"] == COUNT
        assert "hashes" not in link[KEY][0]
    assert "hashes" in whole["from"][KEY][0]


def test_an_unreadable_image_is_neither_recorded_nor_seen(photos: Path) -> None:
    (photos / "ant" / "00.png").unlink()
    (photos / "ant" / "00.png").symlink_to("nowhere.png")
    whole = opened(photos)
    assert find_exposure(trained(whole), whole).count == COUNT - 1
