"""Settings of the server: access and limits."""

import math
from dataclasses import dataclass, fields
from typing import Final
from urllib.parse import urlsplit

from vitrail.core.errors import ConfigError
from vitrail.data.decode.image import MORE

LOCAL: Final = ("localhost", "127.0.0.1", "[::1]")
HEAD_BYTES: Final = 16 * 1024  # of a request's head, at most
POSITIVE: Final = ("queue", "batch", "max_bytes", "max_pixels", "max_images", "decoders", "connections")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Limits apply before any work: bytes before they are read, pixels before they are decoded, images before they
    queue. Times are in seconds."""

    token: str | None = None  # clients without it reach only /health and /
    origins: tuple[str, ...] = ()  # other sites whose pages may use the server: https://demo.example
    hosts: tuple[str, ...] = ()  # accepted names of this server; empty: any
    queue: int = 256  # images that wait or are being prepared; further ones get 429
    batch: int = 16  # images per call of the model
    wait_ms: float = 2.0  # how long a batch that is not full waits for images that are being prepared
    timeout_s: float = 30.0  # of a request, until its answer
    max_bytes: int = 20 * 2**20  # of a request's body
    max_pixels: int = 40_000_000  # of one image
    max_images: int = 64  # per request
    attention_bytes: int = 32 * 2**20  # of the maps in one answer
    decoders: int = 2  # decoding threads
    read_s: float = 20.0  # for a whole body
    head_s: float = 10.0  # for a request's head
    write_s: float = 20.0  # how long a client may leave an answer unread
    linger_s: float = 2.0  # how long the rest of a rejected body is read and dropped
    stuck_s: float = 120.0  # after which a model thread that hangs is replaced
    drain_s: float = 30.0  # to answer requests in flight at shutdown
    farewell_s: float = 0.5  # at least, during which requests get 503 at shutdown before connections are closed
    connections: int = 512  # open at once
    access_log: bool = False

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (field.name for field in fields(self) if field.name.endswith("_s")):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name):g} must be above 0")
        if not 0 <= self.wait_ms <= 1000:
            raise ConfigError(f"wait_ms={self.wait_ms:g} must be between 0 and 1000")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("the token is empty or has characters that a header cannot carry; use printable ASCII")
        for origin in self.origins:  # a scheme and a host, with a port where it is not the default one
            scheme, host, *_ = urlsplit(origin)
            if scheme not in ("http", "https") or not host or origin != f"{scheme}://{host}":
                raise ConfigError(f"--origin {origin}: give only scheme and host, as in https://demo.example")

    @property
    def decode_bytes(self) -> int:
        """Bytes for decoding all images together: what the largest accepted image needs."""
        return max(MORE.values()) * self.max_pixels + 2 * self.max_bytes

    @property
    def most_images(self) -> int:
        """Images per request: never more than the queue holds."""
        return min(self.max_images, self.queue)


def allowed_hosts(host: str, *, loopback: bool, origins: tuple[str, ...]) -> tuple[str, ...]:
    """The accepted names of a server. On loopback only its own: a page whose name was made to point there (DNS
    rebinding) is rejected. Elsewhere the token protects it, and any name is accepted."""
    if not loopback:
        return ()
    name = f"[{host}]" if ":" in host else host.lower()
    return tuple(dict.fromkeys([*LOCAL, name, *(strip_port(urlsplit(origin).netloc) for origin in origins)]))


def strip_port(host: str) -> str:
    """The host alone: "127.0.0.1:8000" -> "127.0.0.1", "[::1]:8000" -> "[::1]"."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()
