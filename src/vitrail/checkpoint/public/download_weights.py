"""A public weight file, from the cache or from the hub; checked on the way in and again at every use.

    path = fetch(find("vit_b_16", "augreg_in21k"))

The path is <cache>/weights/<repository, "--" for "/">/<file>. Next to it are `<file>.json` (its checksum and where
it came from), `<file>.part` while a download is unfinished, and `<file>.lock`, which lets one process at a time write.
What the environment says:

VITRAIL_CACHE                        the cache; else $XDG_CACHE_HOME/vitrail, else ~/.cache/vitrail
VITRAIL_HUB, HF_ENDPOINT             the hub, or a mirror of it
VITRAIL_OFFLINE=1, HF_HUB_OFFLINE=1  use what is cached and ask nobody
HF_TOKEN                             sent to the hub, and to no host that it redirects to

The expected checksum is the one of the entry (the registry's, or a pin: pins.py), else the hub's word (`X-Linked-Etag`,
given before the redirect to storage). A server that gives neither is believed, and so is a file put there by hand, but
each use says that it is unverified; what is recorded then guards against later changes.

Checksums that somebody trusts: recorded once, at a download that is trusted, and demanded of the file ever after.

They lie in one JSON file, `CACHE/weights/checksums.json` or what VITRAIL_CHECKSUMS names, as {repository/file: sha256}.
A file of the cache that differs from its pin is not used, whatever the record next to it says.
"""

import hashlib
import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast
from urllib.parse import urlsplit

from vitrail.checkpoint.public.http import TransferFailed, ask, read_some, split_address
from vitrail.checkpoint.public.registry import PUBLIC, PublicWeights
from vitrail.core.atomic_files import cache_folder, write_file
from vitrail.core.console import make_console
from vitrail.core.errors import ConfigError, CorruptWeights, UnsafeWeights, WeightsError, WeightsNotFound
from vitrail.core.locks import try_lock, unlock

HUB = "https://huggingface.co"
MAX_BYTES = 16 * 2**30
RETRIES = 3
BACKOFF_S = 0.5
LOCK_POLL_S = 0.05
PIN = "`vitrail models --pin NAME:TAG` trusts it from now on"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """What `<file>.json` says of the file next to it; no address where the file was put there by hand."""

    sha256: str
    size: int
    url: str | None
    etag: str | None
    date: str


def fetch(
    entry: PublicWeights, *, endpoint: str | None = None, cache: Path | None = None, offline: bool | None = None
) -> Path:
    """The path of a sound copy of the file, downloaded if need be.

    A cached copy is used without asking the network. One that no longer has its recorded checksum is removed and
    downloaded again, or offline refused.
    """
    url = file_url(entry, endpoint)
    path = cached_path(entry, cache)
    if offline is None:
        offline = is_offline()
    missing = f"{path} is not in the cache and vitrail is offline; download {url} and put it there"
    try:
        # Neither of these writes, so that a read-only cache serves.
        record = _read_record(path)
        if record is not None and path.is_file() and _is_sound(path, entry.sha256 or record.sha256, record.size):
            if entry.sha256 is None and record.etag is None:
                _say(f"{path} is unverified: nobody but the file itself says what it is; {PIN}")
            return path
        if offline and not path.is_file():
            raise WeightsNotFound(missing)
        with _locked(path):
            if path.is_file() and _keep(path, entry, url, offline):
                return path
            if offline:
                raise WeightsNotFound(missing)
            _download(path, entry, url)
            return path
    except OSError as error:
        fault = f"cannot use {error.filename or path} ({error.strerror or error})"
        raise WeightsError(f"{fault}; put that right, or set VITRAIL_CACHE to another folder") from error


def cached_path(entry: PublicWeights, cache: Path | None = None) -> Path:
    """Where the file is kept, whether it is there or not."""
    folder = cache_folder("weights") if cache is None else cache.expanduser().absolute() / "weights"
    return folder / entry.repo.replace("/", "--") / entry.file


def is_offline() -> bool:
    """Whether the environment says that nobody is to be asked."""
    return _flag("VITRAIL_OFFLINE") or _flag("HF_HUB_OFFLINE")


def file_url(entry: PublicWeights, endpoint: str | None = None) -> str:
    """The file's address on the hub."""
    base = endpoint or os.environ.get("VITRAIL_HUB") or os.environ.get("HF_ENDPOINT") or HUB
    parts = split_address(base)
    if parts is None or parts.query or parts.fragment:
        raise ConfigError(f"hub {base!r} must be an http(s) address of a host, such as {HUB}")
    return f"{base.rstrip('/')}/{entry.repo}/resolve/main/{entry.file}"


# The cache.


def _keep(path: Path, entry: PublicWeights, url: str, offline: bool) -> bool:
    """Whether the file in the cache may stay; one put there by hand is given its record."""
    record = _read_record(path)
    size, sha256 = path.stat().st_size, digest(path)
    expected = entry.sha256 or (record.sha256 if record else sha256)
    if sha256 == expected:
        if record is None or (record.sha256, record.size) != (sha256, size):
            _write_record(path, _Record(sha256=sha256, size=size, url=None, etag=None, date=_now()))
            known = "as pinned" if entry.sha256 else f"unverified; {PIN}"
            _say(f"using {path}, put there by hand, {known}; recorded its sha256 {sha256}")
        return True
    fault = f"{path} has sha256 {sha256}, not {expected}"
    if offline:
        record_name = _beside(path, "json").name
        raise CorruptWeights(f"{fault}, and vitrail is offline; put {url} in its place and delete {record_name}")
    _say(f"{fault}; removed, downloading it again")
    path.unlink()
    _beside(path, "json").unlink(missing_ok=True)
    return False


def _is_sound(path: Path, sha256: str, size: int) -> bool:
    return path.stat().st_size == size and digest(path) == sha256


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def _read_record(path: Path) -> _Record | None:
    """The record next to a file; one that cannot be read counts as none."""
    try:
        data: Any = json.loads(_beside(path, "json").read_text(encoding="utf-8"))
        return _Record(**data) if (type(data["sha256"]), type(data["size"])) == (str, int) else None
    except (FileNotFoundError, ValueError, TypeError, LookupError, RecursionError):
        return None


def recorded(path: Path) -> tuple[str, bool] | None:
    """The checksum recorded next to a cached file, and whether the hub had named it; none where there is no record."""
    record = _read_record(path)
    return None if record is None else (record.sha256, record.etag is not None)


def _write_record(path: Path, record: _Record) -> None:
    unfinished = _beside(path, "json.part")
    unfinished.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(_beside(path, "json"))


@contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    """Hold the file's lock, which the system lets go of should the process die."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path, "lock").open("ab") as file:
        waiting = False
        while not try_lock(file.fileno()):
            if not waiting:
                _say(f"waiting for another process that is fetching {path}")
                waiting = True
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            unlock(file.fileno())


# The download.


def _download(path: Path, entry: PublicWeights, url: str) -> None:
    """Bring the file to its place whole, or not at all."""
    part = _beside(path, "part")
    record = _persist(part, path, entry, url)
    # The record goes first: a crash in between leaves a checksum without a file, never a file without its checksum.
    _write_record(path, record)
    part.replace(path)
    _say(f"kept {path}")


def _persist(part: Path, path: Path, entry: PublicWeights, url: str) -> _Record:
    """Try, and try again where a failure may pass."""
    attempt = 0
    while True:
        try:
            return _transfer(part, path, entry, url)
        except TransferFailed as error:
            if attempt == RETRIES:
                fault = f"cannot download {url} ({error})"
                raise WeightsNotFound(f"{fault}; run it again to go on, or put the file at {path}") from None
            _say(f"{error}; trying again")
        time.sleep(BACKOFF_S * 2**attempt)
        attempt += 1


def _transfer(part: Path, path: Path, entry: PublicWeights, url: str) -> _Record:
    """One try at the whole file, from where the last one stopped."""
    start = part.stat().st_size if part.exists() else 0
    answer, etag = ask(url, start, path)
    with answer:
        expected = entry.sha256 or etag
        if etag is not None and expected != etag:
            fault = f"{url} now has sha256 {etag}, not the pinned {expected}"
            raise CorruptWeights(f"{fault}; look for the earlier file and put it at {path}")
        if answer.status == 200:
            start = 0
        if start and (expected is None or not _continues(answer, start)):
            part.unlink()
            raise TransferFailed(f"the unfinished {part.name} cannot be resumed")
        if answer.status != 416:  # 416: there is nothing behind `start`, the last try had it all
            total = _total(answer, start)
            if expected is None:
                _refuse_unverifiable(answer, total, url)
            _say(f"downloading {entry.repo} ({_size(total)}, {entry.licence}) from {urlsplit(url).hostname}")
            _receive(answer, part, start, total)
    sha256 = digest(part)
    if expected is None:
        _say(f"warning: no checksum to be had for {url}, it is unverified; recorded what came, sha256 {sha256}")
    elif sha256 != expected:
        part.unlink()
        fault = f"{url} came with sha256 {sha256}, not {expected}"
        if start:
            raise TransferFailed(f"{fault}, so the unfinished {part.name} was no part of it")
        raise CorruptWeights(
            f"{fault}; nothing was kept: try again, and if it recurs distrust the connection or mirror"
        )
    return _Record(sha256=sha256, size=part.stat().st_size, url=url, etag=etag, date=_now())


def _continues(answer: http.client.HTTPResponse, start: int) -> bool:
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return answer.status == 416 or (match is not None and int(match[1]) == start)


def _total(answer: http.client.HTTPResponse, start: int) -> int | None:
    """Bytes of the whole file as the server announces them."""
    length = answer.headers.get("Content-Length", "")
    total = start + int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
    if total is not None and total > MAX_BYTES:
        raise UnsafeWeights(f"a body of {_size(total)} was announced; no public weights are above {_size(MAX_BYTES)}")
    return total


def _refuse_unverifiable(answer: http.client.HTTPResponse, total: int | None, url: str) -> None:
    """Without a checksum, a length must at least tell a whole file from a cut one, and a log-in page from weights."""
    is_text = answer.headers.get("Content-Type", "").lower().startswith("text/")
    if total is None or is_text or "Content-Encoding" in answer.headers:
        raise CorruptWeights(f"{url} has no checksum and is not a plain file of known length; check the hub's address")


def _receive(answer: http.client.HTTPResponse, part: Path, start: int, total: int | None) -> None:
    received, most = start, MAX_BYTES if total is None else total
    with part.open("ab" if start else "wb") as file, _progress(start, total) as advance:
        while chunk := read_some(answer):
            received += len(chunk)
            if received > most:
                raise UnsafeWeights(f"a body of more than {most} bytes came; the rest was refused")
            file.write(chunk)
            advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if total is not None and received < total:
        raise TransferFailed(f"the connection broke after {received} of {total} bytes")


# What the user sees.


@contextmanager
def _progress(start: int, total: int | None) -> Generator[Callable[[int], None], None, None]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress

    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=make_console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=total, completed=start)
        yield lambda count: bar.advance(task, count)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _size(count: int | None) -> str:
    return "size unknown" if count is None else f"{count / 1e6:,.1f} MB"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


FILE: Final = "checksums.json"
State: TypeAlias = Literal["pinned", "as the hub said", "unverified", "changed"]


@dataclass(frozen=True, slots=True)
class Verified:
    """A cached file and what is known of it."""

    entry: PublicWeights
    path: Path
    sha256: str
    state: State


def pins_file(cache: Path | None = None) -> Path:
    named = os.environ.get("VITRAIL_CHECKSUMS")
    if named:
        return Path(named)
    return (cache_folder("weights") if cache is None else cache.expanduser().absolute() / "weights") / FILE


def read_pins(cache: Path | None = None) -> dict[str, str]:
    """{repository/file: sha256}; a file of pins that cannot be read is refused, not passed over."""
    path = pins_file(cache)
    if not path.exists() and not os.environ.get("VITRAIL_CHECKSUMS"):
        return {}
    try:
        held: Any = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError):
        held = None
    values = list(cast("dict[str, Any]", held).values()) if isinstance(held, dict) else [None]
    sound = all(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) for value in values)
    if not sound:
        raise WeightsError(f"{path} is not a list of checksums; restore it, or remove it and pin again")
    return cast("dict[str, str]", held)


def pinned(entry: PublicWeights, cache: Path | None = None) -> PublicWeights:
    """The entry with the checksum that is demanded of it: the registry's, else a pin, else none."""
    found = None if entry.sha256 else read_pins(cache).get(key_of(entry))
    return entry if found is None else replace(entry, sha256=found)


def key_of(entry: PublicWeights) -> str:
    return f"{entry.repo}/{entry.file}"


def pin(entry: PublicWeights, cache: Path | None = None) -> str:
    """Records the checksum of a file, downloaded if need be; from now on nothing else passes for it. The checksum."""
    entry = pinned(entry, cache)
    sha256 = digest(fetch(entry, cache=cache))
    if entry.sha256 is None:
        held = {**read_pins(cache), key_of(entry): sha256}
        write_file(pins_file(cache), json.dumps(held, indent=2, sort_keys=True).encode() + b"\n")
    return sha256


def verify(cache: Path | None = None) -> list[Verified]:
    """Every public weight file that is in the cache, read whole and held against what is known of it."""
    found: list[Verified] = []
    for entry in dict.fromkeys(PUBLIC):
        path = cached_path(entry, cache)
        if path.is_file():
            expected, sha256 = pinned(entry, cache).sha256, digest(path)
            record = recorded(path)
            state: State = "pinned"
            if sha256 != (expected or (record[0] if record else sha256)):
                state = "changed"
            elif expected is None:
                state = "as the hub said" if record is not None and record[1] else "unverified"
            found.append(Verified(entry, path, sha256, state))
    return found
