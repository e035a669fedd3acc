"""On the wire: whoever is slow, lies about lengths, sends without end or never reads is let go."""

import contextlib
import socket
import time
from collections.abc import Generator

import pytest

from tests.serve.client import form, get, post
from tests.serve.in_process_server import Inside, answer_to, inside, picture, until

LIMIT = 60_000
CHUNKED = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def here() -> Generator[Inside]:
    with inside(max_bytes=LIMIT, head_s=0.5, read_s=0.5, linger_s=0.5, write_s=0.5, connections=30) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(here: Inside) -> Generator[None]:
    yield
    until(lambda: not here.server.application.active)
    assert here.service.budget.held == 0
    assert len(here.service.queue) == 0
    assert here.client.get("/health").status_code == 200


def ask(here: Inside, raw: bytes) -> tuple[int, bytes]:
    with here.connect() as wire:
        wire.sendall(raw)
        return answer_to(wire)


def predict(data: bytes | None = None) -> bytes:
    return post("/predict", *form([("a.png", picture() if data is None else data)]))


def is_closed(wire: socket.socket) -> bool:
    """Whether the server closes the connection, soon or later."""
    wire.settimeout(60)
    try:
        while wire.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def test_an_announced_length_past_the_limit_is_refused_before_it_comes(here: Inside) -> None:
    head = predict(b"x" * (LIMIT + 1)).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    status, told = ask(here, head)  # not a byte of the body
    assert status == 413
    assert b"60,000 bytes" in told


def test_its_sender_gets_to_see_why(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(predict(b"x" * 3_000_000))  # all of it, at once, before anything is read
        assert answer_to(wire)[0] == 413


def test_a_refused_body_is_not_read_for_ever(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(CHUNKED)
        began, cut = time.monotonic(), False
        while not cut and time.monotonic() < began + 5:
            try:
                wire.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                time.sleep(0.005)
            except ConnectionError:
                cut = True
        assert cut


def test_chunks_past_the_limit_are_cut(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(CHUNKED + b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(40)) + b"0\r\n\r\n")
        assert answer_to(wire)[0] == 413


def test_less_than_announced_is_408_and_closed(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(predict()[:-10])
        status, told = answer_to(wire)
        assert status == 408
        assert b"connection: close" in told
        assert is_closed(wire)


def test_a_drop_at_a_time_does_not_help(here: Inside) -> None:
    """Every byte in time, but not the whole: head and body have one deadline each."""
    raw = predict()
    at = raw.index(b"\r\n\r\n") + 4
    for start in (0, at):
        with here.connect() as wire:
            wire.sendall(raw[:start])
            status = -1
            wire.settimeout(0.05)
            for byte in raw[start : start + 60]:
                try:
                    wire.sendall(bytes([byte]))
                    if wire.recv(12).startswith(b"HTTP/1.1 408"):
                        status = 408
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break
            assert status == 408


def test_a_connection_that_says_nothing_is_closed(here: Inside) -> None:
    with here.connect() as wire:
        assert is_closed(wire)


def test_more_than_announced_is_another_request_and_not_this_ones(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(predict() + b"leftover nonsense\r\n\r\n")
        assert answer_to(wire)[0] == 200
        assert is_closed(wire)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 17_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 17_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
@pytest.mark.parametrize("first", [b"", get("/health")])
def test_a_head_that_is_too_large_is_431_however_it_comes(here: Inside, raw: bytes, first: bytes) -> None:
    """Without an end, in one read, or on a connection that was used before."""
    with here.connect() as wire:
        if first:
            wire.sendall(first)
            assert answer_to(wire)[0] == 200
        wire.sendall(raw)
        status, told = answer_to(wire)
        assert status == 431
        assert b"connection: close" in told
        assert is_closed(wire)


def test_a_head_just_within_the_limit_is_read(here: Inside) -> None:
    assert ask(here, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 16_000 + b"\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"\0" * 40,  # TLS
        b"GET\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /h\xe9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_4xx(here: Inside, raw: bytes) -> None:
    status, _ = ask(here, raw)
    assert 400 <= status < 500


def test_smuggling_by_both_lengths_is_one_request_or_none(here: Inside) -> None:
    body = b'{"images": []}'
    inner = b"GET /model HTTP/1.1\r\nHost: localhost\r\n\r\n"
    raw = (
        b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    )
    with here.connect() as wire:
        wire.sendall(raw + inner)
        status, told = answer_to(wire)
        assert status == 400
        assert told.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in told
        assert is_closed(wire)


def drained(here: Inside, wire: socket.socket, raw: bytes) -> tuple[int, bytes]:
    wire.sendall(raw)
    return answer_to(wire)


@pytest.mark.parametrize("path", ["/predict", "/embed", "/model"])
def test_who_asks_while_the_server_stops_is_told_503(path: str) -> None:
    """On a connection that was open already and on a new one, with a body that is still on its way."""
    with inside(farewell_s=20, drain_s=20) as there:
        with there.connect() as old, there.connect() as watching:
            old.sendall(get("/health"))
            assert answer_to(old)[0] == 200
            there.server.handle_exit(15, None)
            raw = get(path) if path == "/model" else post(path, *form([("a.png", b"x" * 3_000_000)]))
            with there.connect() as new:
                for wire in (old, new):
                    status, told = drained(there, wire, raw)
                    assert status == 503
                    assert b"connection: close" in told
                    assert b"retry-after" in told
                    assert is_closed(wire)
            assert drained(there, watching, get("/health"))[0] == 200
        there.server.force_exit = True


def test_keep_alive_and_pipelining_answer_in_order(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(predict() + get("/health") + get("/nope") + predict())
        got = b""
        wire.settimeout(10)
        while got.count(b"HTTP/1.1 ") < 4 or not got.endswith(b"}"):
            got += wire.recv(65536)
    assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404", b"200"]


def test_a_connection_serves_again_after_a_refusal(here: Inside) -> None:
    with here.connect() as wire:
        for raw, status in (
            (post("/nope", b"text/plain", b"x" * 5000), 404),
            (predict(), 200),
            (predict(b"no"), 415),
            (predict(), 200),
        ):
            wire.sendall(raw)
            assert answer_to(wire)[0] == status


def test_old_clients(here: Inside) -> None:
    with here.connect() as wire:
        wire.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        status, told = answer_to(wire)
        assert status == 200
        assert told.endswith(b'{"status":"ok"}')
        assert is_closed(wire)


def test_expecting_to_be_asked_for_the_body(here: Inside) -> None:
    raw = post("/predict", *form([("a.png", picture())]), headers=[b"Expect: 100-continue"])
    head, mark, body = raw.partition(b"\r\n\r\n")
    with here.connect() as wire:
        wire.sendall(head + mark)
        assert wire.recv(1000).startswith(b"HTTP/1.1 100")
        wire.sendall(body)
        assert answer_to(wire)[0] == 200
    long = head.replace(b"Content-Length: %d" % len(body), b"Content-Length: 9999999") + mark
    assert ask(here, long)[0] == 413  # and no 100 first


def test_upgrades_are_left_alone(here: Inside) -> None:
    more = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n"
    assert ask(here, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + more)[0] == 200


def test_connections_are_counted(here: Inside) -> None:
    until(lambda: len(here.server.server_state.connections) <= 1)
    held = [here.connect() for _ in range(60)]
    try:
        until(lambda: len(here.server.server_state.connections) <= 31)
        assert any(answer_to(wire)[0] == 503 for wire in held[-5:])
    finally:
        for wire in held:
            wire.close()
    until(lambda: len(here.server.server_state.connections) <= 1)


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_given_up(here: Inside) -> None:
    """The interface is asked for again and again on one connection, and never read: its answers fill every buffer."""
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect(("127.0.0.1", here.port))
        port = wire.getsockname()[1]

        def held() -> bool:
            return any(each.client[1] == port for each in list(here.server.server_state.connections) if each.client)

        until(held)
        wire.setblocking(False)
        flood, sent = get("/docs") * 100, 0

        def is_given_up() -> bool:
            nonlocal sent
            with contextlib.suppress(BlockingIOError, ConnectionError):
                sent = (sent + wire.send(flood[sent:])) % len(flood)
            return not held()

        until(is_given_up, 12)  # keep-alive would take 15 s more


@pytest.mark.slow
def test_three_hundred_slow_senders_hold_nothing() -> None:
    with inside(head_s=2, read_s=2) as here:
        wires = [here.connect() for _ in range(300)]
        try:
            for at, wire in enumerate(wires):
                wire.sendall(b"POST /pre" if at % 2 else predict()[:-50])
            assert here.post().status_code == 200
            time.sleep(4)
            assert len(here.server.server_state.connections) <= 1
            assert here.post().status_code == 200
        finally:
            for wire in wires:
                wire.close()
