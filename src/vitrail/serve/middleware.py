"""The outermost layer: checks first, then the routes; one shape of error, the same headers and a count for all.

Whom a server answers, and what every answer carries: host, origin and token are checked before a route is looked at.

A page of another site cannot use a visitor's browser to ask: its Origin is refused, its name for this machine (DNS
rebinding) is refused on loopback, and no answer may be read across origins unless that origin was listed.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from vitrail.serve.http_errors import Gone, Refused, encoded, unavailable
from vitrail.serve.metrics import Metrics
from vitrail.serve.settings import Settings, bare_host

OPEN: Final = ("/", "/health")  # for whoever has no token
POLICY: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
ALWAYS: Final = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
    ("content-security-policy", POLICY),
)
ALLOWED: Final = (
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-allow-headers", "Authorization, Content-Type"),
    ("access-control-max-age", "600"),
)


def check(settings: Settings, method: str, path: str, headers: Headers) -> None:
    """Refused where the request comes by a wrong name, from a foreign page or without the token."""
    check_host(settings, headers)
    if method not in ("GET", "HEAD"):
        check_origin(settings, headers)
    if method != "OPTIONS":  # a browser asks first without the token
        check_token(settings, path, headers)


def check_host(settings: Settings, headers: Headers) -> None:
    host = headers.get("host")
    if settings.hosts and host is not None and bare_host(host) not in settings.hosts:
        raise Refused(
            421,
            "unknown host",
            f"this server is not called {host[:100]!r}; on loopback it answers to {', '.join(settings.hosts)}. "
            "Behind a proxy, start it with --origin and the address that people use",
        )


def check_origin(settings: Settings, headers: Headers) -> None:
    origin = headers.get("origin")
    if origin is None:
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    else:
        foreign = origin not in settings.origins and not same_origin(origin, headers.get("host", ""))
    if foreign:
        raise Refused(
            403,
            "foreign origin",
            f"a page of {(origin or 'another site')[:100]!r} may not use this server; start it with --origin and that "
            "address if it should",
        )


def same_origin(origin: str, host: str) -> bool:
    """Whether a page was served under the name that it now asks."""
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def check_token(settings: Settings, path: str, headers: Headers) -> None:
    if settings.token is None or path in OPEN:
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # Compared in constant time: how long it takes tells nothing of how much was right.
    right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), settings.token.encode())
    if scheme.lower() != "bearer" or not right:
        raise Refused(
            401,
            "token needed" if not given else "wrong token",
            "send the header 'Authorization: Bearer TOKEN' with the token that the server was started with",
            headers={"WWW-Authenticate": 'Bearer realm="vitrail"'},
        )


def carried(settings: Settings, origin: str | None) -> list[tuple[bytes, bytes]]:
    """The headers of every answer; a page of a listed origin may read it."""
    pairs = list(ALWAYS)
    if settings.origins:
        pairs.append(("vary", "Origin"))
        if origin in settings.origins and origin is not None:
            pairs += [("access-control-allow-origin", origin), *ALLOWED]
            pairs = [
                (name, "cross-origin" if name == "cross-origin-resource-policy" else value) for name, value in pairs
            ]
    return [(name.encode(), value.encode()) for name, value in pairs]


logger = logging.getLogger("vitrail.serve")
access = logging.getLogger("vitrail.access")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OTHER: Final = "other"  # what is not a route is counted under one name, however many are tried
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
        extra = carried(self.settings, headers.get("origin"))

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                closing = [(b"connection", b"close")] if self.draining() and b"connection" not in own else []
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in own), *closing]
            await send(message)

        try:
            check(self.settings, scope["method"], scope["path"], headers)
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
