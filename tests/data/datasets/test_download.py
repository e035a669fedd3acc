"""Fetching, from a server on this machine: whole, resumed, broken, damaged, refused."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.data.datasets import writers
from vitrail.core import http
from vitrail.core.errors import DataError, SourceNotFound
from vitrail.data.datasets import catalogue
from vitrail.data.datasets import open_by_name as opening
from vitrail.data.datasets.catalogue import DataFile
from vitrail.data.datasets.open_by_name import fetch

BODY = bytes(range(256)) * 4000


class Server(HTTPServer):
    """What it has, and how it misbehaves."""

    files: dict[str, bytes]
    asked: list[tuple[str, str]]
    breaks: int = 0  # so many answers end in the middle
    ranges: bool = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.server.asked.append((self.path, wanted))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.end_headers()
            return
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(wanted[6:-1]) if wanted and self.server.ranges else 0
        if start > len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        end = len(body)
        if self.server.breaks:
            self.server.breaks -= 1
            end = start + (len(body) - start) // 2
        self.wfile.write(body[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(http, "BACKOFF_S", 0.0)
    made = Server(("127.0.0.1", 0), Handler)
    made.files, made.asked = {"/a.bin": BODY}, []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def described(server: Server, body: bytes = BODY, path: str = "a.bin") -> DataFile:
    return DataFile(path=path, url=f"{server.address}/a.bin", size=len(body), sha256=hashlib.sha256(body).hexdigest())


def test_a_file_comes_whole_and_is_asked_for_once(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    file = described(server, path="deep/a.bin")
    path = fetch(file, tmp_path, lambda *step: told.append(step))
    assert path.read_bytes() == BODY
    assert told[-1] == ("a.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    fetch(file, tmp_path)
    assert len(server.asked) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["a.bin"]


def test_it_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BODY[:1000])
    assert fetch(described(server), tmp_path).read_bytes() == BODY
    assert server.asked == [("/a.bin", "bytes=1000-")]


def test_a_connection_that_breaks_is_tried_again_from_there(server: Server, tmp_path: Path) -> None:
    server.breaks = 2
    assert fetch(described(server), tmp_path).read_bytes() == BODY
    assert [wanted for _, wanted in server.asked] == ["", f"bytes={len(BODY) // 2}-", f"bytes={len(BODY) * 3 // 4}-"]


def test_a_server_without_ranges_begins_anew(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    assert fetch(described(server), tmp_path).read_bytes() == BODY


def test_a_part_that_is_too_long_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(BODY + b"more")
    assert fetch(described(server), tmp_path).read_bytes() == BODY


def test_what_never_comes_keeps_what_came(server: Server, tmp_path: Path) -> None:
    server.breaks = 99
    with pytest.raises(SourceNotFound):
        fetch(described(server), tmp_path)
    assert len(BODY) * 0.9 < (tmp_path / "a.bin.part").stat().st_size < len(BODY)
    assert not (tmp_path / "a.bin").exists()


def test_a_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = BODY[:-1] + b"?"
    for file in (described(server), replace(described(server), sha256=None, md5=hashlib.md5(BODY).hexdigest())):
        with pytest.raises(DataError):
            fetch(file, tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_another_length_is_refused_at_once(server: Server, tmp_path: Path) -> None:
    server.files["/a.bin"] = b"<html>please log in</html>"
    with pytest.raises(DataError):
        fetch(described(server), tmp_path)


def test_what_is_not_there_is_said(server: Server, tmp_path: Path) -> None:
    server.files.clear()
    with pytest.raises(SourceNotFound):
        fetch(described(server), tmp_path)


def test_redirects_are_followed_but_not_anywhere(server: Server, tmp_path: Path) -> None:
    good = replace(described(server), url=f"{server.address}/to/{server.address}/a.bin")
    assert fetch(good, tmp_path).read_bytes() == BODY
    (tmp_path / "a.bin").unlink()
    bad = replace(good, url=f"{server.address}/to/ftp://127.0.0.1/a.bin")
    with pytest.raises(DataError):
        fetch(bad, tmp_path)
    with pytest.raises(DataError):
        fetch(replace(good, url="file:///etc/hostname"), tmp_path)


def test_offline_asks_nobody(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    with pytest.raises(SourceNotFound):
        fetch(described(server), tmp_path)
    assert server.asked == []


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").write_bytes(b"a file where a folder should be")
    with pytest.raises(DataError):
        fetch(described(server), tmp_path / "set")


def test_a_set_is_downloaded_and_opened(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers.svhn(tmp_path / "origin")
    files = []
    for path in (tmp_path / "origin").iterdir():
        server.files[f"/{path.name}"] = path.read_bytes()
        files.append(DataFile(path=path.name, url=f"{server.address}/{path.name}", size=path.stat().st_size))
    extra = DataFile(path="extra.mat", url=f"{server.address}/extra.mat", optional=True)
    entry = replace(catalogue.SETS["svhn"], files=(*files, extra))
    monkeypatch.setattr(opening, "SETS", {"svhn": entry})
    with pytest.raises(SourceNotFound, match="--download"):
        opening.open_named("svhn", tmp_path / "data")
    told: list[str] = []
    splits = opening.open_named("svhn", tmp_path / "data", download=True, progress=lambda name, *_: told.append(name))
    assert {split: len(source) for split, source in splits.items()} == {"train": 40, "test": 6}
    assert set(told) == {"train_32x32.mat", "test_32x32.mat"}
    asked = len(server.asked)
    opening.open_named("svhn", tmp_path / "data", download=True)
    assert len(server.asked) == asked, "what is there is not asked for again"
