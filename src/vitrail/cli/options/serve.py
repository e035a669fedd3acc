"""Serve a model over HTTP, with a page to try it: /predict, /attention and /embed take images, /docs says how.

Without WEIGHTS it is the small network that comes with vitrail. SIGTERM or Ctrl-C answers what is in flight and stops;
a second one stops at once."""

import argparse
from dataclasses import dataclass

from vitrail.cli.options.groups import add_device, add_labels

TOKEN = "VITRAIL_TOKEN"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """The options of `vitrail serve`."""

    weights: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    origin: tuple[str, ...] = ()
    queue: int = 256
    batch: int | None = None
    wait_ms: float = 2.0
    timeout: float = 30.0
    read_timeout: float = 20.0
    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000
    labels: str | None = None
    rename: tuple[str, ...] = ()
    image_size: int | None = None
    device: str = "auto"
    threads: int | None = None
    access_log: bool = False


OPTIONS = ServeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "weights",
        metavar="WEIGHTS",
        nargs="?",
        help="a file, a folder or a name (default: the network that comes along)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes one that is free (default: 8000)")
    parser.add_argument(
        "--token", metavar="T", help=f"that requests have to carry (default: ${TOKEN}, where it is set)"
    )
    parser.add_argument("--origin", action="append", default=[], metavar="URL", help="a site whose pages may ask, too")
    parser.add_argument("--queue", type=int, default=256, metavar="N", help="images that may wait (default: 256)")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="images in one call of the network (default: 16, on a GPU 64)"
    )
    parser.add_argument(
        "--wait-ms", type=float, default=2.0, metavar="MS", help="that a batch waits to be filled (default: 2)"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds that a request waits at most (default: 30)"
    )
    parser.add_argument(
        "--read-timeout", type=float, default=20.0, metavar="S", help="seconds for a body to come (default: 20)"
    )
    parser.add_argument(
        "--max-bytes", type=int, default=20 * 2**20, metavar="N", help="of a request's body (default: 20 MiB)"
    )
    parser.add_argument(
        "--max-pixels", type=int, default=40_000_000, metavar="N", help="of one image (default: 40 million)"
    )
    add_labels(parser)
    parser.add_argument("--image-size", type=int, metavar="N", help="pixels a side; positions are resized")
    add_device(parser)
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of the network on a CPU (default: one less than there are cores)"
    )
    parser.add_argument("--access-log", action="store_true", help="a line for each request, on stderr")
