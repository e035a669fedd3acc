"""The cache and the download, against a hub of our own on this machine: no test leaves it."""

import hashlib
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vitrail.checkpoint import download_weights as hub
from vitrail.checkpoint.download_weights import cached_path, fetch, file_url
from vitrail.checkpoint.known_weights import PublicWeights, find_public_weights
from vitrail.core import http
from vitrail.core.errors import ConfigError, CorruptWeights, UnsafeWeights, WeightsError, WeightsNotFound

ENTRY = find_public_weights("vit_ti_16", "augreg_in21k")
FILE = "/timm/vit_tiny_patch16_224.augreg_in21k/resolve/main/model.safetensors"
BODY = bytes(range(256)) * 1200 + b"end"
SHA256 = hashlib.sha256(BODY).hexdigest()
OTHER = "0" * 64


class Hub(ThreadingHTTPServer):
    """A hub that redirects to its own storage, and every way in which it can misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server_port}"
        self.storage = "/storage"
        self.body = BODY
        self.etag: str | None = f'"{SHA256}"'
        self.statuses: list[int] = []  # answered first, one a request
        self.cuts: list[int] = []  # bytes after which the next bodies break off
        self.has_ranges = True
        self.has_length = True
        self.headers: dict[str, str] = {}
        self.stall: threading.Event | None = None  # awaited in the middle of a body
        self.requests: list[tuple[str, Message]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is not a news."""

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def header(self, name: str) -> list[str | None]:
        """One header of every request so far."""
        return [headers.get(name) for _, headers in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        site = self.server
        site.requests.append((self.path, self.headers))
        if site.statuses:
            self.reply(site.statuses.pop(0), {"Content-Length": "0", "Retry-After": "7"})
        elif self.path == FILE and site.storage:
            linked = {"X-Linked-Etag": site.etag} if site.etag else {}
            self.reply(302, {"Location": site.storage, "Content-Length": "0", **linked})
        elif self.path == "/bounce":
            self.reply(302, {"Location": f"{site.base}/storage", "Content-Length": "0"})
        elif self.path.startswith("/storage") or self.path == FILE:
            self.serve()
        else:
            self.reply(404, {"Content-Length": "0"})

    def serve(self) -> None:
        site, start, status = self.server, 0, 200
        headers = {"ETag": f'"{OTHER}"', **site.headers}  # the storage's own tag is not a checksum of the file
        wanted = self.headers.get("Range")
        if wanted and site.has_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(site.body):
                self.reply(416, {"Content-Range": f"bytes */{len(site.body)}", "Content-Length": "2"})
                self.wfile.write(b"no")
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(site.body) - 1}/{len(site.body)}"
        if site.has_length:
            headers.setdefault("Content-Length", str(len(site.body) - start))
        self.reply(status, headers)
        rest = site.body[start : start + site.cuts.pop(0) if site.cuts else None]
        half = len(rest) // 2 if site.stall else 0
        self.wfile.write(rest[:half])
        if site.stall:
            site.stall.wait(10)
        self.wfile.write(rest[half:])
        self.close_connection = True

    def reply(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def site() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VITRAIL_HUB", "HF_ENDPOINT", "VITRAIL_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "*")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    monkeypatch.setattr(http, "BACKOFF_S", 0.0)
    monkeypatch.setattr(hub, "LOCK_POLL_S", 0.005)


def left(entry: PublicWeights = ENTRY) -> set[str]:
    """What lies in the file's folder, the lock aside."""
    folder = cached_path(entry).parent
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"} if folder.exists() else set()


def place(name: str, content: bytes) -> Path:
    path = cached_path(ENTRY).with_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.005)
    pytest.fail("it did not come to pass in ten seconds")


KEPT = {"model.safetensors", "model.safetensors.json"}


# The good way.


def test_redirect_and_checksum(site: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch(ENTRY, endpoint=site.base)
    assert path.read_bytes() == BODY
    assert left() == KEPT
    assert site.paths() == [FILE, "/storage"]
    record = json.loads(path.with_name("model.safetensors.json").read_text())
    assert record.pop("date").endswith("+00:00")
    assert record == {"sha256": SHA256, "size": len(BODY), "url": site.base + FILE, "etag": SHA256}
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"downloading {ENTRY.repo} (0.3 MB, apache-2.0) from 127.0.0.1", f"saved {path}"]


def test_cached_file_asks_nobody_and_writes_nothing(site: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    first = fetch(ENTRY, endpoint=site.base)
    first.with_name("model.safetensors.lock").unlink()
    capsys.readouterr()
    site.requests.clear()
    assert fetch(ENTRY, endpoint=site.base) == first
    assert not site.requests
    assert capsys.readouterr().err == ""
    assert {path.name for path in first.parent.iterdir()} == KEPT


def test_file_served_without_a_redirect(site: Hub) -> None:
    site.storage = ""
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.paths() == [FILE]


def test_chunks_of_unknown_length_are_taken_with_a_checksum(site: Hub) -> None:
    site.has_length = False
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY


def test_bar_on_a_terminal(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert "307.2/307.2 kB" in screen.getvalue()


# Checksums.


def test_wrong_checksum_leaves_nothing(site: Hub) -> None:
    site.etag = f'"{OTHER}"'
    with pytest.raises(CorruptWeights, match=f"sha256 {SHA256}, not {OTHER}"):
        fetch(ENTRY, endpoint=site.base)
    assert left() == set()


def test_pinned_checksum_outranks_the_hub(site: Hub) -> None:
    site.etag = None
    assert fetch(replace(ENTRY, sha256=SHA256), endpoint=site.base).read_bytes() == BODY
    with pytest.raises(CorruptWeights, match=f"not {OTHER}"):
        fetch(replace(ENTRY, sha256=OTHER), endpoint=site.base)
    assert left() == set()


def test_hub_that_left_the_pin_behind_is_told_before_the_body(site: Hub) -> None:
    with pytest.raises(CorruptWeights, match=f"now has sha256 {SHA256}, not the pinned {OTHER}"):
        fetch(replace(ENTRY, sha256=OTHER), endpoint=site.base)
    assert left() == set()


@pytest.mark.parametrize("etag", [None, '"d670460b4b4aece5915caf5c68d12f560a9fe3e4"'], ids=["none", "git"])
def test_no_checksum_warns_and_records(site: Hub, etag: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    site.etag = etag
    path = fetch(ENTRY, endpoint=site.base)
    assert f"warning: {site.base}{FILE} has no known checksum" in capsys.readouterr().err
    record = json.loads(path.with_name("model.safetensors.json").read_text())
    assert (record["sha256"], record["etag"]) == (SHA256, None)


@pytest.mark.parametrize("headers", [{"Content-Type": "text/html"}, {"Content-Encoding": "gzip"}, {}])
def test_no_checksum_and_no_plain_file_is_refused(site: Hub, headers: dict[str, str]) -> None:
    site.etag, site.headers, site.has_length = None, headers, bool(headers)
    with pytest.raises(CorruptWeights, match="no checksum and is not a plain file of known length"):
        fetch(ENTRY, endpoint=site.base)
    assert left() == set()


# Broken connections.


def test_resume_where_the_connection_broke(site: Hub) -> None:
    site.cuts = [100_000, 50_000]
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert left() == KEPT
    ranges = [headers.get("Range") for path, headers in site.requests if path == "/storage"]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_resume_in_a_later_call(site: Hub) -> None:
    site.cuts = [10_000, 10_000, 10_000, 10_000]
    with pytest.raises(WeightsNotFound, match="broke after 40,000 of"):
        fetch(ENTRY, endpoint=site.base)
    assert left() == {"model.safetensors.part"}
    site.requests.clear()
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Range")[-1] == "bytes=40000-"
    assert left() == KEPT


def test_server_that_ignores_ranges_starts_anew(site: Hub) -> None:
    site.cuts, site.has_ranges = [100_000], False
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Range") == [None, None, "bytes=100000-", "bytes=100000-"]


def test_part_of_another_file_is_dropped(site: Hub) -> None:
    place("model.safetensors.part", b"x" * 1000)
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Range") == ["bytes=1000-", "bytes=1000-", None, None]


def test_part_that_is_the_whole_file_is_kept(site: Hub) -> None:
    place("model.safetensors.part", BODY)
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert len(site.requests) == 2


def test_part_that_is_too_long_is_dropped(site: Hub) -> None:
    place("model.safetensors.part", BODY + b"x")
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY


def test_part_without_a_checksum_is_dropped(site: Hub) -> None:
    site.etag, site.cuts = None, [100_000]
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Range")[-1] is None


# Refusals.


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "set HF_TOKEN"),
        (403, "accept the licence"),
        (404, "no such file there"),
        (418, "check VITRAIL_HUB"),
        (429, "wait 7 s, or set HF_TOKEN"),
    ],
)
def test_refusals_say_what_to_do(site: Hub, status: int, remedy: str) -> None:
    site.statuses = [status]
    with pytest.raises(WeightsNotFound) as caught:
        fetch(ENTRY, endpoint=site.base)
    message = str(caught.value)
    assert f"{site.base}{FILE} answers {status}: " in message
    assert remedy in message
    assert str(cached_path(ENTRY)) in message
    assert "\n" not in message
    assert len(site.requests) == 1


def test_server_error_passes(site: Hub) -> None:
    site.statuses = [500, 503]
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY


def test_server_error_that_stays(site: Hub) -> None:
    site.statuses = [500] * 9
    with pytest.raises(WeightsNotFound, match="answers 500"):
        fetch(ENTRY, endpoint=site.base)
    assert len(site.requests) == 4


def test_body_beyond_the_limit_is_not_begun(site: Hub) -> None:
    site.headers = {"Content-Length": str(2**35 + 1)}
    with pytest.raises(UnsafeWeights, match="34,359,738,369"):
        fetch(ENTRY, endpoint=site.base)
    assert left() == set()


def test_body_of_unannounced_length_is_stopped_at_the_limit(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_BYTES", 1000)
    site.has_length = False
    with pytest.raises(UnsafeWeights, match="more than 1,000 bytes"):
        fetch(ENTRY, endpoint=site.base)
    assert "model.safetensors" not in left()


# Redirects.


def test_token_stays_with_the_hub(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    site.storage = f"http://localhost:{site.server_port}/storage"
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Authorization") == ["Bearer hf_secret", None]


def test_token_is_not_fetched_back_by_another_host(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    site.storage = f"http://localhost:{site.server_port}/bounce"
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Authorization") == ["Bearer hf_secret", None, None]


def test_token_follows_on_the_same_host(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    fetch(ENTRY, endpoint=site.base)
    assert site.header("Authorization") == ["Bearer hf_secret", "Bearer hf_secret"]


def test_token_is_not_shown(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sec\nret")
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        fetch(ENTRY, endpoint=site.base)
    assert "hf_sec" not in str(caught.value)


def test_endless_redirects(site: Hub) -> None:
    site.storage = FILE
    with pytest.raises(UnsafeWeights, match="more than 5 times"):
        fetch(ENTRY, endpoint=site.base)
    assert len(site.requests) == 6


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "http://a:b/", "http://u:p@h/"]
)
def test_redirect_out_of_http_is_refused(site: Hub, target: str) -> None:
    site.storage = target
    with pytest.raises(UnsafeWeights, match="is not an http"):
        fetch(ENTRY, endpoint=site.base)
    assert left() == set()


# Offline.


def test_offline_uses_the_cache(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(ENTRY, endpoint=site.base)
    site.requests.clear()
    for name in ("VITRAIL_OFFLINE", "HF_HUB_OFFLINE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert fetch(ENTRY, endpoint=site.base) == path
    assert fetch(ENTRY, endpoint=site.base, offline=True) == path
    assert not site.requests


@pytest.mark.parametrize("name", ["VITRAIL_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_without_a_cache_says_what_to_put_where(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(WeightsNotFound) as caught:
        fetch(ENTRY)
    message = str(caught.value)
    assert f"download https://huggingface.co{FILE}" in message
    assert str(cached_path(ENTRY)) in message
    assert not cached_path(ENTRY).parent.exists()


def test_argument_outranks_the_environment(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    assert fetch(ENTRY, endpoint=site.base, offline=False).read_bytes() == BODY


def test_failing_network_says_what_to_put_where() -> None:
    with Hub() as closed:
        base = closed.base
    with pytest.raises(WeightsNotFound, match=r"no answer from 127\.0\.0\.1.*put the file at") as caught:
        fetch(ENTRY, endpoint=base)
    assert base + FILE in str(caught.value)
    assert str(cached_path(ENTRY)) in str(caught.value)


def test_file_put_there_by_hand_is_used_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    path = place("model.safetensors", BODY)
    assert fetch(ENTRY, offline=True) == path
    said = capsys.readouterr().err
    assert "unverified" in said
    assert f"recorded its sha256 {SHA256}" in said
    record = json.loads(path.with_name("model.safetensors.json").read_text())
    assert (record["sha256"], record["size"], record["url"]) == (SHA256, len(BODY), None)
    assert fetch(ENTRY, offline=True) == path
    assert "unverified" in capsys.readouterr().err  # every time
    assert fetch(replace(ENTRY, sha256=SHA256), offline=True) == path
    assert capsys.readouterr().err == ""


def test_file_put_there_by_hand_must_meet_the_pin() -> None:
    place("model.safetensors", BODY)
    with pytest.raises(CorruptWeights, match=f"sha256 {SHA256}, not {OTHER}"):
        fetch(replace(ENTRY, sha256=OTHER), offline=True)


# A cache that went bad.


@pytest.mark.parametrize("bad", [BODY[:-1], BODY[:-3] + b"eNd", b""], ids=["cut", "flipped", "empty"])
def test_corrupt_cache_is_repaired(site: Hub, bad: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch(ENTRY, endpoint=site.base)
    path.write_bytes(bad)
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert "removed, downloading it again" in capsys.readouterr().err
    assert left() == KEPT


def test_corrupt_cache_offline_names_the_file(site: Hub) -> None:
    path = fetch(ENTRY, endpoint=site.base)
    path.write_bytes(BODY[:-1])
    with pytest.raises(CorruptWeights, match=r"offline; put .* in its place") as caught:
        fetch(ENTRY, endpoint=site.base, offline=True)
    assert str(path) in str(caught.value)
    assert site.base + FILE in str(caught.value)
    assert path.exists()
    path.write_bytes(BODY)
    assert fetch(ENTRY, endpoint=site.base, offline=True) == path


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"sha256": 1, "size": 2}', "null"])
def test_unreadable_record_is_written_anew(text: str) -> None:
    path = place("model.safetensors", BODY)
    record = place("model.safetensors.json", text.encode())
    assert fetch(ENTRY, offline=True) == path
    assert json.loads(record.read_text())["sha256"] == SHA256


def test_cache_that_cannot_be_written_says_so(site: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"cannot use .*file.*set VITRAIL_CACHE"):
        fetch(ENTRY, endpoint=site.base)


# Two at once.


def test_threads_share_one_download(site: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    site.stall = threading.Event()
    said: list[str] = []
    monkeypatch.setattr(hub, "write_line", said.append)
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(fetch, ENTRY, endpoint=site.base) for _ in range(4)]
        until(lambda: sum("waiting for another" in line for line in said) == 3)
        site.stall.set()
    assert {task.result().read_bytes() for task in tasks} == {BODY}
    assert site.paths() == [FILE, "/storage"]
    assert left() == KEPT


PROGRAM = f"""
import sys
from vitrail.checkpoint import download_weights as hub, known_weights as registry
path = hub.fetch(registry.find_public_weights({ENTRY.model!r}, {ENTRY.tag!r}), endpoint=sys.argv[1])
sys.stdout.write(hub.compute_sha256(path))
"""


def start(site: Hub) -> subprocess.Popen[str]:
    """A process of its own that fetches the file and prints its checksum."""
    command = [sys.executable, "-c", PROGRAM, site.base]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_share_one_download(site: Hub) -> None:
    site.stall = threading.Event()
    first = start(site)
    until(lambda: "/storage" in site.paths())
    second = start(site)
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    site.stall.set()
    assert [child.communicate(timeout=60)[0] for child in (first, second)] == [SHA256, SHA256]
    assert site.paths() == [FILE, "/storage"]
    assert left() == KEPT


def test_killed_process_leaves_a_part_and_no_lock(site: Hub) -> None:
    site.stall = threading.Event()
    child = start(site)
    part = cached_path(ENTRY).with_name("model.safetensors.part")
    until(lambda: part.exists() and part.stat().st_size > 0)
    child.kill()
    child.communicate(timeout=60)
    size = part.stat().st_size
    site.stall.set()
    assert fetch(ENTRY, endpoint=site.base).read_bytes() == BODY
    assert site.header("Range")[-1] == f"bytes={size}-"
    assert left() == KEPT


# Names.


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tail = Path("weights", "timm--vit_tiny_patch16_224.augreg_in21k", "model.safetensors")
    assert cached_path(ENTRY) == tmp_path / tail
    assert cached_path(ENTRY, tmp_path / "a") == tmp_path / "a" / tail
    monkeypatch.delenv("VITRAIL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    assert cached_path(ENTRY) == tmp_path / "home" / ".cache" / "vitrail" / tail
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cached_path(ENTRY) == tmp_path / "xdg" / "vitrail" / tail


def test_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_url(ENTRY) == f"https://huggingface.co{FILE}"
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror/")
    assert file_url(ENTRY) == f"https://mirror{FILE}"
    monkeypatch.setenv("VITRAIL_HUB", "http://127.0.0.1:9/hub")
    assert file_url(ENTRY) == f"http://127.0.0.1:9/hub{FILE}"
    assert file_url(ENTRY, "https://other") == f"https://other{FILE}"


@pytest.mark.parametrize("base", ["huggingface.co", "file:///weights", "https://", "https://u:p@hub", "https://hub/?a"])
def test_endpoint_must_be_a_web_address(base: str) -> None:
    with pytest.raises(ConfigError, match="must be an http"):
        file_url(ENTRY, base)
