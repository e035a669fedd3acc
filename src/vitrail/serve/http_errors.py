"""A request that is not answered as asked: the status, what is wrong, and what to do."""

import json
from collections.abc import Mapping
from typing import Any

JSON = b"application/json"


class Refused(Exception):
    """Becomes {"error": ..., "reason": ...} with a status of 400 and more."""

    def __init__(self, status: int, error: str, reason: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {error}: {reason}")
        self.status, self.error, self.reason = status, error, reason
        self.headers = dict(headers or {})


class Gone(Exception):
    """The client went away; nobody is there to be answered."""


def busy(reason: str, *, after: int = 1) -> Refused:
    return Refused(429, "too many requests", reason, headers={"Retry-After": str(after)})


def unavailable(error: str, reason: str, *, after: int = 2) -> Refused:
    return Refused(503, error, reason, headers={"Retry-After": str(after)})


def encoded(content: Any) -> bytes:
    """JSON in ASCII: whatever a file is called, it stays text."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
