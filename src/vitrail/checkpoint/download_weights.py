"""Fetches public weight files from the cache or the hub, and verifies them when they are downloaded and at every use.

    path = fetch(find("vit_b_16", "augreg_in21k"))

The path is <cache>/weights/<repository, "--" for "/">/<file>. Next to it are `<file>.json` (its checksum and where it
came from), `<file>.part` while a download is unfinished, and `<file>.lock`, which lets one process at a time write.
Environment variables:

VITRAIL_CACHE                        the cache; else $XDG_CACHE_HOME/vitrail, else ~/.cache/vitrail
VITRAIL_HUB, HF_ENDPOINT             the hub, or a mirror of it
VITRAIL_OFFLINE=1, HF_HUB_OFFLINE=1  use cached files only, send no requests
HF_TOKEN                             sent to the hub, and to no host that it redirects to
VITRAIL_CHECKSUMS                    the file of pins; else <cache>/weights/checksums.json

The expected checksum is the registry's, else a pin, else the one that the hub names before it redirects to its storage.
If the server names none, the file is trusted, as is a file put in the cache by hand, but each use warns that it is
unverified; the recorded checksum then guards against later changes.

A pin is a checksum recorded at a download that the user trusts. Pins are stored as {repository/file: sha256}. A cached
file that differs from its pin is not used, even if it matches its own record.
"""

import json
import os
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

from vitrail.checkpoint.known_weights import PUBLIC, PublicWeights
from vitrail.core import http
from vitrail.core.atomic_files import cache_folder, write_file
from vitrail.core.console import make_console
from vitrail.core.errors import ConfigError, CorruptWeights, UnsafeWeights, WeightsError, WeightsNotFound
from vitrail.core.locks import try_lock, unlock

HUB: Final = "https://huggingface.co"
MAX_BYTES: Final = 32 * 2**30  # DINOv3-7B has 25 GiB
LOCK_POLL_S: Final = 0.05
RECORD: Final = ("sha256", "size", "url", "etag", "date")  # what is recorded about a cached file
PIN_HINT: Final = "`vitrail models --pin NAME:TAG` trusts it from now on"

VerifiedState: TypeAlias = Literal["pinned", "as the hub said", "unverified", "changed"]


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """A cached file, its checksum, and how that checksum is known."""

    entry: PublicWeights
    path: Path
    sha256: str
    state: VerifiedState


def fetch(
    entry: PublicWeights, *, endpoint: str | None = None, cache: Path | None = None, offline: bool | None = None
) -> Path:
    """The path of a verified copy of the file, downloaded if necessary.

    A cached copy is used without a request. If it no longer matches its recorded checksum, it is removed and downloaded
    again, or refused when offline.
    """
    url = file_url(entry, endpoint)
    path = cached_path(entry, cache)
    if offline is None:
        offline = is_offline()
    missing = f"{path} is not in the cache and vitrail is offline; download {url} and put it there"
    try:
        # Neither of these writes, so a read-only cache suffices.
        record = _read_record(path)
        same_size = record and path.is_file() and path.stat().st_size == record["size"]
        if record and same_size and compute_sha256(path) == (entry.sha256 or record["sha256"]):
            if entry.sha256 is None and record["etag"] is None:
                write_line(f"{path} is unverified: no hub and no pin names its checksum; {PIN_HINT}")
            return path
        if offline and not path.is_file():
            raise WeightsNotFound(missing)
        with _hold_lock(path):
            if not (path.is_file() and _keep(path, entry, url, offline)):
                if offline:
                    raise WeightsNotFound(missing)
                _download(path, entry, url)
        return path
    except OSError as error:
        fault = f"cannot use {error.filename or path} ({error.strerror or error})"
        raise WeightsError(f"{fault}; fix that, or set VITRAIL_CACHE to another folder") from error


def cached_path(entry: PublicWeights, cache: Path | None = None) -> Path:
    """The file's place in the cache, whether it is there or not."""
    return _weights_folder(cache) / entry.repo.replace("/", "--") / entry.file


def is_offline() -> bool:
    """Whether the environment forbids requests to the hub."""
    return http.is_offline("HF_HUB_OFFLINE")


def file_url(entry: PublicWeights, endpoint: str | None = None) -> str:
    """The file's address on the hub."""
    base = endpoint or os.environ.get("VITRAIL_HUB") or os.environ.get("HF_ENDPOINT") or HUB
    parts = http.split_address(base)
    if parts is None or parts.query or parts.fragment:
        raise ConfigError(f"hub {base!r} must be an http(s) address of a host, such as {HUB}")
    return f"{base.rstrip('/')}/{entry.repo}/resolve/main/{entry.file}"


# The cache.


def _weights_folder(cache: Path | None) -> Path:
    return cache_folder("weights") if cache is None else cache.expanduser().absolute() / "weights"


def _keep(path: Path, entry: PublicWeights, url: str, offline: bool) -> bool:
    """Whether the cached file may be kept. A file that was put there by hand gets its record."""
    record = _read_record(path)
    size, sha256 = path.stat().st_size, compute_sha256(path)
    expected = entry.sha256 or (record["sha256"] if record else sha256)
    if sha256 == expected:
        if record is None or (record["sha256"], record["size"]) != (sha256, size):
            _write_record(path, sha256, size)
            known = "as pinned" if entry.sha256 else f"unverified; {PIN_HINT}"
            write_line(f"using {path}, put there by hand, {known}; recorded its sha256 {sha256}")
        return True
    fault = f"{path} has sha256 {sha256}, not {expected}"
    if offline:
        raise CorruptWeights(f"{fault}, and vitrail is offline; put {url} in its place and delete {path.name}.json")
    write_line(f"{fault}; removed, downloading it again")
    path.unlink()
    _next_to(path, "json").unlink(missing_ok=True)
    return False


def compute_sha256(path: Path) -> str:
    return http.compute_checksum(path).partition(":")[2]


def _next_to(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _read_record(path: Path) -> dict[str, Any] | None:
    """The record next to a file: sha256, size, url and etag, both None for a file that was put there by hand, and the
    date. An unreadable one counts as none."""
    try:
        data: Any = json.loads(_next_to(path, "json").read_text(encoding="utf-8"))
        valid = (type(data["sha256"]), type(data["size"])) == (str, int) and set(data) == set(RECORD)
        return data if valid else None
    except (FileNotFoundError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _write_record(path: Path, sha256: str, size: int, url: str | None = None, etag: str | None = None) -> None:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = dict(zip(RECORD, (sha256, size, url, etag, date), strict=True))
    unfinished = _next_to(path, "json.part")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(_next_to(path, "json"))


@contextmanager
def _hold_lock(path: Path) -> Generator[None, None, None]:
    """Holds the file's lock, which the system releases if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _next_to(path, "lock").open("ab") as file:
        if not try_lock(file.fileno()):
            write_line(f"waiting for another process that is fetching {path}")
            while not try_lock(file.fileno()):
                time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            unlock(file.fileno())


# The download.


def _download(path: Path, entry: PublicWeights, url: str) -> None:
    """Downloads the complete file into its place, or leaves nothing there."""
    part, etag = _next_to(path, "part"), None
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise ConfigError("HF_TOKEN is malformed; set it again")

    def expect(reply: http.Reply) -> str | None:
        """The checksum that the body must have; without one, a plain file of known length, so that a truncated
        file or a log-in page is not taken for weights."""
        nonlocal etag
        etag, headers = reply.linked_sha256, reply.response.headers
        expected = entry.sha256 or etag
        if etag not in (None, expected):
            fault = f"{url} now has sha256 {etag}, not the pinned {expected}"
            raise CorruptWeights(f"{fault}; look for the earlier file and put it at {path}")
        odd = headers.get("Content-Type", "").lower().startswith("text/") or "Content-Encoding" in headers
        if not (expected or reply.start) and (reply.total is None or odd):
            raise CorruptWeights(f"{url} has no checksum and is not a plain file of known length; check VITRAIL_HUB")
        if not reply.is_at_end:
            size = "size unknown" if reply.total is None else f"{reply.total / 1e6:,.1f} MB"
            write_line(f"downloading {entry.repo} ({size}, {entry.licence}) from {urlsplit(url).hostname}")
        return expected and f"sha256:{expected}"

    def retry(reason: object) -> None:
        write_line(f"{reason}; trying again")

    limits: Any = {"max_bytes": MAX_BYTES, "token": token or None}
    try:
        with _show_progress() as progress:
            checksum = http.download(url, part, expect=expect, progress=progress, on_retry=retry, **limits)
    except http.HttpError as error:
        raise _weights_error(error, entry, url, path) from None
    sha256 = compute_sha256(part)
    if checksum is None:
        write_line(f"warning: {url} has no known checksum, so it is unverified; recorded its sha256 {sha256}")
    # The record goes first: a crash in between leaves a checksum without a file, never a file without its checksum.
    _write_record(path, sha256, part.stat().st_size, url, etag)
    part.replace(path)
    write_line(f"saved {path}")


def _weights_error(error: http.HttpError, entry: PublicWeights, url: str, path: Path) -> WeightsError:
    """The same failure as an error about weights, with its remedy."""
    if isinstance(error, http.UnsafeRequest):
        return UnsafeWeights(str(error))
    if isinstance(error, http.ChecksumError):
        return CorruptWeights(str(error))
    if isinstance(error, http.TransferFailed):
        return WeightsNotFound(f"cannot download {url} ({error}); run it again to resume, or put the file at {path}")
    if not isinstance(error, http.StatusError):
        return WeightsNotFound(str(error))
    wait = "a while" if error.retry_after is None else f"{error.retry_after} s"
    remedies = {
        401: "set HF_TOKEN to a token that may read it, or unset one that has expired",
        403: "set HF_TOKEN to a token that may read it, and accept the licence on its page",
        404: "no such file there; check VITRAIL_HUB and HF_ENDPOINT",
        429: f"too many requests; wait {wait}, or set HF_TOKEN",
    }
    if entry.access == "gated":
        remedies |= dict.fromkeys((401, 403), explain_gate(entry.repo))
    remedy = remedies.get(error.status, "not an answer of a hub; check VITRAIL_HUB and HF_ENDPOINT")
    return WeightsNotFound(f"{error}: {remedy}; or put the file at {path}")


def explain_gate(repo: str) -> str:
    """What to do about gated weights, which require accepting their terms."""
    first = f"these weights are gated: log in to {HUB}/{repo} and accept the terms there"
    return f"{first}; once access is granted, set HF_TOKEN to a token of that account ({HUB}/settings/tokens)"


@contextmanager
def _show_progress() -> Generator[http.Progress | None, None, None]:
    """Shows a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress

    columns = progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()
    console, left = make_console(stderr=True), progress.TimeRemainingColumn()
    with progress.Progress(*columns, left, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")


# Pins.


def pins_file(cache: Path | None = None) -> Path:
    configured = os.environ.get("VITRAIL_CHECKSUMS")
    return Path(configured) if configured else _weights_folder(cache) / "checksums.json"


def read_pins(cache: Path | None = None) -> dict[str, str]:
    """{repository/file: sha256}; an unreadable file of pins raises WeightsError."""
    path = pins_file(cache)
    try:
        pins: dict[str, str] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if all(re.fullmatch("[0-9a-f]{64}", value) for value in pins.values()):
            return pins
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise WeightsError(f"{path} is not a list of checksums; restore it, or remove it and pin again")


def apply_pin(entry: PublicWeights, cache: Path | None = None) -> PublicWeights:
    """The entry with the checksum that its file must have: the registry's, else a pin, else none."""
    return entry if entry.sha256 else replace(entry, sha256=read_pins(cache).get(pin_key(entry)))


def pin_key(entry: PublicWeights) -> str:
    return f"{entry.repo}/{entry.file}"


def pin(entry: PublicWeights, cache: Path | None = None) -> str:
    """Records and returns the checksum of a file, downloaded if necessary. From then on, no other file is accepted."""
    entry = apply_pin(entry, cache)
    sha256 = compute_sha256(fetch(entry, cache=cache))
    if entry.sha256 is None:
        pins = {**read_pins(cache), pin_key(entry): sha256}
        write_file(pins_file(cache), json.dumps(pins, indent=2, sort_keys=True).encode() + b"\n")
    return sha256


def verify(cache: Path | None = None) -> list[VerifiedFile]:
    """Reads every cached public weight file and compares it with its pin or its record."""
    verified: list[VerifiedFile] = []
    for entry in dict.fromkeys(PUBLIC):
        path = cached_path(entry, cache)
        if path.is_file():
            expected, sha256, record = apply_pin(entry, cache).sha256, compute_sha256(path), _read_record(path)
            state: VerifiedState = "as the hub said" if record and record["etag"] is not None else "unverified"
            if sha256 != (expected or (record["sha256"] if record else sha256)):
                state = "changed"
            elif expected is not None:
                state = "pinned"
            verified.append(VerifiedFile(entry, path, sha256, state))
    return verified
