"""The thread that runs the network: what fails fails alone, and a thread that is lost is replaced."""

import io
import logging
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.serve.in_process_server import Inside, inside, picture, until
from vitrail.serve.batch_queue import QueuedImage

died = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Troubled:
    """A network's `compute` that can be told to fail, to end its thread, or to hang."""

    def __init__(self, here: Inside) -> None:
        self.inner = here.service.served.compute
        self.batches: list[int] = []
        self.trouble = ""
        self.hung, self.go = threading.Event(), threading.Event()
        here.service.served.compute = self  # type: ignore[method-assign]
        here.service.supervisor.worker.compute = self

    def __call__(self, tickets: Sequence[QueuedImage]) -> Sequence[Any]:
        self.batches.append(len(tickets))
        trouble = self.trouble
        if trouble == "die":
            self.trouble = ""
            raise SystemExit
        if trouble == "hang":
            self.trouble = ""
            self.hung.set()
            self.go.wait(30)
        if trouble == "dark" and any(int(ticket.pixels.max()) == 0 for ticket in tickets if ticket.pixels is not None):
            raise RuntimeError("I see nothing")
        return self.inner(tickets)


def black() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (9, 9)).save(content, "PNG")
    return content.getvalue()


def test_a_picture_that_cannot_be_computed_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    with inside(wait_ms=300) as here, caplog.at_level(logging.CRITICAL, "vitrail.serve"):
        troubled = Troubled(here)
        troubled.trouble = "dark"
        answers: list[httpx.Response] = []

        def ask(data: bytes) -> None:
            answers.append(here.post(data=data))

        threads = [threading.Thread(target=ask, args=(data,)) for data in [black(), *(picture(at) for at in range(6))]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 6 + [500]
        assert here.client.get("/ready").status_code == 200


@died
def test_a_thread_that_died_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with inside() as here, caplog.at_level(logging.CRITICAL, "vitrail.serve"):
        troubled = Troubled(here)
        old = here.service.supervisor.worker
        troubled.trouble = "die"
        response = here.post()
        assert response.status_code == 503
        assert "died" in response.json()["reason"]
        assert int(response.headers["retry-after"]) >= 1
        until(lambda: here.client.get("/ready").status_code == 200)
        assert here.service.supervisor.worker is not old
        assert here.post().status_code == 200
        assert "vitrail_worker_restarts_total 1\n" in here.client.get("/metrics").text


@died
def test_a_dead_thread_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.serve.service.TICK_S", 60)  # nobody looks after it
    with inside(timeout_s=0.5) as here:
        Troubled(here).trouble = "die"
        assert here.post().status_code == 503
        response = here.client.get("/ready")
        assert response.status_code == 503
        assert response.json()["error"] == "not ready"
        assert here.client.get("/health").status_code == 200


def test_a_thread_that_hangs_is_replaced_and_its_late_answer_goes_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with inside(stuck_s=0.5) as here, caplog.at_level(logging.CRITICAL, "vitrail.serve"):
        troubled = Troubled(here)
        old = here.service.supervisor.worker
        troubled.trouble = "hang"
        response = here.post()
        assert response.status_code == 503
        assert "hung" in response.json()["reason"]
        assert here.post().status_code == 200
        assert here.client.get("/ready").status_code == 200
        seen = here.service.metrics.batches.sum
        troubled.go.set()
        until(lambda: not old.thread.is_alive())
        assert here.service.metrics.batches.sum == seen


@pytest.mark.slow
def test_what_waits_behind_a_lost_thread_is_served_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    with inside(stuck_s=1) as here, caplog.at_level(logging.CRITICAL, "vitrail.serve"):
        troubled = Troubled(here)
        troubled.trouble = "hang"
        first = threading.Thread(target=here.post)
        first.start()
        assert troubled.hung.wait(10)
        assert here.post().status_code == 200  # waits until the next thread is there
        troubled.go.set()
        first.join()
