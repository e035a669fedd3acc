"""uvicorn around a service: binds first, announces when it is ready, times out slow clients, and shuts down in order.

SIGTERM or Ctrl-C: /ready and all new work get 503 at once, requests in flight are answered, then the server exits.
A second signal exits without waiting.
"""

import asyncio
import contextlib
import errno
import logging
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from ipaddress import ip_address
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.core.errors import ConfigError
from vitrail.serve.app import make_application
from vitrail.serve.http_errors import to_json
from vitrail.serve.middleware import SECURITY_HEADERS
from vitrail.serve.service import Service
from vitrail.serve.settings import HEAD_BYTES, ServeSettings

INTERRUPTED: Final = 130
SWITCH_S: Final = 0.001  # how long a thread may hold the GIL; the default of 5 ms would cost up to 100 waits per batch
LENGTHS: Final = {b"content-length", b"transfer-encoding"}
END_OF_HEAD: Final = re.compile(rb"\n\r?\n")


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet, so that a taken port is known before a model is loaded."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} must be between 0 (any free port) and 65535")
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host}: {reason}; give an address of this machine") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        rule = {
            errno.EADDRINUSE: f"--port {port} is already in use; use another one, or 0 for any free port",
            errno.EACCES: f"--port {port} is below 1024 and reserved for the system; use a higher one, such as 8000",
        }.get(error.errno or 0, f"--host {host}: {error.strerror}; give an address of this machine, such as 127.0.0.1")
        raise ConfigError(rule) from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    return ip_address(str(listener.getsockname()[0]).partition("%")[0]).is_loopback


def browser_address(listener: socket.socket) -> str:
    """The address to type into a browser."""
    host, port = (str(part) for part in listener.getsockname()[:2])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class StrictParser(h11.Connection):
    """h11's parser, stricter in two ways: a head has a size limit however it arrives (h11 limits only heads that come
    in parts), and a request with two lengths is invalid (RFC 9112, 6.3). `fault` says why a request was rejected."""

    fault: tuple[int, str, str] = (400, "not HTTP", "this is not a valid HTTP/1.1 request")

    def __init__(self, limit: int) -> None:
        super().__init__(h11.SERVER, limit)
        self.limit = limit

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            waiting = self.trailing_data[0]
            if len(waiting) > self.limit and not END_OF_HEAD.search(waiting, 0, self.limit):
                self.reject(431, "head too large", f"a request's head is limited to {self.limit:,} bytes")
        event = super().next_event()
        if isinstance(event, h11.Request) and {name for name, _ in event.headers} >= LENGTHS:
            self.reject(400, "two lengths", "send Content-Length or Transfer-Encoding, not both")
        return event

    def reject(self, status: int, error: str, reason: str) -> None:
        self.fault = (status, error, reason)
        raise h11.RemoteProtocolError(reason, error_status_hint=status)


class TimedConnection(H11Protocol):
    """uvicorn's connection with timeouts for a request's head, for the rest of a body that was rejected before it was
    read, and for an answer that the client does not read. The timeout of a body is in requests.py. Subclasses
    hold the settings."""

    settings: ServeSettings

    def __init__(self, *args: Any, **more: Any) -> None:  # the arguments of uvicorn
        super().__init__(*args, **more)
        self.conn = StrictParser(self.config.h11_max_incomplete_event_size or HEAD_BYTES)
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by what is waited for: "head", "linger", "stall"
        self._rejected = False  # further input is discarded

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.settings.connections:
            self.reject(503, "too many connections", f"{self.settings.connections} are open; try again in a moment")
        else:
            self._set_timer("head", self.settings.head_s, self.on_late_head)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._rejected:
            return
        super().data_received(data)
        self._update_timers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            # Rejected before the body came. It is discarded for a while, so that its sender gets to read the answer.
            self._unset_keepalive_if_required()
            self._set_timer("linger", self.settings.linger_s, self.transport.abort)
        self._update_timers()

    def _update_timers(self) -> None:
        """After each event: stops and starts the timers for what is awaited now."""
        if self._rejected:
            return
        if self.conn.their_state is not h11.SEND_BODY:
            self._stop_timer("linger")
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer("head")
        elif "head" not in self._timers and self.timeout_keep_alive_task is None:
            self._set_timer("head", self.settings.head_s, self.on_late_head)

    def on_late_head(self) -> None:
        self._timers.pop("head", None)
        if not self.conn.trailing_data[0]:  # browsers open connections ahead of need; this one was never used
            self.transport.close()
            return
        self.reject(408, "head too slow", f"a request's head must arrive within {self.settings.head_s:g} s")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer("stall", self.settings.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer("stall")

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for the client to read
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        assert isinstance(self.conn, StrictParser)
        self.reject(*self.conn.fault, linger=True)

    def reject(self, status: int, error: str, reason: str, *, linger: bool = False) -> None:
        """Answers before there is a request, and closes. With `linger`, it closes only once the sender has, or after a
        while: closing while bytes arrive would reset the connection, and the answer would be lost."""
        if self.transport.is_closing():
            return
        self._rejected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = to_json({"error": error, "reason": reason})
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            if status == 503:
                headers["retry-after"] = "1"
            response = h11.Response(status_code=status, headers=[*headers.items(), *SECURITY_HEADERS], reason=b"")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            self._stop_timer("head")
            self._set_timer("linger", self.settings.linger_s, self.transport.abort)
        else:
            self.transport.close()

    def _set_timer(self, name: str, seconds: float, call: Callable[[], object]) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, call)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


class Server(uvicorn.Server):
    """uvicorn's server with changed startup and shutdown."""

    def __init__(self, service: Service, announce: Callable[[], object] = lambda: None) -> None:
        self.service, self.announce, self.application = service, announce, make_application(service)
        connection = type("Connection", (TimedConnection,), {"settings": service.settings})
        options: dict[str, Any] = {"loop": "asyncio", "ws": "none", "lifespan": "off", "log_config": None}
        options |= {"access_log": False, "proxy_headers": False, "server_header": False, "timeout_keep_alive": 15}
        options |= {"timeout_graceful_shutdown": 2, "h11_max_incomplete_event_size": HEAD_BYTES}
        super().__init__(uvicorn.Config(self.application, http=connection, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.announce()

    async def main_loop(self) -> None:
        """Runs until a signal, then until requests in flight are answered; new requests meanwhile get 503 rather than
        a closed connection."""
        await super().main_loop()
        settings, time = self.service.settings, asyncio.get_running_loop().time
        drained, farewell = time() + settings.drain_s, time() + min(settings.farewell_s, settings.drain_s)
        while not self.force_exit and time() < (drained if self.application.active else farewell):
            await asyncio.sleep(0.02)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.force_exit or self.should_exit
        self.should_exit = self.service.draining = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """uvicorn raises the signal again once it has stopped; here a stop on request is a success."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def run_service(server: Server, listener: socket.socket) -> None:
    """Runs the server, from warming up the model to the last answer."""
    async with server.service.running():
        await server.serve(sockets=[listener])


def run_server(service: Service, listener: socket.socket, announce: Callable[[], object]) -> int:
    """Serves until a signal. Returns 0, or 130 after a second signal."""
    for library in ("uvicorn", "python_multipart"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # they log a line for every malformed request
    server = Server(service, announce)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        asyncio.run(run_service(server, listener))
    finally:
        sys.setswitchinterval(before)
    return INTERRUPTED if server.force_exit else 0
