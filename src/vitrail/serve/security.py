"""Whom a server answers, and what every answer carries: host, origin and token are checked before a route is looked at.

A page of another site cannot use a visitor's browser to ask: its Origin is refused, its name for this machine (DNS
rebinding) is refused on loopback, and no answer may be read across origins unless that origin was listed.
"""

import hmac
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from vitrail.serve.refusal import Refused
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
