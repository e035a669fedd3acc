"""Clients that cost little: raw connections on one event loop, so that what is measured is the server.

    python -m tests.serve.client PORT PLAN.json        # prints a report as JSON

The plan: {"requests": [[file of raw bytes, expected], ...], "clients": 32, "seconds": 10, "count": 0}; a count of 0 is
none. An expected answer is a list of [index, probability] and is compared with what comes. With "patience" a client
waits so long after a 429, with "pause" after every answer.
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEAR = 1e-4  # a batch of another size rounds otherwise
BOUNDARY = b"vitrail-boundary"


def form(images: Sequence[tuple[str, bytes]], field: str = "image") -> tuple[bytes, bytes]:
    """Content type and body of a form with these files."""
    parts = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\nContent-Type: image/png\r\n\r\n%s\r\n'
        % (BOUNDARY, field.encode(), name.encode(), data)
        for name, data in images
    ]
    return b"multipart/form-data; boundary=" + BOUNDARY, b"".join([*parts, b"--%s--\r\n" % BOUNDARY])


def post(path: str, content_type: bytes, body: bytes, *, headers: Sequence[bytes] = ()) -> bytes:
    """A whole request."""
    lines = [
        b"POST %s HTTP/1.1" % path.encode(),
        b"Host: 127.0.0.1",
        b"Content-Type: " + content_type,
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def get(path: str) -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path.encode()


class Wire(asyncio.Protocol):
    """One connection: a request out, an answer in, again and again."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.buffer = b""
        self.answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, rest = self.buffer.partition(b"\r\n\r\n")
        if mark and self.answer is not None and not self.answer.done():
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(rest) >= length:
                self.buffer = rest[length:]
                self.answer.set_result((int(head[9:12]), head, rest[:length]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionError(str(exc or "closed")))

    async def ask(self, raw: bytes) -> tuple[int, bytes, bytes]:
        """Status, head and body."""
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(raw)
        return await self.answer


async def connect(port: int) -> Wire:
    _, wire = await asyncio.get_running_loop().create_connection(Wire, "127.0.0.1", port)
    return wire


def differs(body: bytes, expected: list[list[float]]) -> float:
    """The largest difference of a probability; infinite where other classes are named."""
    top = json.loads(body)["predictions"][0]["top"]
    if [answer["index"] for answer in top] != [index for index, _ in expected]:
        return float("inf")
    return max(abs(answer["probability"] - right) for answer, (_, right) in zip(top, expected, strict=True))


async def drive(port: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Closed loop: each client asks as soon as it was answered."""
    requests = [(Path(name).read_bytes(), expected) for name, expected in plan["requests"]]
    statuses: Counter[str] = Counter()
    times: dict[str, list[float]] = {}
    largest, sent = 0.0, 0
    began = time.perf_counter()
    until = began + plan["seconds"] if plan["seconds"] else float("inf")
    count = plan["count"] or sys.maxsize

    async def client(number: int) -> None:
        nonlocal largest, sent
        wire = await connect(port)
        at = number * 7
        while sent < count and time.perf_counter() < until:
            raw, expected = requests[at % len(requests)]
            at, sent = at + 1, sent + 1
            start = time.perf_counter()
            try:
                status, head, body = await wire.ask(raw)
            except (ConnectionError, OSError) as error:
                statuses[f"lost: {type(error).__name__}"] += 1
                wire = await connect(port)
                continue
            statuses[str(status)] += 1
            times.setdefault(str(status), []).append(time.perf_counter() - start)
            if status == 200 and expected is not None:
                largest = max(largest, differs(body, expected))
            if b"connection: close" in head.lower():
                wire.transport.close()
                wire = await connect(port)
            if plan.get("pause") or (status == 429 and plan.get("patience")):
                await asyncio.sleep(plan.get("pause") or plan["patience"])
        wire.transport.close()

    await asyncio.gather(*(client(number) for number in range(plan["clients"])))
    took = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": took,
        "sent": sent,
        "statuses": dict(statuses),
        "times": {status: spread(values) for status, values in times.items()},
        "difference": largest,
        "client_cpu": (used.ru_utime + used.ru_stime) / took,
    }


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = lambda part: ordered[min(int(part * len(ordered)), len(ordered) - 1)]  # noqa: E731
    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": ordered[-1], "count": len(ordered)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(drive(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))))
