"""Tiny copies of the data sets, in the formats of the original files: a few samples of each class that is needed.

Image i is one shade of grey all over, `shade(i)`, so that a test can tell which one it got.
"""

import csv
import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat


def shade(i: int) -> int:
    return i * 37 % 256


def jpeg(i: int, size: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), (shade(i),) * 3).save(out, "JPEG", quality=95)
    return out.getvalue()


def png(i: int, size: int = 8) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), (shade(i),) * 3).save(out, "PNG")
    return out.getvalue()


def put(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def tar(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as out:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in members.items():
            out.writestr(name, data)
    return path


# CIFAR.


def planes(count: int, start: int = 0) -> NDArray[np.uint8]:
    """[N, 3072]: red, green and blue planes; green is one brighter than red, blue two, and one red pixel is 200."""
    values = np.array([shade(start + i) for i in range(count)], np.uint8)[:, None, None]
    out = (values + np.arange(3, dtype=np.uint8)[None, :, None]).repeat(1024, axis=2).reshape(count, 3072)
    out[:, 1] = 200  # row 0, column 1
    return out


def old_string(data: bytes) -> bytes:
    """How Python 2 pickled a string."""
    return b"U" + bytes([len(data)]) + data if len(data) < 256 else b"T" + struct.pack("<I", len(data)) + data


def old_number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def old_list(items: Sequence[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def old_array(array: NDArray[np.uint8]) -> bytes:
    rows, columns = array.shape
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + old_number(rows)
        + old_number(columns)
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + old_string(array.tobytes())
        + b"tb"
    )


def old_pickle(held: dict[bytes, bytes]) -> bytes:
    """A dictionary as Python 2's cPickle wrote it in protocol 2; the values are pickled already."""
    return b"\x80\x02}(" + b"".join(old_string(key) + value for key, value in held.items()) + b"u."


def cifar10_members(each: int = 4) -> dict[str, bytes]:
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    members = {
        name: old_pickle(
            {
                b"batch_label": old_string(b"a batch"),
                b"labels": old_list([old_number((n * each + i) % 10) for i in range(each)]),
                b"data": old_array(planes(each, n * each)),
                b"filenames": old_list([old_string(b"a.png")] * each),
            }
        )
        for n, name in enumerate(names)
    }
    words = [f"class{i}".encode() for i in range(10)]
    meta = {b"num_cases_per_batch": old_number(each), b"label_names": old_list([old_string(word) for word in words])}
    return {f"cifar-10-batches-py/{name}": data for name, data in {**members, "batches.meta": old_pickle(meta)}.items()}


def cifar10_binary_members(each: int = 4) -> dict[str, bytes]:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    members = {
        name: b"".join(bytes([(n * each + i) % 10]) + planes(1, n * each + i).tobytes() for i in range(each))
        for n, name in enumerate(names)
    }
    members["batches.meta.txt"] = "".join(f"class{i}\n" for i in range(10)).encode() + b"\n"
    return {f"cifar-10-batches-bin/{name}": data for name, data in members.items()}


def cifar100_members(train: int = 40, test: int = 6) -> dict[str, bytes]:
    """By Python 3 this time, in the same protocol."""

    def batch(start: int, count: int) -> bytes:
        labels = [(start + i) % 100 for i in range(count)]
        held = {"fine_labels": labels, "coarse_labels": [label // 5 for label in labels], "data": planes(count, start)}
        return pickle.dumps(held, protocol=2)

    meta = pickle.dumps({"fine_label_names": [f"class{i}" for i in range(100)]}, protocol=2)
    members = {"train": batch(0, train), "test": batch(train, test), "meta": meta}
    return {f"cifar-100-python/{name}": data for name, data in members.items()}


def cifar10(root: Path) -> None:
    tar(root / "cifar-10-python.tar.gz", cifar10_members())


def cifar100(root: Path) -> None:
    tar(root / "cifar-100-python.tar.gz", cifar100_members())


# Formats of their own.


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(root: Path) -> None:
    for word, count in (("train", 12), ("t10k", 5)):
        pictures = np.stack([np.full((28, 28), shade(i), np.uint8) for i in range(count)])
        put(root / f"{word}-images-idx3-ubyte.gz", gzip.compress(idx(pictures)))
        put(root / f"{word}-labels-idx1-ubyte.gz", gzip.compress(idx(np.arange(count, dtype=np.uint8) % 10)))


def svhn(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 40), ("test", 6)):
        pictures = np.stack([np.full((32, 32, 3), shade(i), np.uint8) for i in range(count)], axis=-1)
        pictures[0, 1, 2] = 200  # row 0, column 1, blue: the axes are not mixed up
        labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
        savemat(root / f"{split}_32x32.mat", {"X": pictures, "y": labels}, do_compression=True)


def pcam(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for word, count in (("train", 20), ("valid", 6), ("test", 5)):
        stem = f"camelyonpatch_level_2_split_{word}"
        pictures = np.stack([np.full((96, 96, 3), shade(i), np.uint8) for i in range(count)])
        labels = (np.arange(count) % 2).astype(np.uint8).reshape(count, 1, 1, 1)
        for letter, array in (("x", pictures), ("y", labels)):
            with h5py.File(root / f"{stem}_{letter}.h5", "w") as file:
                file.create_dataset(letter, data=array, chunks=(1, *array.shape[1:]))
            plain = root / f"{stem}_{letter}.h5"
            put(root / f"{plain.name}.gz", gzip.compress(plain.read_bytes(), 1))
            plain.unlink()


def dsprites(root: Path, count: int = 80) -> None:
    root.mkdir(parents=True, exist_ok=True)
    pictures = np.zeros((count, 64, 64), np.uint8)
    latents = np.zeros((count, 6), np.int64)
    for i in range(count):
        latents[i] = (0, i % 3, i % 6, i % 40, i * 5 % 32, i % 32)
        pictures[i, i % 64, : i % 64 + 1] = 1
    np.savez_compressed(
        root / "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz",
        imgs=pictures,
        latents_classes=latents,
        latents_values=latents.astype(np.float64),
    )


def norb_matrix(array: NDArray[np.uint8] | NDArray[np.int32]) -> bytes:
    magic = 0x1E3D4C55 if array.dtype == np.uint8 else 0x1E3D4C54
    shape = (*array.shape, 1, 1, 1)[: max(3, array.ndim)]
    return struct.pack(f"<Ii{len(shape)}i", magic, array.ndim, *shape) + array.tobytes()


def smallnorb(root: Path) -> None:
    for stem, count in (("5x46789x9x18x6x2x96x96-training", 30), ("5x01235x9x18x6x2x96x96-testing", 20)):
        pictures = np.stack([np.full((2, 96, 96), shade(i), np.uint8) for i in range(count)])
        pictures[:, 1] = 3  # the other camera
        numbers = np.arange(count)
        info = np.stack([numbers % 10, numbers % 9, numbers % 18 * 2, numbers % 6], axis=1).astype("<i4")
        put(root / f"smallnorb-{stem}-dat.mat.gz", gzip.compress(norb_matrix(pictures), 1))
        put(root / f"smallnorb-{stem}-cat.mat.gz", gzip.compress(norb_matrix((numbers % 5).astype("<i4"))))
        put(root / f"smallnorb-{stem}-info.mat.gz", gzip.compress(norb_matrix(info)))


def crc32c(data: bytes) -> int:
    """Bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 * (crc & 1))
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def tf_example(features: dict[str, bytes | int], *, packed: bool = True) -> bytes:
    """A tf.train.Example, as protobuf writes it."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            held = field(1, field(1, value))
        else:
            held = field(3, field(1, varint(value)) if packed else varint(1 << 3) + varint(value))
        entries += field(1, field(1, name.encode()) + field(2, held))
    return field(1, entries)


def tf_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + struct.pack("<I", 0)  # the second checksum is not looked at


def dmlab_members() -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    start = 0
    for word, counts in (("train", (12, 8)), ("validation", (6,)), ("test", (5,))):
        for shard, count in enumerate(counts):
            examples = [
                {"image": jpeg(start + i), "filename": f"/maze/{start + i:05d}.jpg".encode(), "label": (start + i) % 6}
                for i in range(count)
            ]
            name = f"dmlab-{word}.tfrecord-{shard:05d}-of-{len(counts):05d}"
            members[name] = b"".join(tf_record(tf_example(one, packed=bool(shard))) for one in examples)
            start += count
    return members


def dmlab(root: Path) -> None:
    tar(root / "dmlab.tar.gz", dmlab_members())


# Images in files.


def pets(root: Path) -> None:
    breeds = ("Abyssinian", "american_bulldog", "Birman")
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    images: dict[str, bytes] = {}
    for i in range(36):
        label = i % 3
        name = f"{breeds[label]}_{i}"
        images[f"images/{name}.jpg"] = jpeg(i)
        lists["trainval" if i < 30 else "test"].append(f"{name} {label + 1} 1 1")
    tar(root / "images.tar.gz", images)
    texts = {f"annotations/{name}.txt": ("\n".join(lines) + "\n").encode() for name, lines in lists.items()}
    tar(root / "annotations.tar.gz", {"annotations/list.txt": b"#Image CLASS-ID\n", **texts})


def flowers102(root: Path) -> None:
    tar(root / "102flowers.tgz", {f"jpg/image_{i:05d}.jpg": jpeg(i) for i in range(1, 41)})
    numbers = np.arange(1, 41, dtype=np.uint16)
    savemat(root / "imagelabels.mat", {"labels": (numbers * 3 % 102 + 1).astype(np.uint8)[None]}, do_compression=True)
    sets = {"trnid": numbers[::2][None], "valid": numbers[1:20:2][None], "tstid": numbers[21::2][None]}
    savemat(root / "setid.mat", sets)


def caltech101(root: Path) -> None:
    members = {
        f"101_ObjectCategories/{name}/image_{i + 1:04d}.jpg": jpeg(40 * label + i)
        for label, name in enumerate(("BACKGROUND_Google", "Faces", "accordion"))
        for i in range(33 + label)
    }
    members["101_ObjectCategories/BACKGROUND_Google/tmp"] = b"left behind"
    inner = tar(root / "inner.tar.gz", members)
    zipped(root / "caltech-101.zip", {"caltech-101/101_ObjectCategories.tar.gz": inner.read_bytes()})
    inner.unlink()


def dtd(root: Path) -> None:
    names = [f"{name}/{name}_{i:04d}.jpg" for i in range(14) for name in ("banded", "blotchy", "braided")]
    members = {f"dtd/images/{name}": jpeg(i) for i, name in enumerate(names)}
    for split, chosen in (("train", names[:21]), ("val", names[21:33]), ("test", names[33:])):
        members[f"dtd/labels/{split}1.txt"] = ("\n".join(chosen) + "\n").encode()
    tar(root / "dtd-r1.0.1.tar.gz", members)


SUN_CLASSES = ("/a/abbey", "/c/church/indoor", "/c/church/outdoor")


def sun397(root: Path) -> None:
    members = {f"SUN397{name}/sun_{chr(97 + i)}.jpg": jpeg(i) for i in range(16) for name in SUN_CLASSES}
    members["SUN397/c/church/outdoor/sun_bhenjvsvrtumjuri.jpg"] = jpeg(0)
    members["SUN397/ClassName.txt"] = ("\n".join(SUN_CLASSES) + "\n").encode()
    tar(root / "SUN397.tar.gz", members)


def eurosat(root: Path) -> None:
    names = [f"{name}/{name}_{i}.jpg" for name in ("AnnualCrop", "Forest") for i in range(1, 16)]
    zipped(root / "EuroSAT.zip", {f"2750/{name}": jpeg(i) for i, name in enumerate(names)})


def resisc45(root: Path) -> None:
    for i in range(30):
        name = ("airplane", "beach", "cloud")[i % 3]
        put(root / "NWPU-RESISC45" / name / f"{name}_{i:03d}.jpg", jpeg(i))


def retinopathy(root: Path) -> None:
    def table(path: Path, rows: list[list[object]]) -> None:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows)

    for i in range(18):
        put(root / "train" / f"{i}_left.jpeg", jpeg(i, 32))
        put(root / "test" / f"{i}_right.jpeg", jpeg(i + 100, 32))
    table(root / "trainLabels.csv", [["image", "level"], *([f"{i}_left", i % 5] for i in range(18))])
    usage = ["Public" if i % 3 == 0 else "Private" for i in range(18)]
    table(
        root / "retinopathy_solution.csv",
        [["image", "level", "Usage"], *([f"{i}_right", i % 5, usage[i]] for i in range(18))],
    )


DEPTHS = (7.9, 8.0, 8.2, 8.7, 9.2, 9.7, 10.0, 10.4)


def clevr(root: Path) -> None:
    members: dict[str, bytes] = {}
    for split, count in (("train", 24), ("val", 5)):
        scenes = []
        for i in range(count):
            name = f"CLEVR_{split}_{i:06d}.png"
            members[f"CLEVR_v1.0/images/{split}/{name}"] = png(i)
            near = {"shape": "cube", "pixel_coords": [10, 20, DEPTHS[i % len(DEPTHS)]]}
            far = {"shape": "sphere", "pixel_coords": [1, 2, 14.0]}
            scenes.append({"image_filename": name, "objects": [*[far] * (i % 8 + 2), near]})
        members[f"CLEVR_v1.0/scenes/CLEVR_{split}_scenes.json"] = json.dumps({"info": {}, "scenes": scenes}).encode()
    zipped(root / "CLEVR_v1.0.zip", members)


KITTI_LINES = (
    "Car 0.00 0 -1.57 614 181 727 284 1.57 1.73 4.15 1.00 1.75 {z} -1.62",
    "Pedestrian 0.00 0 -0.20 712 143 810 307 1.89 0.48 1.20 1.84 1.47 2.0 0.01",
    "DontCare -1 -1 -10 503 169 590 190 -1 -1 -1 -1000 -1000 -1000 -10",
)


def kitti(root: Path) -> None:
    """60 images of 20 drives; the depth of the car in image i is i metres, and every fifth has none."""
    count = 60
    images = {f"training/image_2/{i:06d}.png": png(i) for i in range(count)}
    texts = {
        f"training/label_2/{i:06d}.txt": "\n".join(KITTI_LINES[i % 5 == 0 :]).format(z=f"{i:.2f}").encode() + b"\n"
        for i in range(count)
    }
    drives = [f"2011_09_26 2011_09_26_drive_{i // 3:04d}_sync {i:010d}" for i in range(count)]
    order = np.random.default_rng(0).permutation(count) + 1
    zipped(root / "data_object_image_2.zip", {**images, "testing/image_2/000000.png": png(0)})
    zipped(root / "data_object_label_2.zip", texts)
    zipped(
        root / "devkit_object.zip",
        {
            "mapping/train_mapping.txt": ("\n".join(drives) + "\n").encode(),
            "mapping/train_rand.txt": ",".join(str(n) for n in order).encode(),
        },
    )


HOMES: dict[str, Callable[[Path], None]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "mnist": mnist,
    "fashion-mnist": mnist,
    "pets": pets,
    "flowers102": flowers102,
    "caltech101": caltech101,
    "dtd": dtd,
    "svhn": svhn,
    "sun397": sun397,
    "pcam": pcam,
    "eurosat": eurosat,
    "resisc45": resisc45,
    "retinopathy": retinopathy,
    "clevr": clevr,
    "dmlab": dmlab,
    "dsprites": dsprites,
    "kitti": kitti,
    "smallnorb": smallnorb,
}
