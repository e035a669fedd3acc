"""The HTTP client, for weights, data sets and images by URL.

    read_url(url, max_bytes=2**26)             the body, in memory
    download(url, part, expect=..., ...)       a large file: resumed, retried and verified

Redirects stay within http and https and never go from https down to http. A token is sent only to the host of the
original request. No body grows beyond the caller's limit.

HttpError
├── TransferFailed   no answer, a server error or a broken connection: may be temporary; `download` retries
├── StatusError      the server refuses; carries the status
├── UnsafeRequest    a redirect that is not followed, or a body beyond the limit
└── ChecksumError    the whole file was received, and it is not the expected one
"""

import hashlib
import http.client
import os
import re
import ssl
import string
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast
from urllib.parse import SplitResult, quote, urldefrag, urljoin, urlsplit

from vitrail.core.errors import VitrailError

MAX_REDIRECTS: Final = 5
TIMEOUT_S: Final = 30.0
TRIES: Final = 4
BACKOFF_S: Final = 0.5
CHUNK: Final = 2**18

Progress = Callable[[int, int | None], None]  # bytes so far, bytes in total if known
Expect = Callable[["Reply"], str | None]


class HttpError(VitrailError):
    """A request that does not yield the file."""


class TransferFailed(HttpError):
    """A failure that may be temporary: worth another try."""


class StatusError(HttpError):
    """An answer that is neither the file nor a redirect; `retry_after` is in seconds."""

    def __init__(self, url: str, status: int, retry_after: int | None) -> None:
        super().__init__(f"{url.partition('?')[0]} answers {status}")
        self.status, self.retry_after = status, retry_after


class UnsafeRequest(HttpError):
    """A redirect that is not followed, or a body beyond the limit."""


class ChecksumError(HttpError):
    """A file that was received whole but is not the expected one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose body has not been read yet. `start` is the offset of the body's first byte in the file;
    `linked_sha256` is the checksum that a hub names (`X-Linked-Etag`) when it redirects to its storage."""

    response: http.client.HTTPResponse
    start: int
    linked_sha256: str | None

    @property
    def is_at_end(self) -> bool:
        """Whether the server has nothing after `start`."""
        return self.response.status == 416

    @property
    def total(self) -> int | None:
        """Bytes of the whole file, if the server announces them."""
        headers = self.response.headers
        end = headers.get("Content-Range", "").removeprefix("bytes */")
        text = end if self.is_at_end else headers["Content-Length"]
        known = re.fullmatch(r"\d{1,18}", text or "")
        return int(known[0]) + (0 if self.is_at_end else self.start) if known else None


def is_offline(*variables: str) -> bool:
    """Whether VITRAIL_OFFLINE, or one of `variables`, forbids all requests."""
    names = ("VITRAIL_OFFLINE", *variables)
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def split_address(url: str) -> SplitResult | None:
    """The parts of an http(s) address without a user name in it; None for anything else."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname and parts.username is None else None


def open_url(url: str, *, start: int = 0, token: str | None = None, accept: str | None = None) -> Reply:
    """Follows redirects to the answer that carries the body, from byte `start` on if the server supports that."""
    headers = {"User-Agent": "vitrail", "Accept-Encoding": "identity"}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    headers |= {"Accept": accept} if accept else {}
    here, sha256 = url, None
    for _ in range(MAX_REDIRECTS + 1):
        response = _send(here, headers | ({"Authorization": f"Bearer {token}"} if token else {}))
        # Files outside of LFS have a git hash there instead, which is shorter.
        etag = re.fullmatch(r'(?:W/)?"?([0-9a-fA-F]{64})"?', response.headers.get("X-Linked-Etag", "").strip())
        sha256 = sha256 or (etag[1].lower() if etag else None)
        if response.status == 200 or (start and response.status in (206, 416)):
            return Reply(response, 0 if response.status == 200 else start, sha256)
        response.close()
        if response.status >= 500 or response.status == 408:
            raise TransferFailed(f"{urlsplit(here).netloc} answers {response.status}")
        if response.status not in (301, 302, 303, 307, 308):
            after = re.fullmatch("[0-9]{1,6}", response.headers.get("Retry-After", ""))
            raise StatusError(here, response.status, int(after[0]) if after else None)
        here = resolve_redirect(here, response.headers.get("Location", ""))
        if _origin(here) != _origin(url):
            token = None  # for good: another host does not get it by redirecting back
    raise UnsafeRequest(f"{url} redirects more than {MAX_REDIRECTS} times; check the address")


def resolve_redirect(here: str, location: str) -> str:
    """The address that a redirect leads to, if it may lead there."""
    there = urldefrag(urljoin(here, quote(location, safe=string.punctuation, encoding="latin-1"))).url
    parts = split_address(there)
    if not location or parts is None:
        raise UnsafeRequest(f"{here} redirects to {location[:200]!r}, which is not an http(s) address")
    if urlsplit(here).scheme == "https" and parts.scheme != "https":
        raise UnsafeRequest(f"{here} redirects from https down to {parts.scheme}://{parts.netloc}; refused")
    return there


def read_url(url: str, *, max_bytes: int, timeout_s: float = TIMEOUT_S, accept: str | None = None) -> bytes:
    """The whole body of an address, in memory."""
    if split_address(url) is None:
        raise UnsafeRequest(f"{url[:200]!r} is not an http(s) address")
    deadline, content = time.monotonic() + timeout_s, bytearray()
    reply = open_url(url, accept=accept)
    with reply.response:
        for chunk in _read_body(reply, url, max_bytes):
            content += chunk
            if time.monotonic() > deadline:
                raise TransferFailed(f"{url} was not complete after {timeout_s:.0f} s")
    return bytes(content)


def download(
    url: str,
    part: Path,
    *,
    expect: Expect,
    max_bytes: int,
    token: str | None = None,
    progress: Progress | None = None,
    on_retry: Callable[[str], None] | None = None,
    resume_unverified: bool = False,
) -> str | None:
    """Downloads a file into `part`, verifies it, and returns its checksum.

    A `part` left by an earlier call is resumed; without a checksum only if `resume_unverified`. `expect` sees the
    headers before the body is read: it may refuse by raising, and returns the checksum ("sha256:..." or "md5:...") that
    the file must have, if one is known.
    """
    for attempt in range(TRIES - 1):
        try:
            return _try_download(url, part, expect, max_bytes, token, progress, resume_unverified)
        except TransferFailed as error:
            if on_retry:
                on_retry(str(error))
            time.sleep(BACKOFF_S * 2**attempt)
    return _try_download(url, part, expect, max_bytes, token, progress, resume_unverified)


def _try_download(
    url: str, part: Path, expect: Expect, max_bytes: int, token: str | None, progress: Progress | None, unverified: bool
) -> str | None:
    """Tries once to download the file, from where the last try stopped."""
    reply = open_url(url, start=part.stat().st_size if part.exists() else 0, token=token)
    with reply.response:
        expected = expect(reply)
        # The body must start where the unfinished file ends.
        follows = reply.response.headers.get("Content-Range", "").startswith(f"bytes {reply.start}-")
        if reply.start and not ((reply.is_at_end or follows) and (expected or unverified)):
            part.unlink()
            raise TransferFailed(f"the unfinished {part.name} cannot be resumed")
        if not reply.is_at_end:
            _receive(reply, part, url, max_bytes, progress)
        elif expected is None and reply.total != reply.start:
            part.unlink()
            raise TransferFailed(f"the unfinished {part.name} is longer than the file")
    if expected is None:
        return None
    found = compute_checksum(part, expected.partition(":")[0])
    if found != expected:
        part.unlink()
        fault = f"{url} came with {found.replace(':', ' ')}, not {expected.partition(':')[2]}"
        if reply.start:
            raise TransferFailed(f"{fault}; the unfinished {part.name} was not a part of it")
        raise ChecksumError(f"{fault}; nothing was kept. Try again; if it recurs, distrust the connection or mirror")
    return expected


def _receive(reply: Reply, part: Path, url: str, max_bytes: int, progress: Progress | None) -> None:
    total = reply.total
    if total is not None and total > max_bytes:
        raise UnsafeRequest(f"{url} announces {total:,} bytes; at most {max_bytes:,} are downloaded")
    with part.open("ab" if reply.start else "wb") as file:
        for chunk in _read_body(reply, url, max_bytes if total is None else total):
            file.write(chunk)
            if progress:
                progress(file.tell(), total)
        file.flush()
        os.fsync(file.fileno())


def _read_body(reply: Reply, url: str, limit: int) -> Iterator[bytes]:
    """Yields the body in chunks. UnsafeRequest if it exceeds the limit, TransferFailed if it ends early."""
    received, total = reply.start, reply.total
    try:
        while chunk := reply.response.read1(CHUNK):  # whatever has arrived, so that a broken connection loses nothing
            received += len(chunk)
            if received > limit:
                raise UnsafeRequest(f"{url} has more than {limit:,} bytes; the rest was refused")
            yield chunk
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransferFailed(f"the connection broke: {error}") from None
    if total is not None and received < total:
        raise TransferFailed(f"the connection broke after {received:,} of {total:,} bytes")


def compute_checksum(path: Path, kind: str = "sha256") -> str:
    """The checksum of a file, as "kind:digits"."""
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()}"


def _send(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """Returns any answer, redirects and errors included: this opener handles HTTP(S) only."""
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
        opener.add_handler(handler)
    host = urlsplit(url).netloc
    try:
        response = opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            fault = f"the certificate of {host} is not trusted ({reason.verify_message})"
            raise HttpError(f"{fault}; if a proxy of your own signs it, set SSL_CERT_FILE") from None
        raise TransferFailed(f"no answer from {host}: {reason}") from None
    return cast("http.client.HTTPResponse", response)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return (parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme))
