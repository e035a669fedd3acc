"""Errors of requests: an HTTP status, what is wrong, and what to do."""

import json
from collections.abc import Mapping
from typing import Any


class RequestError(Exception):
    """Sent as {"error": ..., "reason": ...} with a status of 400 or more."""

    def __init__(self, status: int, error: str, reason: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {error}: {reason}")
        self.status, self.error, self.reason = status, error, reason
        self.headers = dict(headers or {})


class ClientDisconnected(Exception):
    """The client has gone; there is nobody to answer."""


def too_many_requests(reason: str) -> RequestError:
    return RequestError(429, "too many requests", reason, headers={"Retry-After": "1"})


def unavailable(error: str, reason: str, *, after: int = 2) -> RequestError:
    return RequestError(503, error, reason, headers={"Retry-After": str(after)})


def stopping() -> RequestError:
    return unavailable("stopping", "the server is shutting down; try another one, or later", after=5)


def to_json(content: Any) -> bytes:
    """Encodes JSON in ASCII, so that any file name can be sent."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
