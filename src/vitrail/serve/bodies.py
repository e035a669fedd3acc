"""Bodies of requests, read into memory within limits of size, time and what all of them hold together."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from starlette.datastructures import Headers

from vitrail.serve.refusal import Gone, Refused, busy
from vitrail.serve.settings import Settings

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Budget:
    """Bytes of bodies in memory. What came counts, not what was announced: a claim costs nothing."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0


class Claim(AbstractContextManager["Claim"]):
    """What one request holds of a budget, until it is answered."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.size = budget, 0

    def take(self, size: int) -> None:
        if self.budget.held + size > self.budget.most:
            raise busy("the bodies of other requests fill the memory set aside for them; try again in a moment")
        self.budget.held += size
        self.size += size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.budget.held -= self.size
        self.size = 0


async def read_body(headers: Headers, receive: Receive, settings: Settings, claim: Claim) -> bytes:
    """A whole body. Refused where it is announced or turns out to be too long, or takes too long to come."""
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Refused(415, "packed body", f"Content-Encoding {coding[:40]!r} is not read; send the body as it is")
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > settings.max_bytes:
        raise too_long(settings)
    pieces, size = list[bytes](), 0
    try:
        async with asyncio.timeout(settings.read_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                piece: bytes = message.get("body", b"")
                size += len(piece)
                if size > settings.max_bytes:
                    raise too_long(settings)
                claim.take(len(piece))
                pieces.append(piece)
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        raise Refused(
            408,
            "body too slow",
            f"{size:,} bytes came in {settings.read_s:g} s; a whole body has to",
            headers={"Connection": "close"},
        ) from None


def too_long(settings: Settings) -> Refused:
    return Refused(
        413,
        "body too large",
        f"a request's body may have {settings.max_bytes:,} bytes; send a smaller picture, or fewer at once",
    )
