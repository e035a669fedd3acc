"""Bodies of requests, read into memory within limits of size, time and what all of them hold together.

multipart/form-data, in memory: parts are pieces of the body that is there already, and no file is ever made.

The images of a request, as bytes: a form's files, or base64 in JSON. No address is fetched, no path is opened.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers

from vitrail.core.errors import describe_error
from vitrail.serve.http_errors import Gone, Refused, busy
from vitrail.serve.settings import Settings

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Budget:
    """Bytes of bodies in memory. What came counts, not what was announced: a claim costs nothing."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0


class Claim(AbstractContextManager["Claim"]):
    """What one request holds of a budget, until it is answered."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.size = budget, 0

    def take(self, size: int) -> None:
        if self.budget.held + size > self.budget.most:
            raise busy("the bodies of other requests fill the memory set aside for them; try again in a moment")
        self.budget.held += size
        self.size += size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.budget.held -= self.size
        self.size = 0


async def read_body(headers: Headers, receive: Receive, settings: Settings, claim: Claim) -> bytes:
    """A whole body. Refused where it is announced or turns out to be too long, or takes too long to come."""
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Refused(415, "packed body", f"Content-Encoding {coding[:40]!r} is not read; send the body as it is")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > settings.max_bytes:
        raise too_long(settings)
    pieces, size = list[bytes](), 0
    try:
        async with asyncio.timeout(settings.read_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                piece: bytes = message.get("body", b"")
                size += len(piece)
                if size > settings.max_bytes:
                    raise too_long(settings)
                claim.take(len(piece))
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        raise Refused(
            408,
            "body too slow",
            f"{size:,} bytes came in {settings.read_s:g} s; a whole body has to",
            headers={"Connection": "close"},
        ) from None


def too_long(settings: Settings) -> Refused:
    return Refused(
        413,
        "body too large",
        f"a request's body may have {settings.max_bytes:,} bytes; send a smaller image, or fewer at once",
    )


HEADERS: Final = 8  # of one part; a browser sends two or three
HEADER_BYTES: Final = 4096  # of one line
LONGEST_NAME: Final = 200  # signs of a file's name that are told back


@dataclass(slots=True)
class Part:
    """One field of a form as it is gathered."""

    headers: dict[str, bytes] = field(default_factory=dict[str, bytes])
    pieces: list[bytes] = field(default_factory=list[bytes])


class Gatherer:
    """What the parser calls as it goes through a body."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.parts: list[Part] = []
        self.whole = False
        self._name = self._value = b""

    def part_begin(self) -> None:
        if len(self.parts) >= self.most:
            raise Refused(400, "too many parts", f"a form may have {self.most} parts; send the rest in another request")
        self.parts.append(Part())

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].pieces.append(data[start:end])

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        self.parts[-1].headers[self._name.decode("latin-1").lower()] = self._value
        self._name = self._value = b""

    def end(self) -> None:
        self.whole = True


def parse_form(content_type: str, body: bytes, most: int) -> list[tuple[str, str, bytes]]:
    """Field name, file name and content of every part, at most `most` of them. Refused where the form is not sound."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise Refused(400, "form without a boundary", "Content-Type: multipart/form-data needs a boundary=...")
    form = Gatherer(most)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.part_begin,
                "on_part_data": form.part_data,
                "on_header_field": form.header_field,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_end": form.end,
            },
            max_header_count=HEADERS,
            max_header_size=HEADER_BYTES,
        )
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise Refused(
            400, "unsound form", "the multipart body cannot be taken apart: its boundaries or headers are wrong"
        ) from None
    if not form.whole:
        raise Refused(400, "truncated form", "the multipart body ends before its last boundary")
    return [named(part) for part in form.parts]


def named(part: Part) -> tuple[str, str, bytes]:
    kind, options = parse_options_header(part.headers.get("content-disposition", b""))
    if kind != b"form-data" or b"name" not in options:
        raise Refused(400, "unsound form", 'a part needs "Content-Disposition: form-data; name=..."')
    name, file = (options.get(key, b"").decode("utf-8", "replace")[:LONGEST_NAME] for key in (b"name", b"filename"))
    return name, file, part.pieces[0] if len(part.pieces) == 1 else b"".join(part.pieces)


FIELD: Final = "image"
FORM: Final = "multipart/form-data"
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Upload:
    """One image, not decoded, and what its sender calls it."""

    name: str
    data: bytes


def uploads(content_type: str, body: bytes, most: int) -> list[Upload]:
    """At least one and at most `most` images. Refused says what is wrong with the body."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == FORM:
        found = of_form(content_type, body, most)
    elif kind == JSON:
        found = of_json(body, most)
    else:
        raise Refused(
            415,
            "content type not read",
            f"{kind[:60] or 'no Content-Type'!r}: send {FORM} with images in the field {FIELD!r}, or {JSON} with "
            '{"images": [base64, ...]}',
        )
    if not found:
        raise Refused(400, "no image", f"send at least one, in the form's field {FIELD!r} or the JSON's list 'images'")
    return found


def of_form(content_type: str, body: bytes, most: int) -> list[Upload]:
    found = list[Upload]()
    for form_field, name, data in parse_form(content_type, body, most):
        if form_field != FIELD:
            raise Refused(400, "unknown field", f"the form has a field {form_field!r}; images go into {FIELD!r}")
        found.append(Upload(name or f"image {len(found) + 1}", data))
    return found


def of_json(body: bytes, most: int) -> list[Upload]:
    # Before anything is made of it: empty lists by the million would take twenty times the memory of their text.
    if sum(body.count(sign) for sign in (b",", b"[", b"{")) > 8 * most + 64:
        raise Refused(400, "too many values", f"an object with the key 'images' and at most {most} strings is wanted")
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        words = describe_error(error)
        raise Refused(400, "unsound JSON", f"the body cannot be read as JSON: {words}") from None
    if not isinstance(given, dict) or set(cast("dict[str, Any]", given)) != {"images"}:
        raise Refused(400, "unknown JSON", 'an object with one key is wanted: {"images": [base64, ...]}')
    images = cast("dict[str, Any]", given)["images"]
    if not isinstance(images, list):
        raise Refused(400, "unknown JSON", "'images' has to be a list of base64 strings")
    several = cast("list[Any]", images)
    if len(several) > most:
        raise Refused(400, "too many images", f"{len(several)} are in 'images'; at most {most} go in one request")
    return [Upload(f"image {at + 1}", decoded(text, at)) for at, text in enumerate(several)]


def decoded(text: Any, at: int) -> bytes:
    if not isinstance(text, str):
        raise Refused(400, "unknown JSON", f"images[{at}] is not a string; each image is one, in base64")
    if text.startswith("data:"):  # what a browser's FileReader gives: the image is in there
        text = text.partition(",")[2]
    elif "://" in text[:12]:
        raise Refused(
            400, "not base64", f"images[{at}] is an address; none is fetched: send the image itself, in base64"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, "not base64", f"images[{at}] is not base64, or is cut short") from None
