"""D.5, Figure 12: images per second and the largest batch that fits, by image size, for one network or several.

speeds = [measure_speeds("ViT-B/16", bundle, choose_sizes(bundle.config), device=device, seconds=60, room=free)]
save(draw_figure(speeds), Path("speed"))      # speed.png and speed.svg
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.weights import build_fresh, build_network, replace_head_and_resize, to_bundle
from vitrail.core.precision import Precision
from vitrail.core.text import Pair, pair
from vitrail.evaluation.speed import Speed, SpeedLimits, TimedNetwork, measure_speed
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config
from vitrail.report.figure_style import LIGHT, Theme, make_legible
from vitrail.studies.plots import Panel, SeedLine, plot_lines
from vitrail.studies.statistics import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIZES: Final = (64, 128, 224, 384, 512)  # D.5's
SMALL_SIZES: Final = (16, 32, 64, 128)  # for networks made for 32 px
CPU_SIZES: Final = 3  # the smallest ones, without a GPU
SEED: Final = 0
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSpeeds:
    """A network and its speed at each image size."""

    name: str
    speeds: Mapping[Pair, Speed]


def choose_sizes(config: ModelConfig, device: torch.device) -> tuple[Pair, ...]:
    """D.5's sizes, each rounded down to a multiple of the patch; without a GPU those a CPU can do in a minute. A
    network whose positions are tied to its size has only that one."""
    if config.tied_to_size:
        return (config.image,)
    sizes = SIZES if max(config.image) > 64 else SMALL_SIZES
    step = config.size_step
    fitted = [(size - size % step[0], size - size % step[1]) for size in sizes]
    return tuple(size for size in fitted if prod(size))[: None if device.type == "cuda" else CPU_SIZES]


def draw_random_weights(config: ModelConfig) -> Bundle:
    """A network with random weights: speed does not depend on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return to_bundle(build_fresh(config))


def measure_speeds(
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
) -> NetworkSpeeds:
    """The seconds are divided equally among the sizes; `room` is the device's free memory without the network."""
    for size in sizes:
        adapt_config(bundle.config, image_size=size)  # refuses a size that does not fit before minutes have passed
    limits = SpeedLimits(batches=batches, seconds=seconds / len(sizes), room=room)
    speeds: dict[Pair, Speed] = {}
    for size in map(pair, sizes):
        model = build_network(replace_head_and_resize(bundle, image_size=None if size == bundle.config.image else size))
        passes = TimedNetwork(network=model, device=device, precision=precision)
        head = f"{name} at {size[0]} px"
        speeds[size] = measure_speed(passes, limits, tell=lambda batch, head=head: tell(f"{head}, batch {batch}"))
        del model, passes
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return NetworkSpeeds(name=name, speeds=speeds)


def draw_figure(networks: Sequence[NetworkSpeeds], device: str, theme: Theme = LIGHT) -> "Figure":
    """D.5's two panels: peak images per second and the largest batch, over the image size. For a single network also
    speed and memory over the batch, for each size."""
    tried = all(found.tried for one in networks for found in one.speeds.values())
    where = f"{make_legible(', '.join(one.name for one in networks), 40)} on {make_legible(device, 30)}"
    sizes = {one.name: [(size[0], found) for size, found in one.speeds.items()] for one in networks}
    largest, along = f"largest batch that fits{'' if tried else ' (estimated)'}", "image size [pixels per side]"
    panels = [
        build_panel(sizes, f"{where}: images/s at the best batch", along, lambda found: found.best.images_per_s),
        build_panel(sizes, largest, along, lambda found: found.largest),
    ]
    if len(networks) == 1:
        batches = {
            f"{size[0]} px": [(point.batch, point) for point in found.points]
            for size, found in sorted(networks[0].speeds.items())
        }
        panels.append(build_panel(batches, "images/s", "batch", lambda point: point.images_per_s))
        panels.append(build_panel(batches, "peak memory [MB]", "batch", lambda point: (point.memory or 0) / 1e6))
    return plot_lines(panels, theme)


def build_panel(
    lines: Mapping[str, Sequence[tuple[int, Found]]], title: str, along: str, value: Callable[[Found], float | None]
) -> Panel:
    """Both axes are logarithmic, as in D.5; up to some eight of the measured values are labelled below."""
    drawn = [
        SeedLine(name=name, points=[(x, Spread((y,)) if (y := value(found)) else None) for x, found in points])
        for name, points in lines.items()
    ]
    ticks = sorted({x for points in lines.values() for x, _ in points})
    labels = {float(x): str(x) for x in ticks[:: max(1, len(ticks) // 8)]}
    return Panel(lines=drawn, along=along, up="", title=title, log=True, log_up=True, ticks=labels, scale=1.0)
