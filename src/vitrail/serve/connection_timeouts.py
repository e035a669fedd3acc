"""uvicorn's connection with a watch on it: whoever sends or reads too slowly is let go.

The deadline of a body is the reader's (bodies.py). Here are the others: for a request's head, for the rest of a body
that was refused before it was read, and for an answer that nobody fetches.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.serve.http_errors import encoded
from vitrail.serve.middleware import ALWAYS
from vitrail.serve.settings import HEAD_BYTES, Settings

END_OF_HEAD: Final = re.compile(rb"\n\r?\n")


class Framed(h11.Connection):
    """h11's parser, stricter in two ways: a head has a limit however it arrives (h11 has one only for heads that come
    in parts), and a request with two lengths is none (RFC 9112, 6.3). `fault` says why a request was refused."""

    fault: tuple[int, str, str] = (400, "not HTTP", "this is not a valid HTTP/1.1 request")

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, most)
        self.most = most

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            waiting = self.trailing_data[0]
            if len(waiting) > self.most and not END_OF_HEAD.search(waiting, 0, self.most):
                self.refuse(431, "head too large", f"a request's head, headers included, may have {self.most:,} bytes")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                self.refuse(400, "two lengths", "send Content-Length or Transfer-Encoding, not both")
        return event

    def refuse(self, status: int, error: str, reason: str) -> None:
        self.fault = (status, error, reason)
        raise h11.RemoteProtocolError(reason, error_status_hint=status)


class Watched(H11Protocol):
    """One connection. Subclasses made by `watched` know their settings."""

    settings: Settings

    def __init__(self, *args: Any, **more: Any) -> None:  # uvicorn's own business
        super().__init__(*args, **more)
        self.conn = Framed(self.config.h11_max_incomplete_event_size or HEAD_BYTES)
        self._head: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._refused = False  # what still comes is thrown away

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.settings.connections:
            self.refuse(503, "too many connections", f"{self.settings.connections} are open; try again in a moment")
        else:
            self._head = self._later(self._head, self.settings.head_s, self.head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refused:
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            # Refused before the body came. It is thrown away for a while, so that its sender gets to see why.
            self._unset_keepalive_if_required()
            self._linger = self._later(self._linger, self.settings.linger_s, self.transport.abort)
        self._look()

    def _look(self) -> None:
        """After each event: what is waited for now?"""
        if self._refused:
            return
        if self.conn.their_state is not h11.SEND_BODY:
            self._linger = self._stop(self._linger)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._head = self._stop(self._head)
        elif self._head is None and self.timeout_keep_alive_task is None:
            self._head = self._later(None, self.settings.head_s, self.head_is_late)

    def head_is_late(self) -> None:
        self._head = None
        if not self.conn.trailing_data[0]:  # browsers open connections ahead of need; nothing was asked on this one
            self.transport.close()
            return
        self.refuse(408, "head too slow", f"a request's head has to come within {self.settings.head_s:g} s")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self._later(self._stall, self.settings.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = self._stop(self._stall)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for a reader that does not read
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._linger, self._stall):
            self._stop(timer)
        self._head = self._linger = self._stall = None
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        assert isinstance(self.conn, Framed)
        self.refuse(*self.conn.fault, linger=True)

    def refuse(self, status: int, error: str, reason: str, *, linger: bool = False) -> None:
        """Answers where there is no request to answer yet, and closes; with `linger` only once the sender has, or after
        a while: closing while bytes are on their way would reset the connection, and nobody would see the answer."""
        if self.transport.is_closing():
            return
        self._refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encoded({"error": error, "reason": reason})
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            if status == 503:
                headers.append(("retry-after", "1"))
            response = h11.Response(status_code=status, headers=[*headers, *ALWAYS], reason=b"")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            self._head = self._stop(self._head)
            self._linger = self._later(self._linger, self.settings.linger_s, self.transport.abort)
        else:
            self.transport.close()

    def _later(
        self, timer: asyncio.TimerHandle | None, seconds: float, call: Callable[[], object]
    ) -> asyncio.TimerHandle:
        self._stop(timer)
        return self.loop.call_later(seconds, call)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def watched(settings: Settings) -> type[H11Protocol]:
    """The class of a server's connections."""
    return type("Connection", (Watched,), {"settings": settings})
