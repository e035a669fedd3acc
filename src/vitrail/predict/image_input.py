"""An image from whatever a person holds: a file, bytes, a Pillow image, an array, a tensor.

| given | read as |
|---|---|
| `str`, `Path` | a file; an address (http, https) only where that was asked for |
| `bytes`, `bytearray`, `memoryview` | the content of an image file |
| Pillow image | itself, turned as its EXIF says |
| array [H, W], [H, W, 1], [H, W, 3], [H, W, 4] | bytes 0 to 255, or floats 0 to 1 |
| tensor [3, H, W], [1, H, W], [H, W] | bytes 0 to 255, or floats 0 to 1 |

What could mean two things is refused: floats beyond 0 to 1 may be bytes or normalised already, other whole numbers may
have any range. Files and bytes go through the checks of `vitrail.data.decode`.

An image behind a URL is fetched only on request: http and https, within limits of size and time.

`prepare_ahead` prepares images in threads, ahead of the network, in the order they were given. Decoding and resizing
release Python's lock, so threads are enough. The names are read in the caller's thread: one that waits for stdin could
not be ended.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.core.errors import BadImage
from vitrail.core.http import HttpError, read_url
from vitrail.core.processes import available_cores
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.folder import read_file

MAX_BYTES: Final = 64 * 2**20
TIMEOUT_S: Final = 30.0
ImageInput: TypeAlias = "str | Path | bytes | bytearray | memoryview | Image.Image | NDArray[Any] | Tensor"


def is_one(given: object) -> bool:
    """Whether this is one image and not several: arrays and tensors of four axes are several."""
    if isinstance(given, Tensor | np.ndarray):
        return cast("NDArray[Any]", given).ndim < 4
    single = isinstance(given, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | Mapping)
    return single or not hasattr(given, "__iter__")


def image_from(given: object, *, urls: bool = False) -> Image.Image:
    """The image as Pillow has it, its pixels perhaps not decoded yet. Addresses are refused unless `urls`. BadImage
    names what was given."""
    if isinstance(given, Image.Image):
        return given
    try:
        if isinstance(given, str | os.PathLike):
            return EncodedImage(read_input(cast("str | os.PathLike[str]", given), urls)).rgb()
        if isinstance(given, bytes | bytearray | memoryview):
            return EncodedImage(bytes(given)).rgb()
        if isinstance(given, np.ndarray | Tensor):
            pixels = channels_last(given) if isinstance(given, Tensor) else cast("NDArray[Any]", given)
            return EncodedImage(to_uint8(pixels)).rgb()
    except BadImage as error:
        raise BadImage(f"{describe_input(given)}: {error}") from None
    expected = "give a path, bytes, a Pillow image, an array, a tensor, or a list"
    raise BadImage(f"{describe_input(given)} is not an image; {expected}")


def describe_input(given: object) -> str:
    """What a message calls it."""
    if isinstance(given, str | os.PathLike):
        return os.fspath(cast("str | os.PathLike[str]", given))
    if isinstance(given, bytes | bytearray | memoryview):
        return f"{len(given):,} bytes"
    if isinstance(given, np.ndarray | Tensor):
        return f"{'array' if isinstance(given, np.ndarray) else 'tensor'} {list(cast('Any', given).shape)}"
    return "image" if isinstance(given, Image.Image) else f"a {type(given).__name__}"


def read_input(path: "str | os.PathLike[str]", urls: bool) -> bytes:
    """The content of a file or, with `urls`, of an http(s) address. BadImage has the reason where there is none."""
    try:
        if not (isinstance(path, str) and re.match("[A-Za-z]+://", path)):
            return read_file(os.fspath(path))
        if urls:
            return read_url(path, max_bytes=MAX_BYTES, timeout_s=TIMEOUT_S, accept="image/*")
    except IsADirectoryError:
        raise BadImage("is a folder; give its files, or `vitrail predict` the folder") from None
    except HttpError as error:
        raise BadImage(f"cannot be fetched: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadImage(getattr(error, "strerror", None) or str(error)) from None
    raise BadImage("is an address, and none is fetched unless asked for: vitrail.predictor(..., urls=True)")


def channels_last(tensor: Tensor) -> "NDArray[Any]":
    """[C, H, W] -> [H, W, C], on the host."""
    if tensor.ndim == 3 and tensor.shape[0] not in (1, 3):
        where = "; its channels are last: permute(2, 0, 1)" if tensor.shape[2] in (1, 3, 4) else ""
        raise BadImage(f"a tensor of an image is [3, H, W], [1, H, W] or [H, W]{where}")
    host = tensor.detach().cpu()
    host = host.float() if host.is_floating_point() else host  # numpy has no bfloat16
    return (host.permute(1, 2, 0) if host.ndim == 3 else host).numpy()


def to_uint8(pixels: "NDArray[Any]") -> "NDArray[np.uint8]":
    """Floats from 0 to 1 in 8 bits, to the nearest; bytes as they are."""
    if pixels.dtype.kind == "f":
        low, high = (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)
        if not (low >= 0 and high <= 1):
            rule = "could be bytes, or normalised already; give floats from 0 to 1, or uint8"
            raise BadImage(f"floats from {low:g} to {high:g} {rule}")
        pixels = np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise BadImage(f"{pixels.dtype} could have any range; give uint8 from 0 to 255, or floats from 0 to 1")
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3):
        raise BadImage("an array of an image is [H, W, 3]; its channels are first: transpose(1, 2, 0)")
    return pixels


Item = TypeVar("Item")
Made = TypeVar("Made")


def prepare_ahead(
    given: Iterable[Item], prepare: Callable[[Item], Made], *, ahead: int, threads: int = -1
) -> "Generator[tuple[Item, Made | BadImage]]":
    """Each item with what `prepare` makes of it, or with the reason why that is nothing; at most `ahead` are held.
    Without threads it is prepared when it is asked for; -1 are as many as cores, up to eight."""

    def attempt(item: Item) -> Made | BadImage:
        try:
            return prepare(item)
        except BadImage as error:
            return error

    items = iter(given)
    if threads == 0:
        yield from ((item, attempt(item)) for item in items)
        return
    pool = ThreadPoolExecutor(min(available_cores(), 8) if threads < 0 else threads, thread_name_prefix="prepare")
    waiting = deque[tuple[Item, "Future[Made | BadImage]"]]()
    try:
        while True:
            for item in islice(items, max(ahead, 1) - len(waiting)):
                waiting.append((item, pool.submit(attempt, item)))
                if isinstance(item, Image.Image):  # given twice, two threads must not decode it at once
                    wait([waiting[-1][1]])
            if not waiting:
                return
            item, future = waiting.popleft()
            yield item, future.result()
    finally:  # also where the reader goes away
        pool.shutdown(wait=True, cancel_futures=True)


def split_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """So many at a time; the last ones may be fewer."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])
