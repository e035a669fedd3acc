"""The outermost layer: checks first, then the routes; one shape of error, the same headers and a count for all."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.datastructures import Headers

from vitrail.serve import security
from vitrail.serve.metrics import Metrics
from vitrail.serve.refusal import Gone, Refused, encoded, unavailable
from vitrail.serve.settings import Settings

logger = logging.getLogger("vitrail.serve")
access = logging.getLogger("vitrail.access")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OTHER: Final = "other"  # what is no route is counted under one name, however many are tried
WATCHED: Final = ("/health", "/ready", "/metrics")  # are asked for while the server stops, too


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: App,
        settings: Settings,
        metrics: Metrics,
        routes: frozenset[str],
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.app, self.settings, self.metrics, self.routes, self.draining = app, settings, metrics, routes, draining
        self.active = 0  # requests that are not answered yet

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.active += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.active -= 1

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        began, status, headers = time.perf_counter(), 0, Headers(scope=scope)
        carried = security.carried(self.settings, headers.get("origin"))

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                closing = [(b"connection", b"close")] if self.draining() and b"connection" not in own else []
                message["headers"] = [*message["headers"], *(pair for pair in carried if pair[0] not in own), *closing]
            await send(message)

        try:
            security.check(self.settings, scope["method"], scope["path"], headers)
            if self.draining() and scope["path"] not in WATCHED:
                await discard(receive, self.settings)
                raise unavailable("stopping", "the server takes no more work; ask another one, or later", after=5)
            await self.app(scope, receive, sending)
        except Refused as refused:
            await refuse(sending, refused)
        except Gone:
            self.metrics.gone += 1
            return
        except Exception:
            logger.exception("a request failed")
            if status:
                raise  # the answer has begun: the connection is all that can be ended
            await refuse(sending, Refused(500, "the server failed", "this is a bug; the server's log says more"))
        route = scope["path"] if scope["path"] in self.routes else OTHER
        took = time.perf_counter() - began
        self.metrics.answered(route, status, took)
        if self.settings.access_log:
            access.info("%s %s %d %.0f ms", scope["method"], route, status, 1e3 * took)


async def discard(receive: Receive, settings: Settings) -> None:
    """Reads a body and throws it away, for a while: a connection that is closed before that is reset, and its sender
    never sees the answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.linger_s):
            while size <= settings.max_bytes:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def refuse(send: Send, refused: Refused) -> None:
    body = encoded({"error": refused.error, "reason": refused.reason})
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    await send(
        {
            "type": "http.response.start",
            "status": refused.status,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
