"""Many clients for a while, in a process of their own: every answer right, nothing lost, memory flat. At length,
bench/serve.py."""

from pathlib import Path

import httpx
import pytest

from tests.serve.load import SHIPPED, SMALL, Load, load, plan, stocked
from tests.serve.subprocess_server import running

ONE = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_thirty_two_clients_are_all_answered_rightly(tmp_path: Path) -> None:
    stock = stocked(tmp_path, SMALL)
    with running(str(stock.weights), "--device", "cpu", environment=ONE) as server:
        load(server, tmp_path, plan(stock.good, clients=32, count=200))
        memory, descriptors = server.memory, server.descriptors
        mixed = [*stock.good, *stock.bad[:5]]
        report = load(server, tmp_path, plan(mixed, clients=32, count=600))
        assert report["sent"] == sum(report["statuses"].values()) == 600
        assert set(report["statuses"]) <= {"200", "400", "404", "415"}
        assert report["statuses"]["200"] > 500
        assert report["difference"] < 1e-5
        assert server.memory - memory < max(0.05 * memory, 2**20)
        assert server.descriptors <= descriptors
        assert server.stop() == 0


@pytest.mark.slow
def test_batching_is_worth_something(tmp_path: Path) -> None:
    """By the calls of the network, which are what a batch saves; what a call costs is for bench/serve.py to say."""
    stock = stocked(tmp_path, SHIPPED)
    words = (str(stock.weights), "--device", "cpu", "--threads", "2", "--wait-ms", "200")
    calls: dict[str, float] = {}
    for batch in ("1", "16"):
        with running(*words, "--batch", batch) as server:
            report = load(server, tmp_path, plan(stock.good, clients=32, count=320))
            assert report["statuses"] == {"200": 320}
            assert report["difference"] < 1e-5
            metrics = httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).text
            found = dict(line.split() for line in metrics.splitlines() if not line.startswith("#"))
            assert float(found["vitrail_batch_pictures_sum"]) == 320
            calls[batch] = float(found["vitrail_batch_pictures_count"])
    assert calls["1"] == 320
    assert calls["16"] <= 320 / 4


@pytest.mark.slow
def test_a_crowd_is_turned_away_and_health_answers(tmp_path: Path) -> None:
    stock = stocked(tmp_path, SHIPPED)
    with running(str(stock.weights), "--device", "cpu", "--threads", "1", "--queue", "16") as server:
        crowd = Load(server, tmp_path, plan(stock.good, clients=150, seconds=6, patience=0.1))
        health = load(server, tmp_path, plan([(str(tmp_path / "health"), None)], clients=1, seconds=4, pause=0.05))
        report = crowd.done()
    assert set(report["statuses"]) == {"200", "429"}
    assert report["statuses"]["429"] > 100
    assert set(health["statuses"]) == {"200"}
