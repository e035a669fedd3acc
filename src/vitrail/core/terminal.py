"""What may reach a terminal: text, and the escape sequences that we ourselves write, never those of a file's name.

Names of files, classes and tensors come from others. One with an escape sequence in it could clear the screen, retitle
the window or forge a line; one with a direction override reads as something else. So both streams are guarded while a
command runs, and consoles of rich's clean what they are given before they add their own colours.
"""

import contextlib
import re
import sys
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# Controls but tab and newline, what turns the direction of text, separators of lines and paragraphs, tags, and halves
# of characters, which stand for the bytes of a file's name that are no text. Joiners stay: scripts and emoji need them.
UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def clean(text: str) -> str:
    """The text with whatever a terminal might act upon written out: an escape becomes \\x1b."""
    return UNSAFE.sub(lambda found: written_out(found[0]), text)


def clean_line(text: str) -> str:
    """The same in one line: a name that contains a newline cannot begin a line of its own."""
    return clean(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def written_out(sign: str) -> str:
    number = ord(sign)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class Guarded:
    """A text stream that cleans what is written to it. rich looks for `rich_proxied_file` and writes there itself."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def guarded_streams() -> Generator[None]:
    """stdout and stderr, cleaned. They stay so where an error nobody foresaw goes through: its traceback quotes names,
    too."""
    before = sys.stdout, sys.stderr
    if isinstance(before[0], Guarded):
        yield
        return
    sys.stdout, sys.stderr = (cast(TextIO, Guarded(stream)) for stream in before)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before


def make_console(
    *, stderr: bool = False, file: TextIO | None = None, width: int | None = None, highlight: bool = True
) -> "Console":
    """A console of rich's that cleans text before it is styled."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                unsafe = segment.control is None and UNSAFE.search(segment.text)
                yield Segment(clean(segment.text), segment.style) if unsafe else segment

    stream = file or (sys.stderr if stderr else sys.stdout)
    return Clean(stderr=stderr, file=innermost(stream), width=width, highlight=highlight)


def innermost(stream: TextIO) -> TextIO:
    """The stream itself. While a display is live rich puts a proxy of its own around ours, and looks through one of
    them only: its own control sequences would be written out."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return stream
