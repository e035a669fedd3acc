"""The outermost layer: checks first, then the routes; one shape of error, the same headers and a count for all."""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.datastructures import Headers

from vitrail.serve import security
from vitrail.serve.metrics import Metrics
from vitrail.serve.refusal import Gone, Refused, encoded
from vitrail.serve.settings import Settings

logger = logging.getLogger("vitrail.serve")
access = logging.getLogger("vitrail.access")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OTHER: Final = "other"  # what is no route is counted under one name, however many are tried


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics, routes: frozenset[str]) -> None:
        self.app, self.settings, self.metrics, self.routes = app, settings, metrics, routes
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
                message["headers"] = [*message["headers"], *(pair for pair in carried if pair[0] not in own)]
            await send(message)

        try:
            security.check(self.settings, scope["method"], scope["path"], headers)
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
