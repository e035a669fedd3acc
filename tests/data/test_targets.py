"""What a task learns from: where it comes from, and what makes it unusable."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.masked import PIXEL_CLASSES, Masked, Unlabelled, masked, painted, palette
from tests.data.pictures import encoded, listed, noise
from vitrail.core.errors import BadImage, DataError
from vitrail.data.dataset import ArrayDataset, ConcatDataset, Labels, RelabelledDataset, SubsetDataset
from vitrail.data.datasets.builtin_sets import ShapesDataset
from vitrail.data.decode.image import read_mask
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.targets import IGNORED, ClassTargets, Geometry, MaskTargets


def png(image: Image.Image, **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **more)
    return out.getvalue()


def test_classes_of_images_are_a_row_each() -> None:
    source = listed(5)
    assert ClassTargets().batch(source, np.array([4, 0])).tolist() == [1, 0]
    several = RelabelledDataset(source, Labels.several([(0, 2), (), (1,), (), ()]), source.classes)
    assert ClassTargets().batch(several, np.array([0, 1])).tolist() == [[0, 2], [-1, -1]]


def test_masks_are_passed_on_with_the_samples() -> None:
    source = masked([(12, 10), (9, 8), (7, 7)])
    joined = ConcatDataset([source, source])
    relabelled = RelabelledDataset(source, Labels(np.array([1, 0, 1])), ("a", "b"))
    for other, index, wanted in ((SubsetDataset(source, [2, 1]), 1, 1), (joined, 4, 1), (relabelled, 2, 2)):
        assert other.pixel_classes == PIXEL_CLASSES
        assert np.array_equal(read_mask(other.mask(index)), painted(wanted, [(12, 10), (9, 8), (7, 7)][wanted]))
    with pytest.raises(DataError, match="masks"):
        ConcatDataset([source, listed(3)])
    with pytest.raises(DataError, match="no mask"):
        listed(3).mask(0)


def test_a_fingerprint_notices_other_classes_of_pixels() -> None:
    some, others = Masked([painted(0)]), Masked([painted(0)])
    others.pixel_classes = ("background", "cat")
    without = Masked([painted(0)])
    without.pixel_classes = ()
    assert len({some.fingerprint, others.fingerprint, without.fingerprint}) == 3
    assert SubsetDataset(some, [0, 0]).fingerprint != SubsetDataset(others, [0, 0]).fingerprint
    arrays, named = ArrayDataset(noise(0)[None]), ArrayDataset(noise(0)[None])
    named.pixel_classes = ("background", "cat")
    assert arrays.fingerprint != named.fingerprint


def test_runs_from_before_there_were_masks_know_their_data() -> None:
    known = "a1a7369b9b806278068732d736c6776240945cba3555bd81ee2e257d9f6b5433"  # as 0.1.0 wrote it
    assert ShapesDataset(20).fingerprint == known


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_indices_come_as_they_are_stored(bits: int) -> None:
    """Pillow widens grey levels of few bits, and a palette is not looked up."""
    values = np.random.default_rng(0).integers(0, 2**bits, (5, 9), dtype=np.uint8)
    image = Image.frombytes("P", (9, 5), values.tobytes())
    image.putpalette(bytes(range(2, 256)) * 3 + bytes(6))
    assert np.array_equal(read_mask(png(image, bits=bits)), values)
    assert np.array_equal(read_mask(grey(values, bits)), values)


def grey(values: "np.ndarray", bits: int) -> bytes:
    """A PNG of one channel of so many bits, written by hand."""
    import struct
    import zlib

    digits = np.unpackbits(values[..., None], axis=-1)[..., 8 - bits :].reshape(len(values), -1)
    rows = b"".join(b"\0" + np.packbits(row).tobytes() for row in digits)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, 0, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_masks_of_16_bits_hold_indices_too() -> None:
    values = painted(3).astype(np.uint16)
    assert np.array_equal(read_mask(png(Image.fromarray(values))), values)
    with pytest.raises(BadImage, match="256"):
        read_mask(png(Image.fromarray(values + np.uint16(256 - values.max()))))


@pytest.mark.parametrize(
    "mask",
    [
        painted(0, (10, 12)),
        palette(painted(0, (12, 11))),
        encoded(noise(0)),
        encoded(noise(0), "JPEG"),
        palette(painted(0))[:-40],
        b"",
        np.full((12, 10), len(PIXEL_CLASSES), np.uint8),
        np.zeros((12, 10), np.int64),
        FileNotFoundError(2, "No such file or directory", "mask.png"),
        BadImage("not there"),
    ],
    ids=["turned", "size", "colour", "JPEG", "cut", "empty", "index", "type", "missing", "refused"],
)
def test_a_mask_that_cannot_be_used_says_why(mask: "bytes | np.ndarray | Exception") -> None:
    with pytest.raises(BadImage, match=r"^mask: \w+"):
        MaskTargets().read(Masked([mask]), 0, (12, 10))


def test_pixels_may_count_for_nothing() -> None:
    mask = painted(0)
    mask[3] = IGNORED
    read = MaskTargets().read(Unlabelled([palette(mask)]), 0, (12, 10))
    assert np.array_equal(read.numpy(), mask)
    whole = Geometry(whole=(12, 10), box=(0, 0, 12, 10), inner=(12, 10))
    assert torch.equal(MaskTargets().view(read, whole), read)
    assert MaskTargets().blank((3, 4)).tolist() == [[IGNORED] * 4] * 3


def test_data_without_masks_are_refused_before_anything_is_read() -> None:
    with pytest.raises(DataError, match="masks"):
        next(eval_batches(listed(3), Preprocessing(image=(4, 4)), batch=2, targets=MaskTargets()))
