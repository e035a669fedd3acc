"""D.5, Figure 12: images a second and the largest batch that fits, by image size, for one network or several.

found = [measured("ViT-B/16", bundle, sizes_for(bundle.config), device=device, seconds=60, room=free)]
save(figure(found), Path("speed"))      # speed.png and speed.svg
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.weights import build_fresh, build_network, replace_head_and_resize, to_bundle
from vitrail.core.text import Pair, pair
from vitrail.evaluation.frozen.features import Precision
from vitrail.evaluation.speed import Speed, SpeedLimits, TimedNetwork, measure_speed
from vitrail.inspection.figures import style_axes
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config
from vitrail.report.figure_style import LIGHT, Theme, blank, legible, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SIZES: Final = (64, 128, 224, 384, 512)  # D.5's
SMALL_SIZES: Final = (16, 32, 64, 128)  # for networks made for 32 px
ON_HOST: Final = 3  # of these, the smallest, where there is no GPU
SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A network and its speed at each image size."""

    name: str
    speeds: Mapping[Pair, Speed]


def sizes_for(config: ModelConfig, device: torch.device) -> tuple[Pair, ...]:
    """D.5's sizes, each brought down to what the patch divides; those a CPU can do in a minute where there is no GPU.
    A network whose positions are tied to its size has that one alone."""
    if config.tied_to_size:
        return (config.image,)
    sizes = SIZES if max(config.image) > 64 else SMALL_SIZES
    step = config.size_step
    fitted = [(size - size % step[0], size - size % step[1]) for size in sizes]
    return tuple(size for size in fitted if prod(size))[: None if device.type == "cuda" else ON_HOST]


def random_weights(config: ModelConfig) -> Bundle:
    """Of a network by name: speed does not depend on the numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return to_bundle(build_fresh(config))


def measured(
    name: str,
    bundle: Bundle,
    sizes: Sequence[int | Pair],
    *,
    device: torch.device,
    precision: Precision,
    batches: tuple[int, ...] = (),
    seconds: float,
    room: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Each size has an equal part of the seconds. `room` is what the device has free before the network is there."""
    for size in sizes:
        adapt_config(bundle.config, image_size=size)  # one that does not fit is said before minutes have gone by
    limits = SpeedLimits(batches=batches, seconds=seconds / len(sizes), room=room)
    speeds: dict[Pair, Speed] = {}
    for size in map(pair, sizes):
        model = build_network(replace_head_and_resize(bundle, image_size=None if size == bundle.config.image else size))
        passes = TimedNetwork(network=model, device=device, precision=precision)
        heading = f"{name} at {size[0]} px"
        speeds[size] = measure_speed(
            passes, limits, tell=lambda batch, heading=heading: tell(f"{heading}, batch {batch}")
        )
        del model, passes
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Measured(name=name, speeds=speeds)


def figure(networks: Sequence[Measured], device: str, theme: Theme = LIGHT) -> "Figure":
    """D.5's two panels: peak images a second and the largest batch, over the image size. For one network alone two
    more: how speed and memory go with the batch at each size."""
    single = networks[0] if len(networks) == 1 else None
    sure = all(found.tried for one in networks for found in one.speeds.values())
    reckoned = "largest batch that fits" if sure else "largest batch that fits (reckoned)"
    with styled(theme):
        drawn = blank(3.4 + (3.2 if single else 0))
        panels: Any = drawn.subplots(2 if single else 1, 2, squeeze=False)
        over_sizes(
            panels[0, 0], networks, theme, "images a second, at the best batch", lambda one: one.best.images_per_s
        )
        over_sizes(panels[0, 1], networks, theme, reckoned, lambda one: one.largest)
        if single is None:
            keyed(panels[0, 0], theme)
        else:
            over_batches(panels[1, 0], single, theme, "images a second", lambda point: point.images_per_s)
            over_batches(panels[1, 1], single, theme, "peak memory [MB]", lambda point: (point.memory or 0) / 1e6)
            keyed(panels[1, 0], theme)
        names = legible(", ".join(one.name for one in networks), 60)
        drawn.suptitle(f"{names} on {legible(device, 40)}: inference", fontsize=10, x=0.01, ha="left")
    return drawn


def over_sizes(
    axes: "Axes",
    networks: Sequence[Measured],
    theme: Theme,
    title: str,
    value: Callable[[Speed], float | None],
) -> None:
    style_axes(axes, "image size [pixels a side]", "")
    axes.set_title(title, loc="left", pad=8)
    sides: set[int] = set()
    for at, one in enumerate(networks):
        places = [(size[0], value(found)) for size, found in sorted(one.speeds.items())]
        known = [(side, height) for side, height in places if height]
        sides |= {side for side, _ in places}
        if known:
            colour = theme.glass[at % len(theme.glass)]
            axes.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=4.5, label=legible(one.name))
    logarithmic(axes, sorted(sides))


def over_batches(axes: "Axes", one: Measured, theme: Theme, title: str, value: Callable[[Any], float]) -> None:
    style_axes(axes, "batch", "")
    axes.set_title(title, loc="left", pad=8)
    batches: set[int] = set()
    for at, (size, found) in enumerate(sorted(one.speeds.items())):
        points = [(point.batch, value(point)) for point in found.points if value(point)]
        batches |= {batch for batch, _ in points}
        if points:
            colour = theme.glass[at % len(theme.glass)]
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=f"{size[0]} px")
    logarithmic(axes, sorted(batches)[:: max(1, len(batches) // 8)])


def keyed(axes: "Axes", theme: Theme) -> None:
    axes.legend(loc="best", fontsize=8, labelcolor=theme.quiet, handlelength=1.6)


def logarithmic(axes: "Axes", below: Sequence[int]) -> None:
    """Both axes, as D.5 has them; below stand the values that were taken, and numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(below), [str(value) for value in below])
    low, high = axes.get_ylim()
    few = high / low < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
