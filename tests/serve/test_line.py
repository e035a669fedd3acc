"""The line between requests and the worker: bounded, in order, and free again when somebody leaves."""

import asyncio
import threading
import time
from collections.abc import Generator

import pytest
import torch

from vitrail.serve.batch_queue import BatchQueue, Kind, QueuedImage
from vitrail.serve.http_errors import RequestError

PIXELS = torch.zeros(3, 2, 2, dtype=torch.uint8)


@pytest.fixture
def loop() -> Generator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def tickets(loop: asyncio.AbstractEventLoop, count: int, kind: Kind = "predict") -> list[QueuedImage]:
    return [QueuedImage(kind, loop.create_future()) for _ in range(count)]


def placed(line: BatchQueue, some: list[QueuedImage]) -> list[QueuedImage]:
    line.admit(some)
    for ticket in some:
        line.put(ticket, PIXELS, None)
    return some


def always() -> bool:
    return True


def test_a_batch_is_what_waits_in_its_order_and_never_more(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=10, batch=4, wait_s=0)
    some = placed(line, tickets(loop, 6))
    assert line.take(always) == some[:4]
    assert line.take(always) == some[4:]
    assert len(line) == 0


def test_the_line_is_bounded_and_takes_all_of_a_request_or_nothing(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=5, batch=4, wait_s=0)
    first = tickets(loop, 3)
    line.admit(first)  # on their way: they count
    line.check_space()
    with pytest.raises(RequestError) as refused:
        line.admit(tickets(loop, 3))
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    assert len(line) == 3
    line.admit(tickets(loop, 2))
    with pytest.raises(RequestError):
        line.check_space()
    line.leave(first)
    assert len(line) == 2
    line.check_space()


def test_one_kind_at_a_time_and_attention_alone(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=20, batch=8, wait_s=0)
    seen, more = tickets(loop, 2, "attention"), tickets(loop, 2, "embed")
    mixed = [tickets(loop, 1)[0], seen[0], tickets(loop, 1)[0], more[0], seen[1], more[1]]
    placed(line, mixed)
    assert line.take(always) == [mixed[0], mixed[2]]
    assert line.take(always) == [seen[0]]
    assert line.take(always) == more
    assert line.take(always) == [seen[1]]


def test_who_leaves_is_not_computed(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=10, batch=8, wait_s=0)
    some = placed(line, tickets(loop, 4))
    line.leave(some[1:3])
    line.leave(some[1:3])  # again changes nothing
    assert line.take(always) == [some[0], some[3]]
    late = tickets(loop, 1)
    line.admit(late)
    line.leave(late)
    line.put(late[0], PIXELS, None)  # its thread had not heard
    assert len(line) == 0
    assert late[0].pixels is None
    line.leave(some)  # what was taken is not given up twice
    assert len(line) == 0


def test_it_waits_for_pictures_that_come_and_not_for_others(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=10, batch=3, wait_s=3600)  # in vain, and the test would not end
    alone = placed(line, tickets(loop, 1))
    assert line.take(always) == alone
    some = tickets(loop, 2)
    line.admit(some)
    line.put(some[0], PIXELS, None)
    threading.Timer(0.1, lambda: line.put(some[1], PIXELS, None)).start()
    assert line.take(always) == some


def test_but_not_long(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=10, batch=3, wait_s=0.05)
    some = tickets(loop, 2)
    line.admit(some)
    line.put(some[0], PIXELS, None)
    assert line.take(always) == some[:1]


def test_a_closed_line_lets_its_worker_go(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=10, batch=3, wait_s=0)
    threading.Timer(0.05, line.close).start()
    assert line.take(always) == []
    placed(line, tickets(loop, 1))
    assert line.take(always) == []


def test_many_threads_lose_nothing(loop: asyncio.AbstractEventLoop) -> None:
    line = BatchQueue(capacity=4000, batch=7, wait_s=0.0005)
    some = tickets(loop, 2000)
    line.admit(some)
    taken: list[QueuedImage] = []
    left = set(map(id, some[::10]))

    def bring(part: list[QueuedImage]) -> None:
        for ticket in part:
            line.put(ticket, PIXELS, None)

    def leave() -> None:
        for ticket in some[::10]:
            line.leave([ticket])

    def take() -> None:
        while batch := line.take(always):
            taken.extend(batch)

    worker = threading.Thread(target=take)
    worker.start()
    bringers = [threading.Thread(target=bring, args=(some[at::4],)) for at in range(4)]
    leaver = threading.Thread(target=leave)
    for thread in (*bringers, leaver):
        thread.start()
    for thread in (*bringers, leaver):
        thread.join()
    end = time.monotonic() + 10
    while len(line) and time.monotonic() < end:
        time.sleep(0.01)
    line.close()
    worker.join(5)
    assert len(line) == 0
    assert len(set(map(id, taken))) == len(taken)
    assert {id(ticket) for ticket in some} - left <= set(map(id, taken))
