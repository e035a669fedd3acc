"""Draws the figures of an inspection from arrays.

figure = draw_heads(distances, "mean attention distance [pixels]", LIGHT)
save(figure, Path("distance"))          # distance.png and distance.svg
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitrail.report import figure_style as style
from vitrail.report.figure_style import Floats, Pixels, Theme, use_theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GAP: Final = 0.05  # inches between images


def show_image(axes: "Axes", picture: Pixels) -> None:
    """Shows an image without axes."""
    axes.imshow(picture, interpolation="nearest" if max(picture.shape[:2]) <= 64 else "antialiased")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def draw_pairs(
    pictures: Sequence[Pixels], overlays: Sequence[Pixels], captions: Sequence[str], theme: Theme
) -> "Figure":
    """Figure 6: each image next to its attention, two of them in a row."""
    flat = [picture for pair in zip(pictures, overlays, strict=True) for picture in pair]
    texts = [text for caption in captions for text in (caption, "")]
    across = 2 if len(pictures) == 1 else 4
    tiles = [flat[at : at + across] for at in range(0, len(flat), across)]
    rows = [texts[at : at + across] for at in range(0, len(texts), across)]
    return draw_sheet(tiles, theme, captions=rows, gaps=2)


def draw_sheet(
    tiles: Sequence[Sequence[Pixels]],
    theme: Theme,
    *,
    columns: Sequence[str] = (),
    rows: Sequence[str] = (),
    captions: Sequence[Sequence[str]] = (),
    bar: tuple[float, float, str] | None = None,
    colours: str = "magma",
    gaps: int = 0,
) -> "Figure":
    """Draws images in rows, with names at the left and above, or with one caption each. `bar` describes a colour bar:
    its ends and its label. With `gaps` there is more space after every `gaps` images."""
    across = max(len(row) for row in tiles)
    shape = tiles[0][0].shape
    left, wide = (0.62 if rows else 0.0), 0.14 if gaps else 0.0
    extra = wide * ((across - 1) // gaps) if gaps else 0.0
    side = (style.WIDTH - left - (across - 1) * GAP - extra) / across
    high, above = side * shape[0] / shape[1], 0.24 if captions else 0.0
    step, top, foot = high + above + (0.08 if captions else GAP), 0.24 if columns else 0.02, 0.6 if bar else 0.02
    height = top + step * len(tiles) + foot
    with use_theme(theme):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(style.WIDTH, height), dpi=style.DPI)
        for at, row in enumerate(tiles):
            for place, picture in enumerate(row):
                x = left + place * (side + GAP) + (wide * (place // gaps) if gaps else 0.0)
                y = height - top - at * step - above - high
                axes = figure.add_axes((x / style.WIDTH, y / height, side / style.WIDTH, high / height))
                show_image(axes, picture)
                if captions and captions[at][place]:
                    text = style.make_legible(captions[at][place], round(15 * (gaps or 1) * side))
                    axes.set_title(text, fontsize=8.5, pad=4, loc="left")
                if at == 0 and place < len(columns):
                    text = style.make_legible(columns[place], round(16 * side))
                    axes.set_title(text, fontsize=8, pad=4, color=theme.quiet)
                if place == 0 and at < len(rows):
                    name = style.make_legible(rows[at], 12)
                    axes.set_ylabel(name, fontsize=8, rotation=0, ha="right", va="center", labelpad=6)
        if bar is not None:
            place = figure.add_axes((0.3, 0.42 / height, 0.4, 0.09 / height))
            add_colour_bar(figure, bar, colours, theme, cax=place, orientation="horizontal")
    return figure


def add_colour_bar(figure: "Figure", ends: tuple[float, float, str], colours: str, theme: Theme, **place: Any) -> None:
    """Adds a colour bar from low to high; `place` are the arguments of matplotlib's `colorbar`."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    low, high, measures = ends
    bar: Any = figure.colorbar(ScalarMappable(Normalize(low, high), cmap=colours), **place)
    bar.set_ticks(np.linspace(low, high, 5).tolist())
    bar.outline.set_visible(False)
    bar.set_label(measures, fontsize=8, color=theme.quiet)
    bar.ax.tick_params(labelsize=7.5, length=2)


def draw_filters(tiles: Floats, theme: Theme) -> "Figure":
    """Figure 7, left: principal components [n, P, P, 3] in [0, 1], seven in a row."""
    across = min(7, len(tiles))
    pixels = np.rint(255 * np.clip(tiles, 0, 1)).astype(np.uint8)
    rows = [list(pixels[at : at + across]) for at in range(0, len(pixels), across)]
    return draw_sheet(rows, theme)


def draw_positions(similarity: Floats, theme: Theme) -> "Figure":
    """Figure 7, centre: one tile per place, cosine similarity of its embedding with all others [gh, gw, gh, gw]."""
    high, wide = similarity.shape[:2]
    lead = max(1, round(0.12 * max(high, wide)))
    paper = [int(theme.paper[at : at + 2], 16) for at in (1, 3, 5)]
    canvas = np.full((high * (high + lead) - lead, wide * (wide + lead) - lead, 3), paper, np.uint8)
    tiles = style.map_colours(similarity, -1.0, 1.0, "viridis")
    for row in range(high):
        for column in range(wide):
            top, left = row * (high + lead), column * (wide + lead)
            canvas[top : top + high, left : left + wide] = tiles[row, column]
    with use_theme(theme):
        figure = style.new_figure(5.6 * high / wide + 0.7, 6.0)
        axes = figure.add_subplot()
        axes.spines[:].set_visible(False)
        axes.imshow(canvas, interpolation="nearest", aspect="equal", extent=(0.5, wide + 0.5, high + 0.5, 0.5))
        axes.set(xticks=space_ticks(wide), yticks=space_ticks(high))
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.tick_params(length=0, labelsize=8)
        ends = (-1.0, 1.0, "cosine similarity")
        add_colour_bar(figure, ends, "viridis", theme, ax=axes, location="bottom", shrink=0.45, aspect=36, pad=0.03)
    return figure


def space_ticks(count: int, most: int = 14) -> list[int]:
    """Evenly spaced integers from 1 to `count`, at most `most` of them."""
    return list(range(1, count + 1, -(-count // most)))


def draw_heads(
    values: Floats, measures: str, theme: Theme, *, reference: float | None = None, label: str = ""
) -> "Figure":
    """Figure 7, right: one dot per head [L, k], the mean of each layer as a line, and even attention for reference."""
    layers, heads = values.shape
    depth = np.arange(1, layers + 1)
    with use_theme(theme):
        figure = style.new_figure(3.6)
        axes = figure.add_subplot()
        style_axes(axes, "layer", measures)
        ordered = np.sort(values, axis=1)
        axes.scatter(
            np.repeat(depth, heads),
            ordered.ravel(),
            s=34 if heads <= 8 else 22,
            color=theme.cobalt,
            alpha=0.75,
            linewidths=0.6,
            edgecolors=theme.paper,
            label="one head",
            zorder=3,
        )
        axes.plot(depth, values.mean(1), color=theme.amber, linewidth=1.8, label="mean of the layer", zorder=2)
        if reference is not None:
            axes.axhline(reference, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)), label=label, zorder=1)
        highest = 1.08 * max(float(values.max()), reference or 0.0, 1e-9)
        axes.set(xticks=space_ticks(layers, 24), xlim=(0.4, layers + 0.6), ylim=(0, highest))
        add_legend(axes, theme)
    return figure


def draw_norms(values: Floats, prefix: Sequence[str], theme: Theme) -> "Figure":
    """Norms of tokens after each layer [L + 1, B, T]: the band of most patches, the largest, and the other tokens."""
    depth = np.arange(values.shape[0])
    patches = values[:, :, len(prefix) :].reshape(len(depth), -1)
    low, middle, high = np.percentile(patches, [5, 50, 95], axis=1)
    largest = patches.max(1)
    with use_theme(theme):
        figure = style.new_figure(3.6)
        axes = figure.add_subplot()
        style_axes(axes, "after layer (0: patches and positions)", "norm of the token")
        axes.fill_between(depth, low, high, color=theme.cobalt, alpha=0.18, linewidth=0, label="90 % of the patches")
        axes.plot(depth, middle, color=theme.cobalt, linewidth=1.8, label="median patch")
        axes.plot(depth, largest, color=theme.ruby, linewidth=1.2, marker="o", markersize=3.5, label="longest patch")
        kinds = [name.rstrip(" 0123456789") for name in prefix]
        colours = dict(zip(dict.fromkeys(kinds), (theme.amber, theme.violet, theme.leaf), strict=False))
        for at, kind in enumerate(kinds):
            colour, plural = colours[kind], "s" if kinds.count(kind) > 1 else ""
            label = None if kind in kinds[:at] else kind + plural
            axes.plot(depth, values[:, :, at].mean(1), color=colour, linewidth=1.5, linestyle="--", label=label)
        if largest.max() > 30 * max(float(middle.min()), 1e-9):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks([int(at) for at in depth] if len(depth) <= 26 else [at - 1 for at in space_ticks(len(depth))])
        add_legend(axes, theme)
    return figure


def draw_matrix(values: Floats, theme: Theme) -> "Figure":
    """CKA between layers [L + 1, L + 1], from 0 to 1."""
    ticks = [at - 1 for at in space_ticks(len(values))]
    with use_theme(theme):
        figure = style.new_figure(5.0, 5.6)
        axes = figure.add_subplot()
        axes.imshow(values, vmin=0, vmax=1, cmap="magma", origin="lower", interpolation="nearest")
        axes.set(xticks=ticks, yticks=ticks, xlabel="layer", ylabel="layer (0: patches and positions)")
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_visible(False)
        add_colour_bar(figure, (0, 1, "linear CKA"), "magma", theme, ax=axes, shrink=0.9, aspect=28)
    return figure


def draw_faithfulness(scores: Mapping[str, tuple[Floats, Floats]], theme: Theme) -> "Figure":
    """Deletion and insertion [B, steps + 1] for each kind of map: the mean over images and its standard error."""
    with use_theme(theme):
        figure = style.new_figure(3.9)
        panels: Any = figure.subplots(1, 2, sharey=True)
        for panel, title in enumerate(("deletion: lower is better", "insertion: higher is better")):
            axes = panels[panel]
            style_axes(axes, f"patches {('deleted', 'inserted')[panel]}", ("probability", "")[panel])
            axes.set_title(title, loc="left", fontsize=9.5, pad=34)
            for at, (name, both) in enumerate(scores.items()):
                values = both[panel]
                share = np.linspace(0, 100, values.shape[1])
                mean = values.mean(0)
                random = name == "random"
                colour = theme.quiet if random else theme.glass[at % len(theme.glass)]
                error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros_like(mean)
                axes.fill_between(share, mean - error, mean + error, color=colour, alpha=0.12, linewidth=0)
                area = np.mean((values[:, 1:] + values[:, :-1]) / 2)  # by the trapezium rule
                look = {"linestyle": "--" if random else "-", "linewidth": 1.7, "label": f"{name} ({area:.3f})"}
                axes.plot(share, mean, color=colour, **look)
            axes.set_xlim(0, 100)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
            add_legend(axes, theme, across=2)
        panels[0].set_ylim(bottom=0)
    return figure


def style_axes(axes: "Axes", along: str, up: str) -> None:
    axes.grid(axis="y", linewidth=0.8)
    axes.set(xlabel=along, ylabel=up)
    axes.tick_params(length=0, labelsize=8)
    axes.spines["left"].set_visible(False)


def add_legend(axes: "Axes", theme: Theme, across: int = 4) -> None:
    """Adds a legend above the plot, clear of all curves."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=across,
        fontsize=8,
        labelcolor=theme.quiet,
        handlelength=1.6,
        columnspacing=1.6,
        borderaxespad=0.2,
    )
