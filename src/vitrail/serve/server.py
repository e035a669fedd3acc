"""uvicorn around a service: binds first, says so when it is ready, and stops in order.

SIGTERM or Ctrl-C: /ready and all new work get 503 at once, what is in flight is answered, then the server ends.
A second one ends it without waiting.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from ipaddress import ip_address
from typing import Any, Final

import uvicorn

from vitrail.core.errors import ConfigError
from vitrail.serve.app import application
from vitrail.serve.connection_timeouts import watched
from vitrail.serve.middleware import Guard
from vitrail.serve.service import Service
from vitrail.serve.settings import HEAD_BYTES

INTERRUPTED: Final = 130
SWITCH_S: Final = 0.001  # how long a thread may keep the others from Python; 5 ms by default, a hundred times a batch


def bound(host: str, port: int) -> socket.socket:
    """A socket that has its address and does not listen yet, so that a taken port is known before a model is loaded."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: ports go from 0 (any that is free) to 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--host {host}: {getattr(error, 'strerror', None) or error}; give an address of this machine"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise refused(error, host, port) from None
    return listener


def refused(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port {port}: something listens there already; take another one, or 0 for any that is free"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port}: ports below 1024 are the system's; take one above, 8000 say")
    return ConfigError(f"--host {host}: {error.strerror}; give an address of this machine, 127.0.0.1 say")


def is_loopback(listener: socket.socket) -> bool:
    return ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


def address(listener: socket.socket) -> str:
    """What a person types into a browser."""
    name: tuple[str, int] = listener.getsockname()[:2]
    host, port = name
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, but for how it starts and stops."""

    def __init__(self, config: uvicorn.Config, service: Service, guard: Guard, announce: Callable[[], object]) -> None:
        super().__init__(config)
        self.service, self.guard, self.announce = service, guard, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()

    async def main_loop(self) -> None:
        """Until told to stop, then until what is in flight is answered; a client that asks meanwhile
        is told 503 and not cut off."""
        await super().main_loop()
        settings, time = self.service.settings, asyncio.get_running_loop().time
        told = time()
        while not self.force_exit and time() < told + (
            settings.drain_s if self.guard.active else min(settings.farewell_s, settings.drain_s)
        ):
            await asyncio.sleep(0.02)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = self.service.draining = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """uvicorn would die of the signal once it has stopped; to have stopped when told to is a success."""
        if threading.current_thread() is not threading.main_thread():  # where no signal arrives
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_for(service: Service, announce: Callable[[], object] = lambda: None) -> Server:
    """A server that is not running yet."""
    guard = application(service)
    config = uvicorn.Config(
        guard,
        http=watched(service.settings),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )
    return Server(config, service, guard, announce)


async def serve(server: Server, listener: socket.socket) -> None:
    """From a warm network to the last answer."""
    async with server.service.running():
        await server.serve(sockets=[listener])


def run(service: Service, listener: socket.socket, announce: Callable[[], object]) -> int:
    """Serves until told to stop: 0, or 130 where it was told twice."""
    for library in ("uvicorn", "python_multipart"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # every oddity of a client's would be a line
    server = server_for(service, announce)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(serve(server, listener))
    finally:
        sys.setswitchinterval(before)
    return INTERRUPTED if server.force_exit else 0
