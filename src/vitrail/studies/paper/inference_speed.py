"""D.5, Figure 12: images per second and the largest batch that fits, by image size, for one network or several.

speeds = [measure_speeds("ViT-B/16", bundle, choose_sizes(bundle.config), device=device, seconds=60, room=free)]
save(draw_figure(speeds), Path("speed"))      # speed.png and speed.svg
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import torch

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.weights import build_fresh, build_network, replace_head_and_resize, to_bundle
from vitrail.core.text import Pair, pair
from vitrail.evaluation.frozen.features import Precision
from vitrail.evaluation.speed import Speed, SpeedLimits, SpeedPoint, TimedNetwork, measure_speed
from vitrail.models.family import ModelConfig
from vitrail.models.zoo import adapt_config
from vitrail.report.figure_style import LIGHT, Theme, make_legible
from vitrail.studies.plots import Panel, SeedLine, plot_lines
from vitrail.studies.statistics import Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIZES: Final = (64, 128, 224, 384, 512)  # D.5's
SMALL_SIZES: Final = (16, 32, 64, 128)  # for networks made for 32 px
CPU_SIZES: Final = 3  # the smallest ones, where there is no GPU
SEED: Final = 0


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
    """For a network by name: speed does not depend on the weights."""
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
        adapt_config(bundle.config, image_size=size)  # refuses a size that does not fit before minutes have gone by
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
    return NetworkSpeeds(name=name, speeds=speeds)


def draw_figure(networks: Sequence[NetworkSpeeds], device: str, theme: Theme = LIGHT) -> "Figure":
    """D.5's two panels: peak images per second and the largest batch, over the image size. For a single network also
    speed and memory over the batch, for each size."""
    tried = all(found.tried for one in networks for found in one.speeds.values())
    where = f"{make_legible(', '.join(one.name for one in networks), 40)} on {make_legible(device, 30)}"
    panels = [
        over_sizes(networks, f"{where}: images/s at the best batch", lambda found: found.best.images_per_s),
        over_sizes(networks, f"largest batch that fits{'' if tried else ' (estimated)'}", lambda found: found.largest),
    ]
    if len(networks) == 1:
        speeds = networks[0].speeds
        panels.append(over_batches(speeds, "images/s", lambda point: point.images_per_s))
        panels.append(over_batches(speeds, "peak memory [MB]", lambda point: (point.memory or 0) / 1e6))
    return plot_lines(panels, theme)


def over_sizes(networks: Sequence[NetworkSpeeds], title: str, value: Callable[[Speed], float | None]) -> Panel:
    lines = [
        SeedLine(name=one.name, points=[point_of(size[0], value(found)) for size, found in one.speeds.items()])
        for one in networks
    ]
    sides = sorted({size[0] for one in networks for size in one.speeds})
    return build_panel(lines, title, "image size [pixels per side]", sides)


def over_batches(speeds: Mapping[Pair, Speed], title: str, value: Callable[[SpeedPoint], float]) -> Panel:
    lines = [
        SeedLine(name=f"{size[0]} px", points=[point_of(point.batch, value(point)) for point in found.points])
        for size, found in sorted(speeds.items())
    ]
    batches = sorted({point.batch for found in speeds.values() for point in found.points})
    return build_panel(lines, title, "batch", batches[:: max(1, len(batches) // 8)])


def point_of(x: float, value: float | None) -> tuple[float, Spread | None]:
    return x, Spread((value,)) if value else None


def build_panel(lines: Sequence[SeedLine], title: str, along: str, ticks: Sequence[int]) -> Panel:
    """Both axes are logarithmic, as in D.5; the measured values are labelled below."""
    labels = {float(value): str(value) for value in ticks}
    return Panel(lines=lines, along=along, up="", title=title, log=True, log_up=True, ticks=labels, scale=1.0)
