"""ImageNet in its layouts, ImageNet-21k from its tar files, and the ReaL labels."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tests.data.datasets import writers
from tests.data.datasets.writers import jpeg, put
from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data.dataset import ImageDataset
from vitrail.data.datasets import imagenet
from vitrail.data.datasets.imagenet import match_real_labels, read_real
from vitrail.data.datasets.open_by_name import FilesMissing, open_named
from vitrail.data.readers.folder import read_classes

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
IDS = ("n01440764", "n01443537", "n01484850")
TRUTH = [IDS[i] for i in (2, 0, 1, 1, 2)]  # of val images 1 to 5


def labels(source: ImageDataset) -> list[int]:
    return source.labels.values.tolist()


def val_name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.JPEG"


def train_members() -> dict[str, bytes]:
    return {f"{identity}/{identity}_{i}.JPEG": jpeg(10 * k + i) for k, identity in enumerate(IDS) for i in range(4)}


def inner(identity: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        for name, data in train_members().items():
            if name.startswith(identity):
                info = tarfile.TarInfo(name.partition("/")[2])
                info.size = len(data)
                opened.addfile(info, io.BytesIO(data))
    return out.getvalue()


def devkit(root: Path) -> None:
    """The numbers of the development kit are not in the order of the WordNet ids."""
    numbers = {IDS[2]: 1, IDS[0]: 2, IDS[1]: 3}
    kinds = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("num_children", object)]
    rows = [(number, identity, "some, words", 0) for identity, number in numbers.items()]
    mat = root / "meta.mat"
    savemat(mat, {"synsets": np.array([*rows, (4, "n00001740", "entity", 3)], dtype=kinds)})
    truth = "".join(f"{numbers[identity]}\n" for identity in TRUTH)
    home = "ILSVRC2012_devkit_t12/data"
    members = {
        f"{home}/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        f"{home}/meta.mat": mat.read_bytes(),
    }
    writers.tar(root / "ILSVRC2012_devkit_t12.tar.gz", members)
    mat.unlink()


def official(root: Path) -> Path:
    writers.tar(root / "ILSVRC2012_img_train.tar", {f"{identity}.tar": inner(identity) for identity in IDS}, "w")
    writers.tar(root / "ILSVRC2012_img_val.tar", {val_name(i): jpeg(50 + i) for i in (3, 1, 2, 5, 4)}, "w")
    devkit(root)
    return root


def test_the_official_files_are_read_as_they_are(tmp_path: Path) -> None:
    splits = imagenet.read_imagenet(official(tmp_path))
    assert {split: len(source) for split, source in splits.items()} == {"train": 12, "val": 5}
    assert splits["train"].classes == splits["val"].classes == IDS
    assert labels(splits["train"]) == [0] * 4 + [1] * 4 + [2] * 4
    assert splits["train"].name(6) == "n01443537/n01443537_2.JPEG"
    assert splits["train"].read(6) == jpeg(12)
    assert [splits["val"].name(i) for i in range(5)] == [val_name(i) for i in range(1, 6)]
    assert labels(splits["val"]) == [2, 0, 1, 1, 2]
    assert splits["val"].read(1) == jpeg(52)
    again = imagenet.read_imagenet(tmp_path)  # by the index that was kept
    assert again["train"].read(11) == splits["train"].read(11) == jpeg(23)


def test_class_folders(tmp_path: Path) -> None:
    for name, data in train_members().items():
        put(tmp_path / "train" / name, data)
    for number, identity in enumerate(TRUTH, 1):
        put(tmp_path / "val" / identity / val_name(number), jpeg(50 + number))
    put(
        tmp_path / "LOC_synset_mapping.txt",
        f"{IDS[0]} tench, Tinca tinca\n{IDS[1]} goldfish\n{IDS[2]} great white shark\n",
    )
    splits = imagenet.read_imagenet(tmp_path)
    assert splits["val"].classes == ("tench", "goldfish", "great white shark")
    assert labels(splits["val"]) == [0, 1, 1, 2, 2]
    shutil.rmtree(tmp_path / "val" / IDS[1])
    with pytest.raises(BadLabels):
        imagenet.read_imagenet(tmp_path)


def synset_list(root: Path) -> None:
    put(root / imagenet.SYNSETS, "\n".join(TRUTH) + "\n")


def kaggle_list(root: Path) -> None:
    rows = [f"ILSVRC2012_val_{i:08d},{identity} 1 2 3 4 \n" for i, identity in enumerate(TRUTH, 1)]
    put(root / imagenet.SOLUTION, "ImageId,PredictionString\n" + "".join(reversed(rows)))


def torchvision_list(root: Path) -> None:
    torch.save((dict.fromkeys(IDS, ("a",)), TRUTH), root / imagenet.META)


@pytest.mark.parametrize("says", [synset_list, kaggle_list, torchvision_list, devkit])
def test_val_pictures_side_by_side_and_a_list(tmp_path: Path, says: Callable[[Path], None]) -> None:
    for number in range(1, 6):
        put(tmp_path / "val" / val_name(number), jpeg(number))
    with pytest.raises(FilesMissing, match="ILSVRC2012_devkit_t12"):
        imagenet.read_imagenet(tmp_path)
    says(tmp_path)
    source = imagenet.read_imagenet(tmp_path)["val"]
    assert (labels(source), source.classes) == ([2, 0, 1, 1, 2], IDS)
    put(tmp_path / "val" / "another.JPEG", jpeg(1))
    with pytest.raises(DataError):
        imagenet.read_imagenet(tmp_path)


def test_damaged_lists_and_tars_are_named(tmp_path: Path) -> None:
    official(tmp_path)
    path = tmp_path / "ILSVRC2012_img_train.tar"
    path.write_bytes(path.read_bytes()[: 512 * 5])
    with pytest.raises(DataError):
        imagenet.read_imagenet(tmp_path)
    path.unlink()
    put(tmp_path / imagenet.META, b"no such thing")
    with pytest.raises(DataError):
        imagenet.read_imagenet(tmp_path)
    (tmp_path / imagenet.META).unlink()
    put(tmp_path / imagenet.DEVKIT, b"no such thing")
    with pytest.raises(DataError):
        imagenet.read_imagenet(tmp_path)


def test_what_is_missing_comes_with_the_terms(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound) as caught:
        open_named("imagenet", tmp_path, download=True)
    text = str(caught.value)
    assert f"Put {tmp_path / 'ILSVRC2012_img_val.tar'} there, by hand, 6.7 GB" in text
    assert "needs an account at image-net.org" in text
    assert "--download" not in text


def tars(root: Path, *, ids: tuple[str, ...] = IDS) -> None:
    for identity in ids:
        put(root / f"{identity}.tar", inner(identity))


def test_21k_reads_the_tar_files_where_they_lie(tmp_path: Path) -> None:
    tars(tmp_path)
    source = imagenet.read_imagenet21k(tmp_path)["train"]
    assert (len(source), source.classes, labels(source)) == (12, IDS, [0] * 4 + [1] * 4 + [2] * 4)
    assert source.read(9) == jpeg(21)
    assert source.name(9) == "n01484850/n01484850_1.JPEG"


def test_21k_takes_the_order_of_the_classes_from_the_list(tmp_path: Path) -> None:
    tars(tmp_path / "winter21_whole")
    put(tmp_path / imagenet.WORDNET_IDS, "\n".join([IDS[2], "n99999999", IDS[0], IDS[1]]) + "\n")
    source = imagenet.read_imagenet21k(tmp_path)["train"]
    assert len(source.classes) == 4
    assert labels(source) == [2] * 4 + [3] * 4 + [0] * 4
    put(tmp_path / imagenet.WORDNET_IDS, "\n".join(IDS[:2]) + "\n")
    with pytest.raises(BadLabels):
        imagenet.read_imagenet21k(tmp_path)


def test_21k_with_several_labels(tmp_path: Path) -> None:
    tars(tmp_path)
    shared = {f"{IDS[0]}_1.JPEG": jpeg(1), "n01443537_2.JPEG": jpeg(12)}
    writers.tar(tmp_path / "n02000000.tar", shared, "w")
    put(tmp_path / imagenet.MULTILABEL, json.dumps({f"{IDS[0]}_0": [IDS[0], IDS[2]], "elsewhere_7": [IDS[1]]}))
    source = imagenet.read_multilabel_imagenet21k(tmp_path)["train"]
    assert len(source) == 12
    assert source.labels.multiple
    assert [source.labels[i] for i in (0, 1, 2, 6)] == [(0, 2), (0, 3), (0,), (1, 3)]
    assert source.read(6) == jpeg(12)
    assert source.name(6) == "n01443537/n01443537_2.JPEG"
    put(tmp_path / imagenet.MULTILABEL, json.dumps({f"{IDS[0]}_0": ["n77777777"]}))
    with pytest.raises(BadLabels):
        imagenet.read_multilabel_imagenet21k(tmp_path)
    put(tmp_path / imagenet.MULTILABEL, "[1, 2]")
    with pytest.raises(DataError):
        imagenet.read_multilabel_imagenet21k(tmp_path)


def test_a_damaged_tar_file_of_21k_is_named(tmp_path: Path) -> None:
    tars(tmp_path)
    path = tmp_path / f"{IDS[1]}.tar"
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(DataError, match=f"{IDS[1]}.tar"):
        imagenet.read_imagenet21k(tmp_path)


def test_real_labels_go_by_the_number_in_the_name(tmp_path: Path) -> None:
    for number, identity in enumerate(TRUTH, 1):
        put(tmp_path / "val" / identity / val_name(number), jpeg(50 + number))
    path = put(tmp_path / "real.json", json.dumps([[2, 0], [], [1], [1, 2], []]))
    source = imagenet.read_imagenet(tmp_path)["val"]
    rows = match_real_labels(source, path)
    assert {source.name(i)[-13:-5]: rows[i] for i in range(5)} == {
        "00000001": (2, 0),
        "00000002": (),
        "00000003": (1,),
        "00000004": (1, 2),
        "00000005": (),
    }


def test_real_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    put(tmp_path / "val" / IDS[0] / val_name(3), jpeg(0))
    source = read_classes(tmp_path, "val")
    with pytest.raises(BadLabels):
        match_real_labels(source, put(tmp_path / "real.json", "[[0]]"))
    for text in ("{", "[1]", '[["a"]]'):
        with pytest.raises(DataError):
            match_real_labels(source, put(tmp_path / "real.json", text))


@pytest.mark.skipif(not (SHARED / "real.json").exists(), reason="the ReaL labels are not here")
def test_the_published_real_labels() -> None:
    rows = read_real(SHARED / "real.json")
    assert len(rows) == 50000
    assert sum(bool(row) for row in rows) == 46837
    assert sum(len(row) for row in rows) == 57553
    assert sum(len(row) > 1 for row in rows) == 7443
