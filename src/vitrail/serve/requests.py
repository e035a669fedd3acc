"""Reads request bodies into memory, within limits of size, time and total memory, and extracts the images in them.

Images are a form's files, or base64 in JSON. The parts of a form are slices of the body: no file is written, no URL is
fetched, no path is opened.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive

from vitrail.core.errors import describe_error
from vitrail.serve.http_errors import ClientDisconnected, RequestError
from vitrail.serve.settings import ServeSettings

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD: Final = "image"
FORM: Final = "multipart/form-data"
JSON: Final = "application/json"
PART_HEADERS: Final = 8  # per part, at most; browsers send two or three
HEADER_BYTES: Final = 4096  # of one line, at most
LONGEST_NAME: Final = 200  # characters of a file's name that are kept


async def read_body(
    headers: Headers, receive: Receive, settings: ServeSettings, reserve: Callable[[int], None]
) -> bytes:
    """Reads a whole body. Raises if it is announced as too long, turns out to be, or arrives too slowly."""
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise RequestError(415, "compressed body", f"Content-Encoding {coding[:40]!r} is not supported; send it plain")
    limit = f"a request's body is limited to {settings.max_bytes:,} bytes; send a smaller image, or fewer at once"
    too_long = RequestError(413, "body too large", limit)
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
                reserve(len(piece))
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        reason, close = f"{size:,} bytes came in {settings.read_s:g} s; the whole body must", {"Connection": "close"}
        raise RequestError(408, "body too slow", reason, headers=close) from None


@dataclass(slots=True)
class FormPart:
    """One part of a form while it is parsed: its headers, the header at hand, and its content."""

    headers: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    name: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    content: list[bytes] = field(default_factory=list[bytes])

    def end_header(self) -> None:
        self.headers[bytes(self.name.lower())] = bytes(self.value)
        self.name.clear()
        self.value.clear()


def parse_form(content_type: str, body: bytes, max_parts: int) -> list[FormPart]:
    """Parses the parts of a form; raises for more than `max_parts`."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise RequestError(400, "form without a boundary", "Content-Type: multipart/form-data needs a boundary=...")
    parts, ends = list[FormPart](), list[bool]()

    def begin() -> None:
        if len(parts) >= max_parts:
            reason = f"a form is limited to {max_parts} parts; send the rest in another request"
            raise RequestError(400, "too many parts", reason)
        parts.append(FormPart())

    callbacks: MultipartCallbacks = {
        "on_part_begin": begin,
        "on_part_data": lambda data, start, end: parts[-1].content.append(data[start:end]),
        "on_header_field": lambda data, start, end: parts[-1].name.extend(data[start:end]),
        "on_header_value": lambda data, start, end: parts[-1].value.extend(data[start:end]),
        "on_header_end": lambda: parts[-1].end_header(),
        "on_end": lambda: ends.append(True),
    }
    try:
        parser = MultipartParser(boundary, callbacks, max_header_count=PART_HEADERS, max_header_size=HEADER_BYTES)
        parser.write(body)
        parser.finalize()
    except FormParserError:
        reason = "the multipart body cannot be parsed: its boundaries or headers are wrong"
        raise RequestError(400, "malformed form", reason) from None
    if not ends:
        raise RequestError(400, "truncated form", "the multipart body ends before its last boundary")
    return parts


class Upload(NamedTuple):
    """One encoded image and its name."""

    name: str
    data: bytes


def read_uploads(content_type: str, body: bytes, max_images: int) -> list[Upload]:
    """Reads at least one and at most `max_images` images."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == FORM:
        found = read_form(content_type, body, max_images)
    elif kind == JSON:
        found = read_json(body, max_images)
    else:
        ways = f'send {FORM} with images in the field {FIELD!r}, or {JSON} with {{"images": [base64, ...]}}'
        raise RequestError(415, "content type not supported", f"{kind[:60] or 'no Content-Type'!r}: {ways}")
    if not found:
        raise RequestError(400, "no image", f"send at least one, in the field {FIELD!r} or the JSON's list 'images'")
    return found


def read_form(content_type: str, body: bytes, max_images: int) -> list[Upload]:
    uploads: list[Upload] = []
    for at, part in enumerate(parse_form(content_type, body, max_images), 1):
        kind, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise RequestError(400, "malformed form", 'a part needs "Content-Disposition: form-data; name=..."')
        name, file = (options.get(key, b"").decode("utf-8", "replace")[:LONGEST_NAME] for key in (b"name", b"filename"))
        if name != FIELD:
            raise RequestError(400, "unknown field", f"the form has a field {name!r}; images go into {FIELD!r}")
        uploads.append(Upload(file or f"image {at}", b"".join(part.content)))
    return uploads


def read_json(body: bytes, max_images: int) -> list[Upload]:
    # Before parsing: empty lists by the million would take twenty times the memory of their text.
    if sum(body.count(sign) for sign in (b",", b"[", b"{")) > 8 * max_images + 64:
        raise RequestError(400, "too many values", f"send the key 'images' and at most {max_images} strings")
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "malformed JSON", f"the body cannot be read as JSON: {describe_error(error)}") from None
    images = cast("dict[str, Any]", given).get("images") if isinstance(given, dict) else None
    if not isinstance(images, list) or set(given) != {"images"}:
        raise RequestError(400, "unknown JSON", 'send an object with one key: {"images": [base64, ...]}')
    several = cast("list[Any]", images)
    if len(several) > max_images:
        raise RequestError(400, "too many images", f"{len(several)} sent; one request takes {max_images} at most")
    return [Upload(f"image {at + 1}", decode_base64(text, at)) for at, text in enumerate(several)]


def decode_base64(text: Any, at: int) -> bytes:
    if not isinstance(text, str):
        raise RequestError(400, "unknown JSON", f"images[{at}] is not a string; send each image as base64")
    if text.startswith("data:"):  # what a browser's FileReader gives: the image follows the comma
        text = text.partition(",")[2]
    elif "://" in text[:12]:
        raise RequestError(400, "not base64", f"images[{at}] is a URL, and none is fetched; send the image as base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(400, "not base64", f"images[{at}] is not base64, or is truncated") from None
