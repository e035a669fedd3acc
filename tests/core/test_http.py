"""The HTTP client, against a server on this machine. The downloads of weights, data sets and images test the rest."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vitrail.core import http

BODY = bytes(range(256)) * 40


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if start >= len(BODY):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(BODY)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Range", f"bytes {start}-{len(BODY) - 1}/{len(BODY)}")
        self.send_header("Content-Length", str(len(BODY) - start + (9 if self.path == "/short" else 0)))
        self.end_headers()
        self.wfile.write(BODY[start:])

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.0)
    monkeypatch.setenv("no_proxy", "*")


def test_read_url(base: str) -> None:
    assert http.read_url(f"{base}/a", max_bytes=len(BODY)) == BODY
    with pytest.raises(http.UnsafeRequest):
        http.read_url(f"{base}/a", max_bytes=len(BODY) - 1)
    with pytest.raises(http.TransferFailed):
        http.read_url(f"{base}/short", max_bytes=2 * len(BODY))
    for address in ("file:///etc/passwd", "ftp://host/x", "http://user:secret@host/"):
        with pytest.raises(http.UnsafeRequest):
            http.read_url(address, max_bytes=1)


@pytest.mark.parametrize("found", [b"", BODY[:100], BODY, BODY + b"x"], ids=["new", "part", "complete", "too long"])
def test_download_without_a_checksum_resumes_if_allowed(base: str, tmp_path: Path, found: bytes) -> None:
    part = tmp_path / "part"
    part.write_bytes(found)
    assert http.download(base, part, expect=lambda _: None, max_bytes=10**6, resume_unverified=True) is None
    assert part.read_bytes() == BODY


def test_download_by_md5(base: str, tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(BODY)
    right = http.compute_checksum(tmp_path / "whole", "md5")
    assert http.download(base, tmp_path / "part", expect=lambda _: right, max_bytes=10**6) == right
    (tmp_path / "part").unlink()
    with pytest.raises(http.ChecksumError):
        http.download(base, tmp_path / "part", expect=lambda _: "md5:" + "0" * 32, max_bytes=10**6)
    assert not (tmp_path / "part").exists()


def test_redirects_go_up_to_https_and_never_down() -> None:
    with pytest.raises(http.UnsafeRequest, match="from https down to http://storage"):
        http.resolve_redirect("https://hub/file", "http://storage/file")
    assert http.resolve_redirect("https://hub/a/b", "/c?d=e%2F f#g") == "https://hub/c?d=e%2F%20f"
    assert http.resolve_redirect("http://hub/file", "https://storage/file") == "https://storage/file"
