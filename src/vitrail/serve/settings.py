"""How a server is set up: where it listens, whom it answers, and how much of anything it takes."""

import math
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import urlsplit

from vitrail.core.errors import ConfigError
from vitrail.data.decode.image import HEAVIEST

LOCAL: Final = ("localhost", "127.0.0.1", "[::1]")
HEAD_BYTES: Final = 16 * 1024  # of a request's head
POSITIVE: Final = ("queue", "batch", "max_bytes", "max_pixels", "max_images", "decoders", "connections")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Limits hold before work is done: bytes before they are read, pixels before they are decoded, images before they
    wait. Times are in seconds."""

    token: str | None = None  # who has none is answered by /health and / alone
    origins: tuple[str, ...] = ()  # pages of other sites that may ask: https://demo.example
    hosts: tuple[str, ...] = ()  # what a request may call this server; empty: anything
    queue: int = 256  # images that are prepared or wait for the network; further ones are turned away with 429
    batch: int = 16  # images in one call of the network
    wait_ms: float = 2.0  # how long a batch that is not full waits for images that are on their way
    timeout_s: float = 30.0  # how long a request waits for its answer
    max_bytes: int = 20 * 2**20  # of a request's body
    max_pixels: int = 40_000_000  # of one image
    max_images: int = 64  # in one request
    attention_bytes: int = 32 * 2**20  # of the maps in one answer
    decoders: int = 2  # threads that read images
    read_s: float = 20.0  # for a whole body
    head_s: float = 10.0  # for a request's head
    write_s: float = 20.0  # that a reader may let an answer wait
    linger_s: float = 2.0  # that the rest of a refused body is read and thrown away
    stuck_s: float = 120.0  # after which a worker that does not come back is given up
    drain_s: float = 30.0  # to answer what is in flight when told to stop
    farewell_s: float = 0.5  # at least, that requests get 503 when told to stop, before connections are closed
    connections: int = 512  # open at once
    access_log: bool = False

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for field in fields(self):
            if field.name.endswith("_s"):
                value: float = getattr(self, field.name)
                if not (value > 0 and math.isfinite(value)):
                    raise ConfigError(f"{field.name}={value:g} must be above 0")
        if not 0 <= self.wait_ms <= 1000:
            raise ConfigError(f"wait_ms={self.wait_ms:g} must be between 0 and 1000")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError(
                "the token is empty or has signs that a header cannot carry; take printable ASCII, or none"
            )
        for origin in self.origins:
            check_origin(origin)

    @property
    def memory(self) -> int:
        """Bytes of bodies that all requests together may hold."""
        return max(4 * self.max_bytes, 64 * 2**20)

    @property
    def decode_bytes(self) -> int:
        """Bytes that all images together may take while they are decoded: as many as the largest that is let in."""
        return HEAVIEST * self.max_pixels + 2 * self.max_bytes

    @property
    def most_images(self) -> int:
        """Images in one request: never more than could all wait."""
        return min(self.max_images, self.queue)


def check_origin(origin: str) -> None:
    """An origin is a scheme and a host, and a port where it is not the usual one."""
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
        raise ConfigError(f"--origin {origin}: give scheme and host alone, as in https://demo.example")


def hosts_for(host: str, *, loopback: bool, origins: tuple[str, ...]) -> tuple[str, ...]:
    """What a server may be called. One on loopback is called by its own names only: a page whose name was made to point
    there (DNS rebinding) is not answered. For others the token is the guard, and any name will do."""
    if not loopback:
        return ()
    named = f"[{host}]" if ":" in host else host.lower()
    return tuple(dict.fromkeys([*LOCAL, named, *(bare_host(urlsplit(origin).netloc) for origin in origins)]))


def bare_host(host: str) -> str:
    """Without the port: "127.0.0.1:8000" -> "127.0.0.1", "[::1]:8000" -> "[::1]"."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
