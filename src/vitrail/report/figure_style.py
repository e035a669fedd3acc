"""The style of figures, for light and dark backgrounds, and their conversion to files.

matplotlib (the extra `figures`) is loaded when something is drawn. pyplot is not used, so a notebook's own figures and
settings are not affected.
"""

import contextlib
import io
import warnings
from collections.abc import Generator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitrail.core.atomic_files import write_file
from vitrail.core.errors import ConfigError
from vitrail.report.page import Scheme, read_palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Floats = NDArray[np.floating[Any]]
Pixels = NDArray[np.uint8]  # [H, W, 3]

WIDTH: Final = 8.0  # inches of every figure, so that text has one size
DPI: Final = 144


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """Colours of the background, the text and the curves, the same as on the pages."""

    paper: str
    ink: str
    quiet: str
    line: str
    cobalt: str
    ruby: str
    amber: str
    leaf: str
    violet: str
    sky: str

    @property
    def glass(self) -> tuple[str, ...]:
        return (self.cobalt, self.amber, self.leaf, self.ruby, self.violet, self.sky)


def load_theme(scheme: Scheme) -> Theme:
    """Loads the colours of a page, with the background of its cards."""
    colours = read_palette(scheme)
    return Theme(**{one.name: colours[one.name] for one in fields(Theme)} | {"paper": colours["card"]})


LIGHT: Final = load_theme("light")
DARK: Final = load_theme("dark")


def load_matplotlib() -> Any:
    """Imports matplotlib; if it is missing, the error says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib, which is not installed: pip install 'vitrail[figures]'") from None
    return matplotlib


@contextlib.contextmanager
def use_theme(theme: Theme) -> Generator[None]:
    """Draws with this package's own settings, and restores the user's afterwards."""
    paper = ("axes.facecolor", "figure.facecolor", "savefig.facecolor")
    ink, quiet = ("text.color", "axes.titlecolor"), ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    line = ("axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    ours: dict[str, Any] = {
        **dict.fromkeys(paper, theme.paper),
        **dict.fromkeys(ink, theme.ink),
        **dict.fromkeys(quiet, theme.quiet),
        **dict.fromkeys(line, theme.line),
        **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
        "font.family": "DejaVu Sans",
        "axes.axisbelow": True,
        "image.interpolation": "nearest",
        "svg.hashsalt": "vitrail",
        "svg.fonttype": "path",
    }
    matplotlib = load_matplotlib()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(ours)
        yield


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """A new figure with automatic layout."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.04, h_pad=0.04, wspace=0.02, hspace=0.02)
    return figure


@lru_cache(maxsize=1)
def list_characters() -> frozenset[int]:
    """The code points that the font of the figures has."""
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(findfont("DejaVu Sans")).get_charmap())


def make_legible(text: str, longest: int = 40) -> str:
    """Reduces a text to one line of limited length, with characters that the font has."""
    line = "".join(sign if ord(sign) in list_characters() else "?" for sign in " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def map_colours(values: Floats, low: float, high: float, name: str = "magma") -> NDArray[np.uint8]:
    """Maps numbers to colours: [...] -> uint8 [..., 3]. Values up to `low` get the first colour, from `high` the
    last."""
    span = high - low
    place = np.clip((values - low) / span, 0.0, 1.0) if span > 0 else np.zeros(values.shape)
    colours: Any = load_matplotlib().colormaps[name](place)
    return np.rint(255 * colours[..., :3]).astype(np.uint8)


def encode_figure(figure: "Figure", theme: Theme, form: Literal["png", "svg", "webp"]) -> bytes:
    """Encodes a figure as the bytes of a file. Equal figures give equal bytes."""
    out = io.BytesIO()
    options: dict[str, Any] = {
        "svg": {"metadata": {"Date": None, "Creator": None}},
        "webp": {"pil_kwargs": {"quality": 86, "method": 4}},
        "png": {"metadata": {"Software": None}},
    }[form]
    with use_theme(theme):
        figure.savefig(out, format=form, dpi=DPI, **options)
    return out.getvalue()


def save_figure(figure: "Figure", path: Path, theme: Theme = LIGHT) -> tuple[Path, Path]:
    """Writes a figure as PNG and as SVG, each atomically; `path` has no suffix."""
    png, svg = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")
    write_file(png, encode_figure(figure, theme, "png"))
    write_file(svg, encode_figure(figure, theme, "svg"))
    return png, svg
