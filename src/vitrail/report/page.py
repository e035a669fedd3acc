"""Self-contained HTML pages: no requests to other hosts, embedded images, for light and dark screens, paper and phones.

    text = page("Duplicates", [Table(columns=..., rows=...), Pairs(title=..., pairs=...)], lead="What this shows.")
    save_page(path, text)

Every string is escaped as text: markup in a file name is shown, never interpreted. There is no script, unless a page
uses one of this package's own (`script="explorer.js"`); its policy then allows exactly that text.
"""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

from PIL import Image

from vitrail.core.atomic_files import replace_on_success
from vitrail.core.console import escape_line

if TYPE_CHECKING:
    from jinja2 import Environment

Scheme = Literal["light", "dark"]
Mood = Literal["right", "wrong", ""]

STYLES: Final = ("page.css", "charts.css")
THUMBNAIL: Final = 192  # pixels of the longer side
QUALITY: Final = 80


class Section(Protocol):
    """A part of a page. It is rendered by a template of this package, which gets the section itself."""

    @property
    def template(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under a header; the first `left` columns are text, the others numbers. `links` are the addresses of the
    first cell of each row, or empty; `colours` are shown before it, as "#2c5aa0" or empty."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    left: int = 1
    links: Sequence[str] = ()
    colours: Sequence[str] = ()
    template: str = field(default="table.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """An image as a data URI, or empty if there is none; its caption, a less prominent line, and whether its prediction
    is correct."""

    picture: str
    caption: str
    note: str = ""
    mood: Mood = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two images side by side, with a word for their relation and a note."""

    one: Shot
    other: Shot
    kind: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs of images under a heading; `more` says what is not shown."""

    title: str
    pairs: Sequence[Pair]
    sides: tuple[str, str] = ("", "")  # headings of the two columns
    more: str = ""
    template: str = field(default="pairs.html", init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """A list of lines under a heading."""

    title: str
    lines: Sequence[str]
    more: str = ""
    template: str = field(default="notes.html", init=False)


def render_page(title: str, sections: Sequence[Section], *, lead: str = "", style: str = "", script: str = "") -> str:
    """Renders the whole page as text. `style` and `script` name templates of this package that the page needs in
    addition to the common style."""
    look = "\n".join(["".join(map(read_template, STYLES)).strip(), *([read_template(style)] if style else [])])
    acts = read_template(script) if script else ""
    policy = {"digest": hash_base64(look), "script_digest": hash_base64(acts)}
    texts = {"title": printable(title), "lead": printable(lead), "printable": printable}
    template = load_templates().get_template("page.html")
    return template.render(sections=sections, style=look, script=acts, **policy, **texts)


@lru_cache(maxsize=1)
def load_templates() -> "Environment":
    """Loads the templates once, since a run writes its page many times."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # loaded when a page is made

    loader = PackageLoader("vitrail.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def read_template(name: str) -> str:
    """Reads a file that goes into a page unchanged."""
    return resources.files("vitrail.report").joinpath("templates", name).read_text("utf-8")


@lru_cache(maxsize=2)
def read_palette(scheme: Scheme) -> dict[str, str]:
    """Reads the colours from the style of the pages, by name, such as "#2c5aa0"."""
    light, _, rest = read_template("page.css").partition("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light if scheme == "light" else rest.partition("}")[0]))


def hash_base64(text: str) -> str:
    """The SHA-256 hash of a text in base64, as a Content-Security-Policy names what it allows."""
    return base64.b64encode(sha256(text.encode()).digest()).decode()


def printable(text: str) -> str:
    """Escapes bytes of a file name that are not text, and control characters, so that UTF-8 can encode the result."""
    return escape_line(text)


def to_data_uri(picture: Image.Image, side: int = THUMBNAIL) -> str:
    """A small JPEG of an image, as a data URI for an <img>. Tiny images are enlarged by whole factors, so that their
    pixels stay visible."""
    small = picture.convert("RGB")
    if max(small.size) > side:
        small.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
    elif (times := side // max(small.size)) > 1:
        small = small.resize((small.width * times, small.height * times), Image.Resampling.NEAREST)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def save_page(path: Path, text: str) -> None:
    """Writes the page atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_on_success(path) as file:
        file.write(text.encode())
