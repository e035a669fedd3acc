"""Hostile requests by the thousand, against a server of its own process that may not write a byte.

    python -m tests.serve.fuzzing --uploads 1000 --seed 0

Damaged images, damaged forms and JSON, bombs, lying lengths, bodies of 100 MB, slow senders, a thousand parts, long
heads, path tricks and wrong types. Each should be answered with 200 where what came is still sound, or a 4xx with a
reason; a 5xx, no answer where one is due, a server that does not answer /health within a second, growing memory or a
file on disk ends the run with status 1. The server runs under RLIMIT_FSIZE 0: whatever it wrote to a file would fail.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.data.decode.fuzzing import mutate
from tests.data.decode.hostile import bombs, no_pictures, samples
from tests.serve.client import BOUNDARY, Wire, connect, form, get, post
from tests.serve.subprocess_server import ROOT, Running, running

LIMIT = 4 * 2**20  # bytes of a body
READ_S = 2.0  # for a whole body
PATIENCE = 20.0  # seconds for any answer
GROWTH = 0.05  # of the resident memory after the warm-up
JSON = b"application/json"
SOUND = frozenset([200, 400, 415])


@dataclass(frozen=True, slots=True)
class Case:
    """One request as bytes, and the statuses that are right for it."""

    kind: str
    raw: bytes
    right: frozenset[int]


@dataclass(slots=True)
class Report:
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[str] = field(default_factory=list[str])
    slowest: float = 0.0
    health: list[float] = field(default_factory=list[float])

    def add(self, case: Case, status: int, body: bytes, seconds: float) -> None:
        self.statuses[case.kind][status] += 1
        self.slowest = max(self.slowest, seconds)
        if status not in case.right:
            self.failures.append(f"{case.kind}: {status} {body[:200]!r}")
        elif status >= 400:
            told: Any = json.loads(body)
            if set(told) != {"error", "reason"} or not told["reason"]:
                self.failures.append(f"{case.kind}: {status} without a reason: {body[:200]!r}")


def uploads(count: int, seed: int) -> Iterator[Case]:
    """Damaged images of every format, in a form or in JSON."""
    known = samples()
    names = sorted(known)
    rng = random.Random(seed)
    for number in range(count):
        name, other = names[number % len(names)], rng.choice(names)
        _, data = mutate(name, known[name], known[other], f"{seed}/{number}")
        path = rng.choice(["/predict", "/predict", "/predict?topk=3", "/embed", "/attention?layer=0"])
        if number % 3:
            raw = post(path, *form([(rng.choice(["a.png", "../../x", "<b>", "\x7f'\\"]), data)]))
        else:
            raw = post(path, JSON, json.dumps({"images": [base64.b64encode(data).decode()]}).encode())
        yield Case(f"damaged {name.split()[0]}", raw, SOUND)


def structures(count: int, seed: int) -> Iterator[Case]:
    """Sound images in forms and JSON whose structure is damaged."""
    rng = random.Random(seed)
    data = samples()["png one bit"]
    for number in range(count):
        kind, body = form([("a.png", data), ("b.png", data)])
        if number % 2:
            kind, body = JSON, json.dumps({"images": [base64.b64encode(data).decode()] * 2}).encode()
        damaged = bytearray(body)
        for _ in range(rng.choice([1, 2, 5, 20])):
            at = rng.randrange(len(damaged))
            what = rng.choice(["flip", "drop", "twice", "insert"])
            if what == "flip":
                damaged[at] ^= 1 << rng.randrange(8)
            elif what == "drop":
                del damaged[at : at + rng.choice([1, 3, 30])]
            elif what == "twice":
                damaged[at:at] = damaged[at : at + rng.choice([2, 40])]
            else:
                damaged[at:at] = rng.choice([b"\r\n", b"--" + BOUNDARY, b'"', b"{", b"\0", b"\r\n\r\n", b"\xff", b","])
            damaged = damaged or bytearray(b"x")
        yield Case("damaged JSON" if number % 2 else "damaged form", post("/predict", kind, bytes(damaged)), SOUND)


def bad_forms() -> Iterator[Case]:
    """Forms and JSON that ask for much."""
    data, right = samples()["png one bit"], frozenset([400])
    yield Case("1,000 parts", post("/predict", *form([("a.png", data)] * 1000)), right)
    kind, body = form([("a.png", data)])
    huge = body.replace(b"Content-Type: image/png", b"X-Long: " + b"y" * 2_000_000)
    yield Case("huge part header", post("/predict", kind, huge), right)
    many = body.replace(b"Content-Type: image/png", b"".join(b"X-%d: y\r\n" % at for at in range(5000)) + b"X: y")
    yield Case("5,000 part headers", post("/predict", kind, many), right)
    yield Case("form without end", post("/predict", kind, b"--" + BOUNDARY + b"\r\n" + b"A: b\r\n" * 100_000), right)
    yield Case("boundaries only", post("/predict", kind, (b"--" + BOUNDARY + b"\r\n") * 50_000), right)
    yield Case("line ends only", post("/predict", kind, b"\r\n" * 1_000_000), right)
    for text in (b"[" * 1_000_000, b'{"a":' * 500_000, b'{"images":[' + b"[]," * 800_000 + b"[]]}", b"9" * 2_000_000):
        yield Case("JSON without measure", post("/predict", JSON, text), right)
    for what in ("https://example.org/cat.jpg", "file:///etc/passwd", "/etc/passwd", "ftp://x/y", "%%%", "a"):
        yield Case("JSON of addresses", post("/predict", JSON, json.dumps({"images": [what]}).encode()), right)
    for given in ({"images": "x"}, {"images": [None]}, {"images": []}, [], "x", 3, None, {"path": "/etc/passwd"}):
        yield Case("JSON of another kind", post("/predict", JSON, json.dumps(given).encode()), right)


def bad_pictures() -> Iterator[Case]:
    right = frozenset([415])
    for path in ("/predict", "/embed", "/attention"):
        for data in bombs().values():
            yield Case("bomb", post(path, *form([("a.png", data)])), right if len(data) < LIMIT else frozenset([413]))
        for data, _ in no_pictures().values():
            yield Case("no image", post(path, *form([("a.png", data)])), right)


def wrong_turns() -> Iterator[Case]:
    """Requests to where nothing is, or in a way that is not answered."""
    tricks = ["/../../etc/passwd", "/..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/predict/"]
    tricks += [
        "/etc/passwd",
        "/predict%00.png",
        "/%c0%ae%c0%ae/x",
        "/page/../app.py",
        "/.git/config",
        "http://a/b",
        "/\\x",
    ]
    for path in tricks:
        yield Case("path trick", get(path), frozenset([404]))
        yield Case("path trick", post(path, b"text/plain", b"x"), frozenset([404]))
    for kind in (
        b"text/plain",
        b"image/png",
        b"application/x-www-form-urlencoded",
        b"",
        b"application/xml",
        b"\xff\xfe",
    ):
        yield Case("wrong type", post("/predict", kind, b"x" * 100), frozenset([415]))
    for method in (b"GET", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"FOO"):
        yield Case("wrong method", method + b" /predict HTTP/1.1\r\nHost: localhost\r\n\r\n", frozenset([405]))
    for query in ("topk=0", "topk=-1", "topk=x", "topk=1e9", "topk=%00", "layer=1", "x=y", "topk=" + "9" * 4000):
        yield Case("wrong query", post(f"/predict?{query}", *form([("a", b"x")])), frozenset([400]))
    foreign = [b"Origin: https://evil.example"]
    yield Case("foreign origin", post("/predict", *form([("a", b"x")]), headers=foreign), frozenset([403]))
    rebound = get("/model").replace(b"127.0.0.1", b"evil.example")
    yield Case("rebound name", rebound, frozenset([421]))
    yield Case("packed body", post("/predict", JSON, b"x", headers=[b"Content-Encoding: gzip"]), frozenset([415]))
    for junk in (b"\x16\x03\x01" + b"\0" * 50 + b"\r\n\r\n", b"GET\r\n\r\n", b"\0" * 100 + b"\r\n\r\n", b"X" * 70_000):
        yield Case("not HTTP", junk, frozenset([400, 431]))
    yield Case("endless head", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, frozenset([431]))


def lies(count: int) -> Iterator[Case]:
    """Lengths that are not true."""
    data = samples()["png one bit"]
    kind, body = form([("a.png", data)])
    for number in range(count):
        more = post("/predict", kind, body).replace(
            b"Content-Length: %d" % len(body), b"Content-Length: %d" % (len(body) + 1 + number)
        )
        yield Case("less than announced", more, frozenset([408]))
        short = max(1, len(body) - 7 * (number + 1))
        less = post("/predict", kind, body).replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % short)
        yield Case("more than announced", less, frozenset([400]))
    yield Case(
        "negative length", get("/").replace(b"GET", b"POST")[:-2] + b"Content-Length: -1\r\n\r\n", frozenset([400])
    )


async def ask(port: int, case: Case, report: Report) -> None:
    began, wire = time.perf_counter(), await connect(port)
    try:
        async with asyncio.timeout(PATIENCE):
            status, _, body = await wire.ask(case.raw)
        report.add(case, status, body, time.perf_counter() - began)
    except (TimeoutError, ConnectionError) as error:
        report.failures.append(f"{case.kind}: no answer ({error!r}) to {case.raw[:120]!r}")
    finally:
        wire.transport.close()


async def all_of(port: int, cases: Iterator[Case], report: Report, at_once: int = 6) -> None:
    async def some() -> None:
        for case in cases:
            await ask(port, case, report)

    await asyncio.gather(*(some() for _ in range(at_once)))
    await healthy(port, report)


async def healthy(port: int, report: Report) -> None:
    began = time.perf_counter()
    try:
        wire = await connect(port)
        async with asyncio.timeout(PATIENCE):
            status, _, _ = await wire.ask(get("/health"))
        wire.transport.close()
    except (OSError, TimeoutError) as error:
        status = -1
        report.failures.append(f"/health: {error!r}")
    report.health.append(time.perf_counter() - began)
    if status != 200 or report.health[-1] > 1:
        report.failures.append(f"/health answered {status} after {report.health[-1]:.2f} s")


async def large(port: int, report: Report, size: int) -> None:
    """A body of `size` bytes: announced, and in chunks. Both are 413, while their sender still sends."""
    piece = b"x" * 65536
    for kind, head, wrap in (
        ("large, announced", b"Content-Length: %d" % size, False),
        ("large, in chunks", b"Transfer-Encoding: chunked", True),
    ):
        wire = await connect(port)
        wire.answer = asyncio.get_running_loop().create_future()
        wire.transport.write(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + head + b"\r\n\r\n"
        )
        sent = 0
        while sent < size and not wire.transport.is_closing() and wire.transport.get_write_buffer_size() < 2**24:
            wire.transport.write(b"%x\r\n%s\r\n" % (len(piece), piece) if wrap else piece)
            sent += len(piece)
            await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                status, _, body = await wire.answer
            report.add(Case(kind, b"", frozenset([413])), status, body, 0)
        if not report.statuses[kind]:
            report.failures.append(f"{kind}: no answer")
        wire.transport.abort()
    await healthy(port, report)


async def slow(port: int, report: Report, count: int) -> None:
    """Senders that stop in the middle of head or body, and ones that send a byte now and then."""
    raw = post("/predict", *form([("a.png", samples()["png"])]))
    body = raw.index(b"\r\n\r\n") + 4

    async def one(number: int) -> None:
        wire: Wire = await connect(port)
        wire.answer = asyncio.get_running_loop().create_future()
        start = (20, body, body + 50)[number % 3]
        wire.transport.write(raw[:start])
        began = time.perf_counter()
        while not wire.answer.done() and time.perf_counter() - began < PATIENCE:
            await asyncio.sleep(0.2)
            if number % 2 and not wire.transport.is_closing():
                wire.transport.write(raw[start : start + 1])
                start += 1
        case = Case("slow head" if number % 3 == 0 else "slow body", b"", frozenset([408]))
        if wire.answer.done() and wire.answer.exception() is None:
            status, _, told = wire.answer.result()
            report.add(case, status, told, 0)
        else:
            report.failures.append(f"{case.kind}: held for {time.perf_counter() - began:.0f} s")
        wire.transport.abort()

    senders = asyncio.gather(*(one(number) for number in range(count)))
    await asyncio.sleep(1)
    await healthy(port, report)
    await senders
    await healthy(port, report)


async def torn(port: int, report: Report, count: int, seed: int) -> None:
    """Bodies cut by a client that goes away: there is nobody to answer, and nothing may stay."""
    rng, raw = random.Random(seed), post("/predict", *form([("a.png", samples()["png"])]))
    for _ in range(count):
        wire = await connect(port)
        wire.transport.write(raw[: rng.randrange(len(raw))])
        await asyncio.sleep(0.001)
        wire.transport.abort()
        report.statuses["torn off"][0] += 1
    await healthy(port, report)


async def onslaught(running_: Running, args: argparse.Namespace) -> tuple[Report, dict[str, Any]]:
    port, report, memory = running_.port, Report(), list[int]()
    # Warm: every decoder and every refusal was used once, and the largest image there may be.
    await all_of(port, uploads(200, args.seed + 1), Report())
    await all_of(port, bad_pictures(), Report())
    await large(port, Report(), args.large)
    before = running_.descriptors
    memory.append(running_.memory)
    await all_of(port, uploads(args.uploads, args.seed), report)
    memory.append(running_.memory)
    await all_of(port, structures(max(args.uploads // 2, 20), args.seed), report)
    await all_of(port, bad_forms(), report)
    await all_of(port, bad_pictures(), report)
    await all_of(port, wrong_turns(), report)
    await all_of(port, lies(5), report, at_once=12)
    await torn(port, report, args.uploads // 5, args.seed)
    await large(port, report, args.large)
    await slow(port, report, args.slow)
    memory.append(running_.memory)
    await asyncio.sleep(0.5)
    facts = {"memory": memory, "descriptors": [before, running_.descriptors]}
    if memory[-1] > memory[0] * (1 + GROWTH):
        report.failures.append(f"memory grew from {memory[0] >> 20} to {memory[-1] >> 20} MiB")
    if facts["descriptors"][1] > before:
        report.failures.append(f"descriptors went from {before} to {facts['descriptors'][1]}")
    return report, facts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uploads", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=60, help="slow senders")
    parser.add_argument("--large", type=int, default=100 * 2**20, help="bytes of a large body")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        made(weights)
        work, temporary = Path(folder) / "work", Path(folder) / "tmp"
        work.mkdir()
        temporary.mkdir()
        quiet = {"TMPDIR": str(temporary), "HOME": str(work), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        quiet["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "torch")  # torch makes it at import, whoever imports it
        words = (str(weights), "--device", "cpu", "--max-bytes", str(LIMIT), "--read-timeout", str(READ_S))
        began = time.perf_counter()
        with running(
            *words, cwd=work, environment=quiet, program=(str(ROOT / "tests" / "serve" / "readonly_server.py"),)
        ) as server:
            report, facts = asyncio.run(onslaught(server, args))
            status = server.stop()
        left = sorted(path.name for place in (work, temporary) for path in place.rglob("*"))
    if left:
        report.failures.append(f"files were made: {left}")
    if status:
        report.failures.append(f"the server ended with status {status}: {server.said[-5:]}")
    show(report, facts, time.perf_counter() - began)
    return 1 if report.failures else 0


def made(path: Path) -> None:
    import torch

    from tests.models.tiny import awake
    from vitrail.checkpoint.weights import save
    from vitrail.models.vit_config import ViTConfig

    torch.manual_seed(0)
    config = ViTConfig(width=32, depth=2, mlp_width=64, heads=2, image=(32, 32), patch=(8, 8), classes=10)
    save(awake(config, torch.float32), path, labels=[f"class {at}" for at in range(10)])


def show(report: Report, facts: dict[str, Any], seconds: float) -> None:
    out = sys.stdout.write
    total = Counter[int]()
    for kind, statuses in report.statuses.items():
        told = ", ".join(f"{count} x {status or 'left'}" for status, count in sorted(statuses.items()))
        out(f"  {kind:<24} {told}\n")
        total += statuses
    failed = sum(count for status, count in total.items() if status >= 500)
    out(f"{sum(total.values()):,} requests in {seconds:.0f} s; {failed} answered 5xx\n")
    out(f"slowest answer {report.slowest:.2f} s; /health at most {1e3 * max(report.health):.0f} ms\n")
    sizes = ", ".join(f"{size >> 20} MiB" for size in facts["memory"])
    out(f"resident memory {sizes} (warm, after the uploads, at the end)\n")
    first, last = facts["descriptors"]
    out(f"open descriptors {first} before, {last} after; bytes that may be written to disk: 0\n")
    for failure in report.failures[:20]:
        out(f"FAILED {failure}\n")


if __name__ == "__main__":
    sys.exit(main())
