"""`vitrail serve`: how it starts, what it says, how it stops, and what it refuses."""

import contextlib
import importlib.util
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import awake
from tests.serve.client import form, get, post
from tests.serve.in_process_server import NETWORK, answer_to, picture
from tests.serve.subprocess_server import Running, running
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main

QUICK = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save(awake(NETWORK, torch.float32), path, labels=["ant", "bee", "cat", "dog", "eel"])
    return path


@contextlib.contextmanager
def started(weights: Path, *words: str, **environment: str) -> Generator[Running]:
    with running(str(weights), "--device", "cpu", *words, environment={**QUICK, **environment}) as server:
        yield server


@pytest.fixture(scope="module")
def server(weights: Path) -> Generator[Running]:
    words = ("--queue", "9", "--batch", "3", "--max-pixels", "1000000", "--timeout", "7")
    with started(weights, *words) as running_:
        yield running_
        assert running_.stop() == 0
        time.sleep(0.1)
        assert len(running_.said) == 3  # nothing for a request, nothing at the end


def fetched(server: Running, path: str, **headers: str) -> Any:
    asked = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=20) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_it_says_where_it_is_what_it_is_and_what_it_takes(server: Running) -> None:
    assert server.said[0] == f"http://127.0.0.1:{server.port}  (Ctrl-C stops it)"
    assert server.said[1].startswith("model: tiny.safetensors: ViT, 0.0")
    assert "8x12 px, 5 classes, on cpu, 1 thread" in server.said[1]
    assert server.said[2] == (
        "limits: 20 MiB and 9 images per request, 1 million pixels each, 9 queued, 3 per batch, 7 s; no token"
    )
    assert fetched(server, "/model")["limits"]["max_pixels"] == 1_000_000


@pytest.mark.slow
def test_the_documented_client_works(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    (code,) = re.findall(r"test_serve.py runs it against one -->\n```python\n(.*?)```", text, re.DOTALL)
    for name in ("cat.jpg", "dog.jpg"):
        (tmp_path / name).write_bytes(picture(kind="JPEG"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    code = code.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{server.port}")
    exec(compile(code, "docs/serving.md", "exec"), {"__name__": "page"})
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_descriptors_come_back(server: Running) -> None:
    raw = post("/predict", *form([("a.png", picture())]))
    fetched(server, "/health")
    time.sleep(0.2)
    before = server.descriptors
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", server.port)) as wire:
            wire.sendall(raw)
            assert answer_to(wire)[0] == 200
    time.sleep(0.5)
    assert server.descriptors <= before


@pytest.mark.slow
def test_a_request_in_flight_is_answered_when_it_is_told_to_stop(weights: Path) -> None:
    raw = post("/predict", *form([(f"{at}.png", picture(at, size=(500, 400))) for at in range(12)]))
    with started(weights) as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as wire:
        wire.sendall(raw)
        time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        status, _ = answer_to(wire)
        assert status == 200
        assert server.process.wait(10) == 0


@pytest.mark.slow
def test_load_when_it_is_told_to_stop_loses_no_answer(weights: Path) -> None:
    """Whoever was let in is answered; later ones are told 503, or find nobody."""
    raw = post("/predict", *form([("a.png", picture())]))
    seen: list[int] = []
    with started(weights) as server:

        def client() -> None:
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.1", server.port)) as wire,
            ):
                wire.settimeout(20)
                while True:
                    try:
                        wire.sendall(raw)
                    except ConnectionError:
                        return
                    status, got = answer_to(wire)
                    # A connection that was idle may be closed while a request is under way to it, as HTTP allows.
                    if not got:
                        return
                    seen.append(status)

        clients = [threading.Thread(target=client) for _ in range(6)]
        for thread in clients:
            thread.start()
        time.sleep(0.7)
        assert server.stop() == 0
        for thread in clients:
            thread.join(20)
            assert not thread.is_alive()
    assert set(seen) <= {200, 503}
    assert seen.count(200) > 20


@pytest.mark.slow
def test_interrupted_once_with_the_network_that_comes_along() -> None:
    with running("--device", "cpu", environment=QUICK) as server:
        assert server.said[1].startswith("model: vitrail-cifar10: ViT, ")
        assert server.stop(signal.SIGINT) == 0


@pytest.mark.slow
def test_interrupted_twice(weights: Path) -> None:
    with started(weights, "--read-timeout", "60", "--timeout", "60") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as wire:
            wire.sendall(post("/predict", *form([("a.png", picture())]))[:-20])  # and no more
            time.sleep(0.3)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.7)
            assert server.process.poll() is None  # waits for it
            assert server.stop(signal.SIGINT) == 130  # not after the 60 s that the rest may take to come
        assert not any("Traceback" in line for line in server.said), server.said


@pytest.mark.slow
def test_the_token_comes_from_the_environment_and_is_not_shown(weights: Path) -> None:
    with started(weights, VITRAIL_TOKEN="s3cret") as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(server, "/model")
        refused.value.close()
        assert refused.value.code == 401
        assert fetched(server, "/model", Authorization="Bearer s3cret")["name"] == "tiny.safetensors"
        assert server.said[2].endswith("token required")
        assert not any("s3cret" in line for line in server.said)


@pytest.mark.slow
def test_an_open_server_is_warned_of(weights: Path) -> None:
    with started(weights, "--host", "0.0.0.0", "--access-log") as server:
        assert "warning: anyone who can reach 0.0.0.0 can use this server; set a token" in "\n".join(server.said)
        assert fetched(server, "/model", Host="photos.example")["name"] == "tiny.safetensors"
        time.sleep(0.3)
        assert any(line.startswith("vitrail: GET /model 200 ") for line in server.said), server.said


@pytest.mark.slow
def test_ipv6(weights: Path) -> None:
    if not socket.has_ipv6 or not can_bind("::1"):
        pytest.skip("no IPv6 here")
    with started(weights, "--host", "::1") as server:
        assert server.said[0].startswith(f"http://[::1]:{server.port}")
        with socket.create_connection(("::1", server.port)) as wire:
            wire.sendall(get("/health").replace(b"127.0.0.1", b"[::1]:%d" % server.port))
            assert answer_to(wire)[0] == 200


def can_bind(host: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind((host, 0))
        return True
    return False


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["serve", *words]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    return said.err


def test_a_taken_port_is_known_before_the_weights_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port} is already in use" in complaint(capsys, "nowhere.safetensors", "--port", port)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--port", "70000"), "65535"),
        (("--host", "no.such.host.invalid"), "give an address of this machine"),
        (("--host", "192.0.2.1"), "give an address of this machine"),
        (("--queue", "0"), "queue=0 must be at least 1"),
        (("--batch", "0"), "batch=0 must be at least 1"),
        (("--timeout", "0"), "timeout_s=0 must be above 0"),
        (("--wait-ms", "-1"), "wait_ms=-1 must be between"),
        (("--origin", "demo.example"), "scheme and host"),
        (("--token", "né"), "printable ASCII"),
        (("--token", ""), "the token is empty"),
        (("--threads", "0"), "--threads 0 must be at least 1"),
        (("--max-bytes", "-1"), "max_bytes=-1 must be at least 1"),
        (("--device", "warp"), "use auto, cpu, cuda or mps"),
        (("--image-size", "10"), "patch"),
    ],
)
def test_mistakes_are_one_line(
    weights: Path, words: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = () if "--port" in words else ("--port", "0")
    assert remedy in complaint(capsys, str(weights), "--device", "cpu", *port, *words)


def test_weights_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.safetensors" in complaint(capsys, "nowhere.safetensors", "--port", "0")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "serving needs uvicorn, not installed here: pip install 'vitrail[serve]'" in complaint(capsys, "--port", "0")


def test_help_needs_no_server_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--max-pixels" in capsys.readouterr().out
