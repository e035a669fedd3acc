"""Tables on a terminal. rich is loaded when something is printed, so that help stays quick."""

import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1) -> None:
    """Rows under a header; the first `left` columns are text and stand left, the rest are numbers and stand right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [tuple(row) for row in rows]
    # A pipe is never cut.
    widest = sum(3 + max(map(len, cells)) for cells in zip_longest(columns, *rows, fillvalue=""))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else max(widest, 200), highlight=False)
    if title:
        console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def millions(count: int) -> str:
    """86,567,656 -> "86.57M"."""
    return f"{count / 1e6:,.2f}M"


def giga(count: int) -> str:
    """17,563,828,224 -> "17.56"."""
    return f"{count / 1e9:,.2f}"
