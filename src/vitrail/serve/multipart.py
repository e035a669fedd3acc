"""multipart/form-data, in memory: parts are pieces of the body that is there already, and no file is ever made."""

from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitrail.serve.refusal import Refused

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
