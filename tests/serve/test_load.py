"""Under load: batches form, the queue is bounded, deadlines hold, and who leaves costs nothing."""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.serve.client import connect, differs, form, get, post
from tests.serve.in_process_server import Inside, inside, picture, until
from tests.serve.test_worker import Troubled


def predict(data: bytes, *, topk: int = 5) -> bytes:
    return post(f"/predict?topk={topk}", *form([("a.png", data)]))


def at_once(port: int, raws: list[bytes]) -> list[tuple[int, bytes, bytes]]:
    """Every request on a connection of its own, all at the same time."""

    async def one(raw: bytes) -> tuple[int, bytes, bytes]:
        wire = await connect(port)
        try:
            return await wire.ask(raw)
        finally:
            wire.transport.close()

    async def all_() -> list[tuple[int, bytes, bytes]]:
        return await asyncio.gather(*(one(raw) for raw in raws))

    return asyncio.run(all_())


def stuffed(here: Inside) -> tuple[Troubled, Callable[[], None]]:
    """A server whose worker is held up by a request, and how to let it go on."""
    troubled = Troubled(here)
    troubled.trouble = "hang"
    first = threading.Thread(target=here.post)
    first.start()
    assert troubled.hung.wait(10)

    def go() -> None:
        troubled.go.set()
        first.join(10)

    return troubled, go


def test_what_waits_is_computed_together_and_everyone_gets_his_own_answer() -> None:
    with inside(batch=8) as here:
        troubled, go = stuffed(here)
        datas = [picture(seed) for seed in range(40)]
        threading.Timer(0.5, go).start()
        answers = at_once(here.port, [predict(data) for data in datas])
        go()
        assert [status for status, _, _ in answers] == [200] * 40
        right = here.predictor(datas)
        for (_, _, body), wanted in zip(answers, right, strict=True):
            assert differs(body, [[answer.index, answer.probability] for answer in wanted.top]) < 1e-5
        assert max(troubled.batches) == 8
        assert len(troubled.batches) < 20
        assert here.service.metrics.batches.sum == 41


def test_a_flood_is_turned_away_while_others_wait_and_health_answers() -> None:
    with inside(queue=4) as here:
        _, go = stuffed(here)
        held = threading.Thread(target=lambda: at_once(here.port, [predict(picture(at)) for at in range(4)]))
        held.start()
        until(lambda: len(here.service.queue) == 4)
        answers = at_once(here.port, [predict(picture(at)) for at in range(60)] + [get("/health")] * 10)
        assert Counter(status for status, _, _ in answers) == {429: 60, 200: 10}
        assert b"retry-after: 1" in answers[0][1].lower()
        go()
        held.join(10)
        assert here.post().status_code == 200


def test_pictures_are_counted_and_not_requests() -> None:
    with inside(queue=4, max_images=4) as here:
        _, go = stuffed(here)
        files = [("image", (f"{at}.png", picture(at))) for at in range(4)]
        waiting = threading.Thread(target=lambda: here.client.post("/predict", files=files[:3]))
        waiting.start()
        until(lambda: len(here.service.queue) == 3)
        answers = at_once(here.port, [post("/predict", *form([("a", picture()), ("b", picture())]))])
        assert answers[0][0] == 429
        go()
        waiting.join(10)
        assert here.client.post("/predict", files=files).status_code == 200


def test_who_waits_too_long_is_told_so() -> None:
    with inside(timeout_s=0.3) as here:
        troubled, go = stuffed(here)
        status, head, body = at_once(here.port, [predict(picture())])[0]
        assert status == 503
        assert b"retry-after" in head.lower()
        assert b"no answer within 0.3 s" in body
        assert len(here.service.queue) == 0
        seen = len(troubled.batches)
        go()
        assert here.post().status_code == 200
        assert len(troubled.batches) == seen + 1  # the network never saw the one that gave up


def test_who_leaves_frees_his_place_before_the_network_sees_it() -> None:
    with inside() as here:
        troubled, go = stuffed(here)
        before = here.service.budget.held
        wires = [socket.create_connection(("127.0.0.1", here.port)) for _ in range(12)]
        for wire in wires:
            wire.sendall(predict(picture()))
        until(lambda: len(here.service.queue) == 12)
        for wire in wires:
            wire.close()
        until(lambda: len(here.service.queue) == 0)
        until(lambda: here.service.metrics.gone == 12)
        assert here.service.budget.held == before
        go()
        assert here.post().status_code == 200
        assert sum(troubled.batches) == 2


def test_bodies_together_have_a_limit() -> None:
    with inside(max_bytes=100_000) as here:
        here.service.budget.limit = 150_000
        wires = [socket.create_connection(("127.0.0.1", here.port)) for _ in range(3)]
        for wire in wires[:2]:
            wire.sendall(predict(b"x" * 70_000)[:-100])
        until(lambda: here.service.budget.held > 120_000)
        wires[2].sendall(predict(b"x" * 70_000))
        assert wires[2].recv(20).startswith(b"HTTP/1.1 429")
        for wire in wires:
            wire.close()
        until(lambda: here.service.budget.held == 0)
        assert here.post().status_code == 200


def test_when_told_to_stop_it_answers_what_it_has_and_takes_no_more() -> None:
    with inside() as here:
        _, go = stuffed(here)
        wire = here.connect()
        wire.sendall(predict(picture()))
        until(lambda: len(here.service.queue) == 1)
        here.service.draining = here.server.should_exit = True
        time.sleep(0.3)
        assert at_once(here.port, [get("/ready")])[0][0] == 503
        assert at_once(here.port, [get("/health")])[0][0] == 200
        assert at_once(here.port, [predict(picture())])[0][0] == 503
        go()
        assert wire.recv(20).startswith(b"HTTP/1.1 200")
        wire.close()
