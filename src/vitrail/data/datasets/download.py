"""Fetching the files of a set: over HTTP, from where an earlier try stopped, checked, and in place whole or not at all.

A file that is on its way lies next to its place as `<file>.part`. VITRAIL_OFFLINE=1 asks nobody.
"""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final
from urllib.parse import urlsplit

from vitrail.core.atomic_files import sync_folder
from vitrail.core.errors import DataError, SourceNotFound, reason_of
from vitrail.data.datasets.download_list import File

Progress = Callable[[str, int, int | None], None]  # the file's name, bytes done, bytes in all

CHUNK: Final = 1 << 18
TIMEOUT_S: Final = 30.0
TRIES: Final = 4


class Broken(Exception):
    """A connection that may hold the next time."""


def offline() -> bool:
    return os.environ.get("VITRAIL_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


def fetch(file: File, root: Path, progress: Progress | None = None) -> Path:
    """The file in its place. One that is there already is not asked for again."""
    path = root / file.path
    if path.exists():
        return path
    if file.url is None:
        raise SourceNotFound(f"{path} cannot be fetched: {file.note or 'it has no address that a program may use'}")
    if offline():
        raise SourceNotFound(f"{path} is not there and vitrail is offline (VITRAIL_OFFLINE); put {file.url} there")
    if urlsplit(file.url).scheme not in ("http", "https"):
        raise DataError(f"{file.url} is not a http(s) address")
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        receive(file, part, progress)
        check(file, part)
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{part} cannot be written ({error.strerror or error}); give another folder") from None
    return path


def receive(file: File, part: Path, progress: Progress | None) -> None:
    """Try, and try again where a failure may pass; what has come stays."""
    for attempt in range(TRIES):
        try:
            return transfer(file, part, progress)
        except Broken as error:
            if attempt == TRIES - 1:
                raise SourceNotFound(
                    f"cannot download {file.url} ({reason_of(error)}); run it again to go on, or put the file at "
                    f"{part.with_suffix('')}"
                ) from None
    return None


def transfer(file: File, part: Path, progress: Progress | None) -> None:
    start = part.stat().st_size if part.exists() else 0
    if file.size is not None and start == file.size:
        return
    with contextlib.closing(ask(str(file.url), start, part)) as answer:
        if start and answer.status != 206:  # the server begins again, or has nothing behind `start`
            start = 0
        length = answer.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else None
        if file.size is not None and total is not None and total != file.size:
            raise DataError(f"{file.url} has {total:,} bytes, not {file.size:,}: another file, or a page about it")
        done = start
        with part.open("ab" if start else "wb") as out:
            while True:
                try:
                    chunk = answer.read1(CHUNK)
                except (OSError, http.client.HTTPException) as error:
                    raise Broken(f"the connection broke after {done:,} bytes: {error}") from None
                if not chunk:
                    break
                out.write(chunk)
                done += len(chunk)
                if file.size is not None and done > file.size:
                    raise DataError(f"{file.url} sends more than {file.size:,} bytes; the rest was refused")
                if progress:
                    progress(part.with_suffix("").name, done, total)
            out.flush()
            os.fsync(out.fileno())
    if total is not None and done < total:
        raise Broken(f"the connection broke after {done:,} of {total:,} bytes")


class NeverDownhill(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP alone, and from https to https only."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (scheme == "http" and urlsplit(req.full_url).scheme == "https"):
            raise DataError(f"{req.full_url} redirects to {newurl[:200]}; refused")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def ask(url: str, start: int, part: Path) -> http.client.HTTPResponse:
    headers = {"User-Agent": "vitrail", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        opener = urllib.request.build_opener(NeverDownhill)
        return opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:
            part.unlink()
            raise Broken("the unfinished file is longer than the whole") from None
        if error.code >= 500 or error.code in (408, 429):
            raise Broken(f"{urlsplit(url).netloc} answers {error.code}") from None
        raise SourceNotFound(
            f"{url} answers {error.code}; look for the file elsewhere and put it at {part.with_suffix('')}"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise Broken(f"no answer from {urlsplit(url).netloc}: {getattr(error, 'reason', error)}") from None


def check(file: File, part: Path) -> None:
    """By the strongest checksum that is known."""
    kind, expected = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
    if expected is None:
        return
    with part.open("rb") as opened:
        found = hashlib.file_digest(opened, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    if found != expected:
        part.unlink()
        raise DataError(f"{file.url} came with {kind} {found}, not {expected}; nothing was kept, try again")
