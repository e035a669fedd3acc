"""Addresses are fetched where that was asked for, within limits, and never off the web. The server is on loopback."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import pytest

from tests.models.tiny import VIT
from tests.predict.pictures import drawn, network
from vitrail.core.errors import BadImage
from vitrail.predict import image_input as remote
from vitrail.predict.predictor import Predictor

PICTURE = BytesIO()
drawn(1)[0].save(PICTURE, "PNG")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        moved = {"/moved": "/cat.png", "/off": "file:///etc/passwd", "/ftp": "ftp://localhost/a", "/round": "/round"}
        if self.path in moved:
            self.send_response(302)
            self.send_header("Location", moved[self.path])
            self.end_headers()
        elif self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(PICTURE.getvalue())
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                threading.Event().wait(0.05)
        elif self.path == "/cat.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PICTURE.getvalue())
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a reader that had enough
            super().handle()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_address_is_a_picture_where_that_was_asked_for(host: str) -> None:
    model = network(VIT)
    asker = Predictor(model, device="cpu", urls=True)
    assert asker(f"{host}/cat.png") == asker(PICTURE.getvalue()) == asker(f"{host}/moved")
    with pytest.raises(BadImage, match="none is fetched unless asked for"):
        Predictor(model, device="cpu")(f"{host}/cat.png")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/none.png", "answers 404"),
        ("/off", "redirects to 'file:///etc/passwd', which is not an http"),
        ("/ftp", "redirects to 'ftp://localhost/a', which is not an http"),
        ("/round", "redirects more than 5 times"),
        ("/cut", "the connection broke"),
    ],
)
def test_what_cannot_be_had_says_why(host: str, path: str, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        Predictor(network(VIT), device="cpu", urls=True)(host + path)


def test_no_more_and_no_longer_than_agreed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.3)
    with pytest.raises(BadImage, match="was not complete after"):
        remote.image_from(f"{host}/slow", urls=True)
    monkeypatch.setattr(remote, "MAX_BYTES", 100)
    with pytest.raises(BadImage, match="more than 100 bytes"):
        remote.image_from(f"{host}/cat.png", urls=True)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://localhost/a", "data://x", "http://"])
def test_only_the_web_is_asked(url: str) -> None:
    with pytest.raises(BadImage):
        remote.image_from(url, urls=True)
