"""Prints tables on a terminal. rich is loaded when something is printed, so that help stays fast.

No cell is ever truncated. A table that is wider than the terminal gets narrower gaps, then wraps its headers and text.
If that is not enough, it is transposed, or the first cell of each row moves to a line of its own; as a last resort,
every row becomes a block of lines.

Names of files, classes and tensors are untrusted input. An escape sequence in a name could clear the screen, retitle
the window or forge a line; a direction override makes it read as something else. Therefore both standard streams are
escaped while a command runs, and rich consoles escape their input before they add colours.
"""

import contextlib
import os
import re
import sys
from collections.abc import Generator, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


# Control characters except tab and newline, direction overrides, separators of lines and paragraphs, tags, and lone
# surrogates, which stand for bytes of a file name that are not text. Joiners stay: scripts and emoji need them.
UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def escape_controls(text: str) -> str:
    """The text with everything that a terminal might act upon written out: an escape becomes \\x1b."""
    return UNSAFE.sub(lambda found: escape_character(ord(found[0])), text)


def escape_line(text: str) -> str:
    """The same on one line: a newline in a name cannot start a new line."""
    return escape_controls(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def escape_character(number: int) -> str:
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class EscapingStream:
    """A text stream that escapes what is written to it. rich looks for `rich_proxied_file` and writes to it
    directly."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def escape_streams() -> Generator[None]:
    """Escapes stdout and stderr. They stay escaped after an unexpected error: its traceback quotes names, too."""
    before = sys.stdout, sys.stderr
    if isinstance(before[0], EscapingStream):
        yield
        return
    sys.stdout, sys.stderr = (cast(TextIO, EscapingStream(stream)) for stream in before)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before


def make_console(
    *, stderr: bool = False, file: TextIO | None = None, width: int | None = None, highlight: bool = True
) -> "Console":
    """A rich console that escapes text before styling it."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                unsafe = segment.control is None and UNSAFE.search(segment.text)
                yield Segment(escape_controls(segment.text), segment.style) if unsafe else segment

    # While a display is live, rich wraps our proxy in its own, and looks through only one of them: its own
    # control sequences would be written out.
    stream = file or (sys.stderr if stderr else sys.stdout)
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return Clean(stderr=stderr, file=stream, width=width, highlight=highlight)


GAPS: Final = (3, 2)  # spaces between two columns, with enough room and without
PROSE: Final = 20  # text is not wrapped to fewer characters
TURNED: Final = 6  # at most this many rows may become columns
INDENT: Final = "  "


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1) -> None:
    """Prints rows under a header. The first `left` columns are text, aligned left; the rest are numbers, aligned
    right."""
    from rich.text import Text

    cells = [[*map(escape_line, row), *[""] * (len(columns) - len(row))] for row in rows]
    # As wide as the terminal, or as COLUMNS says; the length of lines in a pipe is not limited.
    wide = os.environ.get("COLUMNS", "")
    width = int(wide) if wide.isascii() and wide.isdecimal() else 0
    console = make_console(width=None if sys.stdout.isatty() else width or 10**6, highlight=False)
    room = console.width
    if title:
        console.print(Text(title, style="bold"))
    for gap in GAPS:
        if widths := fit_columns(columns, cells, left, room, gap):
            draw_table(console, columns, cells, left, widths, gap)
            return
    heads, turned = [columns[0], *(row[0] for row in cells)], list(map(list, zip(columns, *cells, strict=True)))[1:]
    if 0 < len(cells) <= TURNED and (widths := fit_columns(heads, turned, 1, room, GAPS[-1])):
        draw_table(console, heads, turned, 1, widths, GAPS[-1])
        return
    rest = [row[1:] for row in cells]
    if widths := fit_columns(columns[1:], rest, left - 1, room - len(INDENT), GAPS[-1]):
        draw_below(console, columns, cells, left, widths)
    else:
        draw_stacked(console, columns, cells)


def fit_columns(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, room: int, gap: int
) -> list[int] | None:
    """The column widths of a table that is at most `room` wide, None if that is impossible: headers and text wrap
    between words, numbers stay whole."""
    from rich.cells import cell_len

    widths, least = list[int](), list[int]()
    for at, head in enumerate(columns):
        column = [row[at] for row in rows]
        whole = max((cell_len(cell) for cell in column), default=0)
        words = [cell_len(word) for cell in column for word in cell.split()]
        narrow = max([min(whole, PROSE), *words]) if at < left else whole
        widths.append(max(whole, cell_len(head)))
        least.append(max([narrow, *map(cell_len, head.split())]))
    room -= gap * (len(columns) - 1) + (2 if gap == GAPS[0] else 0)  # a wide table has a margin
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))
        if widths[widest] <= least[widest]:
            return None
        widths[widest] -= 1
    return widths


def draw_table(
    console: "Console", columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, widths: list[int], gap: int
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=gap == GAPS[0], padding=(0, gap - 2, 0, 1))
    for at, (head, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(Text(head), justify="left" if at < left else "right", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def draw_below(
    console: "Console", columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, widths: list[int]
) -> None:
    """A table whose first column has a line of its own above the others, printed once for all rows that share it."""
    from rich.text import Text

    gap = " " * GAPS[-1]
    console.print(Text(columns[0]))
    for line in wrap_row(columns[1:], widths, left - 1, gap):
        console.print(Text(f"{INDENT}{line}"))
    console.print(Text("─" * (len(INDENT) + sum(widths) + len(gap) * (len(widths) - 1))))
    for at, row in enumerate(rows):
        if at == 0 or row[0] != rows[at - 1][0]:
            console.print(Text(row[0], style="bold"), soft_wrap=True)
        for line in wrap_row(row[1:], widths, left - 1, gap):
            console.print(Text(f"{INDENT}{line}"))


def wrap_row(cells: Sequence[str], widths: Sequence[int], left: int, gap: str) -> list[str]:
    """The lines of one row. Cells wrap between words; text is aligned left, numbers right."""
    from rich.cells import cell_len

    columns = [wrap_words(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines: list[str] = []
    for parts in zip_longest(*columns, fillvalue=""):
        padding = [" " * (width - cell_len(part)) for part, width in zip(parts, widths, strict=True)]
        both = zip(parts, padding, strict=True)
        lines.append(gap.join(p + space if at < left else space + p for at, (p, space) in enumerate(both)).rstrip())
    return lines


def wrap_words(text: str, width: int) -> list[str]:
    from rich.cells import cell_len

    lines = [""]
    for word in text.split(" ") if cell_len(text) > width else [text]:
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line for line in lines if line]


def draw_stacked(console: "Console", columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a block of lines for every row, each cell after its header. Lines that are still too long are wrapped by
    the terminal."""
    from rich.cells import cell_len
    from rich.text import Text

    wide = max(map(cell_len, columns), default=0)
    for row in rows:
        console.print()
        for at, (head, cell) in enumerate(zip(columns, row, strict=True)):
            if cell:
                line = Text(f"{head}{' ' * (wide - cell_len(head))}  ").append(cell, style="" if at else "bold")
                console.print(line, soft_wrap=True)


def format_millions(count: int) -> str:
    """86,567,656 -> "86.57M"."""
    return f"{count / 1e6:,.2f}M"


def format_giga(count: int) -> str:
    """17,563,828,224 -> "17.56"."""
    return f"{count / 1e9:,.2f}"
