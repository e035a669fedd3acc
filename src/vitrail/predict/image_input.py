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

Images prepared by threads, ahead of the network, in the order they were given.

Decoding and resizing let go of Python's lock, so threads are enough: nothing has to be started or sent to another
process, and one image is as quick as it can be. No more than `ahead` images are ever held.
"""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.core.errors import BadImage
from vitrail.data.decode.image import EncodedImage
from vitrail.data.readers.folder import read_file

MAX_BYTES: Final = 64 * 2**20
TIMEOUT_S: Final = 30.0
REDIRECTS: Final = 5
CHUNK: Final = 2**16


class SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects, a few of them, never from https down to http or off to another protocol."""

    max_redirections = REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            fp.close()
            raise BadImage(f"redirects to {newurl[:200]!r}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_address(text: str) -> bool:
    """Whether this names a place on a network: an address of any kind, so that none is taken for a file's name."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and scheme.isascii() and scheme.isalpha()


def fetch(url: str) -> bytes:
    """What lies at an address, whole. BadImage with the reason where it is too large, too slow or not there."""
    if urlsplit(url).scheme.lower() not in ("http", "https"):
        raise BadImage("only http and https addresses are fetched")
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        SafeRedirects(),
    ):
        opener.add_handler(handler)
    asked = urllib.request.Request(url, headers={"User-Agent": "vitrail", "Accept": "image/*"})
    until = time.monotonic() + TIMEOUT_S
    try:
        answer = opener.open(asked, timeout=TIMEOUT_S)
        if answer is None:
            raise BadImage("no answer that could be read")
        with answer:
            return _received(answer, until)
    except urllib.error.HTTPError as error:
        error.close()
        raise BadImage(f"the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadImage(f"cannot be fetched: {getattr(error, 'reason', None) or error}") from None


def _received(answer: http.client.HTTPResponse, until: float) -> bytes:
    content = bytearray()
    while chunk := answer.read1(CHUNK):
        content += chunk
        if len(content) > MAX_BYTES:
            raise BadImage(f"more than {MAX_BYTES:,} bytes are not fetched")
        if time.monotonic() > until:
            raise BadImage(f"was not here after {TIMEOUT_S:.0f} s")
    length = answer.headers.get("Content-Length", "")
    if length.isdecimal() and len(content) < int(length):
        raise BadImage(f"the connection broke after {len(content):,} of {int(length):,} bytes")
    return bytes(content)


ImageInput: TypeAlias = "str | Path | bytes | bytearray | memoryview | Image.Image | NDArray[Any] | Tensor"


def is_one(given: object) -> bool:
    """Whether this is one image and not several: arrays and tensors of four axes are several."""
    if isinstance(given, Tensor | np.ndarray):
        return cast("NDArray[Any]", given).ndim < 4
    return isinstance(given, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | Mapping) or not hasattr(
        given, "__iter__"
    )


def image_from(given: object, fetch: Callable[[str], bytes] | None = None) -> Image.Image:
    """The image as Pillow has it, its pixels perhaps not decoded yet. `fetch` gets the bytes behind an address; where
    there is none, addresses are refused. BadImage names what was given."""
    if isinstance(given, Image.Image):
        return given
    try:
        if isinstance(given, str | os.PathLike):
            return EncodedImage(_read(cast("str | os.PathLike[str]", given), fetch)).rgb()
        if isinstance(given, bytes | bytearray | memoryview):
            return EncodedImage(bytes(given)).rgb()
        if isinstance(given, np.ndarray):
            return EncodedImage(_bytes(cast("NDArray[Any]", given))).rgb()
        if isinstance(given, Tensor):
            return EncodedImage(_bytes(_channels_last(given))).rgb()
    except BadImage as error:
        raise BadImage(f"{describe_input(given)}: {error}") from None
    raise BadImage(
        f"{describe_input(given)} is not an image; give a path, bytes, a Pillow image, an array, a tensor, or a list"
    )


def describe_input(given: object) -> str:
    """What a message calls it."""
    if isinstance(given, str | os.PathLike):
        return os.fspath(cast("str | os.PathLike[str]", given))
    if isinstance(given, bytes | bytearray | memoryview):
        return f"{len(given):,} bytes"
    if isinstance(given, np.ndarray | Tensor):
        return f"{'array' if isinstance(given, np.ndarray) else 'tensor'} {list(cast('Any', given).shape)}"
    return f"a {type(given).__name__}"


def _read(path: "str | os.PathLike[str]", fetch: Callable[[str], bytes] | None) -> bytes:
    if isinstance(path, str) and is_address(path):
        if fetch is None:
            raise BadImage("is an address, and none is fetched unless asked for: vitrail.predictor(..., urls=True)")
        return fetch(path)
    try:
        return read_file(os.fspath(path))
    except IsADirectoryError:
        raise BadImage("is a folder; give its files, or `vitrail predict` the folder") from None
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from None
    except ValueError as error:  # a NUL in the name
        raise BadImage(str(error)) from None


def _channels_last(tensor: Tensor) -> "NDArray[Any]":
    """[C, H, W] -> [H, W, C], on the host."""
    if tensor.ndim == 3 and tensor.shape[0] not in (1, 3):
        where = "; its channels are last: permute(2, 0, 1)" if tensor.shape[2] in (1, 3, 4) else ""
        raise BadImage(f"a tensor of an image is [3, H, W], [1, H, W] or [H, W]{where}")
    host = tensor.detach().cpu()
    host = host.float() if host.is_floating_point() else host  # numpy knows no bfloat16
    return (host.permute(1, 2, 0) if host.ndim == 3 else host).numpy()


def _bytes(pixels: "NDArray[Any]") -> "NDArray[np.uint8]":
    """Floats from 0 to 1 in 8 bits, to the nearest; bytes as they are."""
    if pixels.dtype == np.uint8:
        return _checked(cast("NDArray[np.uint8]", pixels))
    if pixels.dtype.kind != "f":
        raise BadImage(f"{pixels.dtype} could have any range; give uint8 from 0 to 255, or floats from 0 to 1")
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)
    if not (low >= 0 and high <= 1):
        raise BadImage(
            f"floats from {low:g} to {high:g} could be bytes, or normalised already; give floats from 0 to 1, or uint8"
        )
    return _checked(np.rint(pixels.astype(np.float64) * 255).astype(np.uint8))


def _checked(pixels: "NDArray[np.uint8]") -> "NDArray[np.uint8]":
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3):
        raise BadImage("an array of an image is [H, W, 3]; its channels are first: transpose(1, 2, 0)")
    return pixels


Item = TypeVar("Item")
Made = TypeVar("Made")


def default_threads() -> int:
    """As many as there are cores, up to eight: the network wants them, too."""
    return min(os.cpu_count() or 1, 8)


def prepare_ahead(
    given: Iterable[Item], prepare: Callable[[Item], Made], *, ahead: int, threads: int
) -> "Generator[tuple[Item, Made | BadImage]]":
    """Each thing with what `prepare` makes of it, or with the reason why that is nothing. Without threads it is made
    when it is asked for."""
    things = iter(given)
    if threads < 1:
        yield from ((thing, attempt(prepare, thing)) for thing in things)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
    waiting = deque[tuple[Item, "Future[Made | BadImage]"]]()
    try:
        while True:
            for thing in islice(things, max(ahead, 1) - len(waiting)):
                waiting.append((thing, submit_one(pool, prepare, thing)))
            if not waiting:
                return
            thing, future = waiting.popleft()
            yield thing, future.result()
    finally:  # also where the reader goes away
        pool.shutdown(wait=True, cancel_futures=True)


def submit_one(pool: ThreadPoolExecutor, prepare: Callable[[Item], Made], thing: Item) -> "Future[Made | BadImage]":
    """A Pillow image is made here and now: it may be opened but not decoded, given twice, and two threads must not
    decode it at once."""
    if not isinstance(thing, Image.Image):
        return pool.submit(attempt, prepare, thing)
    future: Future[Made | BadImage] = Future()
    future.set_result(attempt(prepare, thing))
    return future


def attempt(prepare: Callable[[Item], Made], thing: Item) -> Made | BadImage:
    try:
        return prepare(thing)
    except BadImage as error:
        return error


def split_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """So many at a time; the last ones may be fewer."""
    items = iter(items)
    while some := list(islice(items, size)):
        yield some
