"""Bodies of requests, read into memory within limits of size, time and total memory; and the images in them.

Images are a form's files, or base64 in JSON. The parts of a form are slices of the body: no file is written, no URL is
fetched, no path is opened.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers

from vitrail.core.errors import describe_error
from vitrail.serve.batch_queue import MemoryReservation
from vitrail.serve.http_errors import ClientDisconnected, RequestError
from vitrail.serve.settings import ServeSettings

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

FIELD: Final = "image"
FORM: Final = "multipart/form-data"
JSON: Final = "application/json"
PART_HEADERS: Final = 8  # at most; a browser sends two or three
HEADER_BYTES: Final = 4096  # of one line, at most
LONGEST_NAME: Final = 200  # characters of a file's name that are kept


async def read_body(
    headers: Headers, receive: Receive, settings: ServeSettings, reservation: MemoryReservation
) -> bytes:
    """A whole body. Raises where it is announced as too long, turns out to be, or arrives too slowly."""
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestError(415, "compressed body", f"Content-Encoding {coding[:40]!r} is not supported; send it plain")
    too_long = RequestError(
        413,
        "body too large",
        f"a request's body has {settings.max_bytes:,} bytes at most; send a smaller image, or fewer at once",
    )
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > settings.max_bytes:
        raise too_long
    pieces, size = list[bytes](), 0
    try:
        async with asyncio.timeout(settings.read_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                piece: bytes = message.get("body", b"")
                size += len(piece)
                if size > settings.max_bytes:
                    raise too_long
                reservation.grow(len(piece))
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        reason = f"{size:,} bytes came in {settings.read_s:g} s; the whole body has to"
        raise RequestError(408, "body too slow", reason, headers={"Connection": "close"}) from None


@dataclass(slots=True)
class FormPart:
    """One field of a form while it is parsed."""

    headers: dict[str, bytes] = field(default_factory=dict[str, bytes])
    pieces: list[bytes] = field(default_factory=list[bytes])

    def to_field(self) -> tuple[str, str, bytes]:
        """Field name, file name and content."""
        kind, options = parse_options_header(self.headers.get("content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise RequestError(400, "malformed form", 'a part needs "Content-Disposition: form-data; name=..."')
        name, file = (options.get(key, b"").decode("utf-8", "replace")[:LONGEST_NAME] for key in (b"name", b"filename"))
        return name, file, self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class FormCallbacks:
    """Collects parts as the parser goes through a body."""

    def __init__(self, max_parts: int) -> None:
        self.max_parts = max_parts
        self.parts: list[FormPart] = []
        self.complete = False
        self._name = self._value = b""

    def on_part_begin(self) -> None:
        if len(self.parts) >= self.max_parts:
            reason = f"a form has {self.max_parts} parts at most; send the rest in another request"
            raise RequestError(400, "too many parts", reason)
        self.parts.append(FormPart())

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].pieces.append(data[start:end])

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self.parts[-1].headers[self._name.decode("latin-1").lower()] = self._value
        self._name = self._value = b""

    def on_end(self) -> None:
        self.complete = True


CALLBACKS: Final = ("on_part_begin", "on_part_data", "on_header_field", "on_header_value", "on_header_end", "on_end")


def parse_form(content_type: str, body: bytes, max_parts: int) -> list[tuple[str, str, bytes]]:
    """Field name, file name and content of every part."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise RequestError(400, "form without a boundary", "Content-Type: multipart/form-data needs a boundary=...")
    form = FormCallbacks(max_parts)
    callbacks: Any = {name: getattr(form, name) for name in CALLBACKS}
    try:
        parser = MultipartParser(boundary, callbacks, max_header_count=PART_HEADERS, max_header_size=HEADER_BYTES)
        parser.write(body)
        parser.finalize()
    except FormParserError:
        reason = "the multipart body cannot be parsed: its boundaries or headers are wrong"
        raise RequestError(400, "malformed form", reason) from None
    if not form.complete:
        raise RequestError(400, "truncated form", "the multipart body ends before its last boundary")
    return [part.to_field() for part in form.parts]


@dataclass(frozen=True, slots=True)
class Upload:
    """One encoded image and its name."""

    name: str
    data: bytes


def read_uploads(content_type: str, body: bytes, max_images: int) -> list[Upload]:
    """At least one and at most `max_images` images."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == FORM:
        found = read_form(content_type, body, max_images)
    elif kind == JSON:
        found = read_json(body, max_images)
    else:
        raise RequestError(
            415,
            "content type not supported",
            f"{kind[:60] or 'no Content-Type'!r}: send {FORM} with images in the field {FIELD!r}, or {JSON} with "
            '{"images": [base64, ...]}',
        )
    if not found:
        reason = f"send at least one, in the form's field {FIELD!r} or the JSON's list 'images'"
        raise RequestError(400, "no image", reason)
    return found


def read_form(content_type: str, body: bytes, max_images: int) -> list[Upload]:
    parts = parse_form(content_type, body, max_images)
    for name, _, _ in parts:
        if name != FIELD:
            raise RequestError(400, "unknown field", f"the form has a field {name!r}; images go into {FIELD!r}")
    return [Upload(file or f"image {at}", data) for at, (_, file, data) in enumerate(parts, 1)]


def read_json(body: bytes, max_images: int) -> list[Upload]:
    # Before parsing: empty lists by the million would take twenty times the memory of their text.
    if sum(body.count(sign) for sign in (b",", b"[", b"{")) > 8 * max_images + 64:
        reason = f"send an object with the key 'images' and at most {max_images} strings"
        raise RequestError(400, "too many values", reason)
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "malformed JSON", f"the body cannot be read as JSON: {describe_error(error)}") from None
    images = cast("dict[str, Any]", given).get("images") if isinstance(given, dict) else None
    if not isinstance(images, list) or set(given) != {"images"}:
        raise RequestError(400, "unknown JSON", 'send an object with one key: {"images": [base64, ...]}')
    several = cast("list[Any]", images)
    if len(several) > max_images:
        reason = f"{len(several)} in 'images'; one request takes {max_images} at most"
        raise RequestError(400, "too many images", reason)
    return [Upload(f"image {at + 1}", decode_base64(text, at)) for at, text in enumerate(several)]


def decode_base64(text: Any, at: int) -> bytes:
    if not isinstance(text, str):
        raise RequestError(400, "unknown JSON", f"images[{at}] is not a string; send each image as base64")
    if text.startswith("data:"):  # what a browser's FileReader gives: the image follows the comma
        text = text.partition(",")[2]
    elif "://" in text[:12]:
        reason = f"images[{at}] is a URL, and none is fetched: send the image itself, as base64"
        raise RequestError(400, "not base64", reason)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, "not base64", f"images[{at}] is not base64, or is truncated") from None
