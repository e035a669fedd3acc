"""The outermost layer: checks who may use the server, gives all errors one form, and adds headers and counts.

Host, origin and token are checked before any route. A page of another site cannot use a visitor's browser: its Origin
is rejected, its name for this machine (DNS rebinding) is rejected on loopback, and no answer may be read across origins
unless that origin is listed.
"""

import asyncio
import contextlib
import hmac
import logging
import time
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.serve.http_errors import ClientDisconnected, RequestError, stopping, to_json
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings, strip_port

logger = logging.getLogger("vitrail.serve")
access = logging.getLogger("vitrail.access")

OPEN_ROUTES: Final = ("/", "/health")  # need no token
MONITORING_ROUTES: Final = ("/health", "/ready", "/metrics")  # answered even while the server stops
OTHER: Final = "other"  # the name under which all unknown routes are counted
SECURITY_HEADERS: Final = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
    ("content-security-policy", "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
)
CORS_HEADERS: Final = (
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-allow-headers", "Authorization, Content-Type"),
    ("access-control-max-age", "600"),
    ("cross-origin-resource-policy", "cross-origin"),
)


def check_request(settings: ServeSettings, method: str, path: str, headers: Headers) -> None:
    """Raises if a request uses a wrong host name, comes from another site's page or lacks the token."""
    host, origin = headers.get("host", "").lower(), headers.get("origin")
    if settings.hosts and "host" in headers and strip_port(host) not in settings.hosts:
        names = f"on loopback it answers to {', '.join(settings.hosts)}; behind a proxy, start it with --origin ADDRESS"
        raise RequestError(421, "unknown host", f"{host[:100]!r} is not a name of this server; {names}")
    if origin is None:
        same = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    else:
        same = origin in settings.origins or (bool(host) and origin.partition("://")[2].lower() == host)
    if method not in ("GET", "HEAD") and not same:
        page = f"a page of {(origin or 'another site')[:100]!r} may not use this server"
        raise RequestError(403, "foreign origin", f"{page}; to allow it, start the server with --origin ADDRESS")
    if settings.token is None or path in OPEN_ROUTES or method == "OPTIONS":  # a browser's preflight carries no token
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # Compared in constant time, so that timing does not reveal how much of it is right.
    right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), settings.token.encode())
    if scheme.lower() != "bearer" or not right:
        reason, wanted = "send the header 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": 'Bearer realm="vitrail"'}
        raise RequestError(401, "wrong token" if given else "token needed", reason, headers=wanted)


class ErrorMiddleware:
    """An ASGI application around another one: checks requests and turns exceptions into answers."""

    def __init__(self, app: ASGIApp, service: Service, routes: frozenset[str]) -> None:
        self.app, self.service, self.routes = app, service, routes
        self.settings, self.metrics = service.settings, service.metrics
        self.active = 0  # requests in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.active += 1
        started, status, headers = time.perf_counter(), 0, Headers(scope=scope)
        fixed, origin = dict(SECURITY_HEADERS), headers.get("origin")
        if self.settings.origins:
            fixed["vary"] = "Origin"
            if origin is not None and origin in self.settings.origins:  # pages of this origin may read the answer
                fixed |= {"access-control-allow-origin": origin, **dict(CORS_HEADERS)}
        extra = [(name.encode(), value.encode()) for name, value in fixed.items()]

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                closing = [(b"connection", b"close")] if self.service.draining else []
                message["headers"] = [*message["headers"], *(pair for pair in extra + closing if pair[0] not in own)]
            await send(message)

        try:
            check_request(self.settings, scope["method"], scope["path"], headers)
            if self.service.draining and scope["path"] not in MONITORING_ROUTES:
                await discard_body(receive, self.settings)
                raise stopping()
            await self.app(scope, receive, send_with_headers)
        except RequestError as error:
            await send_error(send_with_headers, error)
        except ClientDisconnected:
            self.metrics.gone += 1
            return
        except Exception:
            logger.exception("a request failed")
            if status:
                raise  # the answer has started: all that is left is to close the connection
            bug = RequestError(500, "the server failed", "this is a bug; the server's log has the details")
            await send_error(send_with_headers, bug)
        finally:
            self.active -= 1
        route = scope["path"] if scope["path"] in self.routes else OTHER
        took = time.perf_counter() - started
        self.metrics.count_request(route, status, took)
        if self.settings.access_log:
            access.info("%s %s %d %.0f ms", scope["method"], route, status, 1e3 * took)


async def discard_body(receive: Receive, settings: ServeSettings) -> None:
    """Reads and drops a body for a while: a connection that is closed earlier is reset, and its sender never sees the
    answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings.linger_s):
            while size <= settings.max_bytes:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def send_error(send: Send, error: RequestError) -> None:
    body = to_json({"error": error.error, "reason": error.reason})
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
