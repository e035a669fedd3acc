"""A server in a thread of the test's own process, in front of a network of a few thousand weights."""

import asyncio
import contextlib
import io
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from tests.models.tiny import awake
from vitrail.checkpoint.bundle import Card
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.predict.predictor import Predictor
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server import Server, bind_socket, run_service
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings, allowed_hosts

NETWORK = ViTConfig(width=16, depth=2, mlp_width=24, heads=2, image=(8, 12), patch=(4, 3), classes=5, registers=2)
LABELS = ("ant", "bee", "cat", "dog", "eel")


def predictor(config: ModelConfig = NETWORK, preprocessing: Preprocessing | None = None) -> Predictor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = awake(config, torch.float32)
    labels = LABELS[: config.classes] or None
    network.card = Card(preprocessing=preprocessing or Preprocessing(image=config.image), labels=labels)
    return Predictor(network, device="cpu")


def picture(seed: int = 0, kind: str = "PNG", size: tuple[int, int] = (20, 14)) -> bytes:
    """A small file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


@dataclass(frozen=True, slots=True)
class Inside:
    """A server that answers."""

    port: int
    service: Service
    server: Server
    predictor: Predictor
    client: httpx.Client

    def connect(self, timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)

    def post(self, path: str = "/predict", data: bytes | None = None, **more: Any) -> httpx.Response:
        return self.client.post(path, files=[("image", ("a.png", picture() if data is None else data))], **more)


@contextlib.contextmanager
def inside(config: ModelConfig = NETWORK, given: Predictor | None = None, **settings: Any) -> Generator[Inside]:
    """A server with these settings, on a port of its own."""
    known = given or predictor(config)
    settings.setdefault("hosts", allowed_hosts("127.0.0.1", loopback=True, origins=settings.get("origins", ())))
    settings.setdefault("farewell_s", 0.02)
    chosen = ServeSettings(**settings)
    service = Service(ServedModel(known, "tiny", chosen), chosen)
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    ready = threading.Event()
    server = Server(service, ready.set)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(run_service(server, listener))
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ready.wait(60)
        assert not failed, failed
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            yield Inside(port, service, server, known, client)
    finally:
        service.draining = server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        assert not failed, failed


def until(true: Any, seconds: float = 10.0) -> None:
    """Waits for something to come true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


def answer_to(connection: socket.socket) -> tuple[int, bytes]:
    """The next answer on a raw connection: status and everything that came; 0 where it was closed without one."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            got += piece
            head, mark, rest = got.partition(b"\r\n\r\n")
            if mark:
                at = head.lower().find(b"content-length:")
                length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                if len(rest) >= length:
                    break
    return (int(got[9:12]) if got.startswith(b"HTTP/1.1 ") else 0), got
