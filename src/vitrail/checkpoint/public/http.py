"""One request to the hub and the redirects behind it: over HTTP alone, never downhill, the token to one host alone."""

import http.client
import os
import re
import ssl
import string
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import SplitResult, quote, urldefrag, urljoin, urlsplit

from vitrail.core.errors import ConfigError, UnsafeWeights, WeightsNotFound

MAX_REDIRECTS = 5
TIMEOUT_S = 30.0
CHUNK = 2**18


class TransferFailed(Exception):
    """A failure that may pass: worth another try."""


def ask(url: str, start: int, path: Path) -> tuple[http.client.HTTPResponse, str | None]:
    """The answer that carries the body, and the sha256 that the hub names on the way to it."""
    here, etag, token = url, None, _token()
    for _ in range(MAX_REDIRECTS + 1):
        headers = {"User-Agent": "vitrail", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        answer = _open(here, headers)
        etag = etag or _sha256(answer.headers.get("X-Linked-Etag", ""))
        if answer.status == 200 or (start and answer.status in (206, 416)):
            return answer, etag
        answer.close()
        if answer.status not in (301, 302, 303, 307, 308):
            raise _refusal(answer, here, path)
        there = redirected(here, answer.headers.get("Location", ""))
        if _origin(there) != _origin(url):
            token = None  # gone for good: another host does not get it by sending us back
        here = there
    raise UnsafeWeights(f"{url} redirects more than {MAX_REDIRECTS} times; check the hub's address")


def _open(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """Any answer at all, redirects and errors included: this opener knows HTTP and nothing else."""
    opener = urllib.request.OpenerDirector()
    for handler in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
        opener.add_handler(handler)
    host = urlsplit(url).netloc
    try:
        answer = opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            fault = f"the certificate of {host} is not trusted ({reason.verify_message})"
            raise WeightsNotFound(f"{fault}; if a proxy of your own signs it, set SSL_CERT_FILE") from None
        raise TransferFailed(f"no answer from {host}: {reason}") from None
    return cast("http.client.HTTPResponse", answer)


def read_some(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(CHUNK)  # what has come so far, so that a break loses none of it
    except (OSError, http.client.HTTPException) as error:
        raise TransferFailed(f"the connection broke: {error}") from None


def redirected(here: str, location: str) -> str:
    """Where a redirect leads, if it may lead there."""
    there = urldefrag(urljoin(here, quote(location, safe=string.punctuation, encoding="latin-1"))).url
    parts = split_address(there)
    if not location or parts is None:
        raise UnsafeWeights(f"{here} redirects to {location[:200]!r}, which is not a http(s) address")
    if urlsplit(here).scheme == "https" and parts.scheme != "https":
        raise UnsafeWeights(f"{here} redirects from https down to {parts.scheme}://{parts.netloc}; refused")
    return there


def split_address(url: str) -> SplitResult | None:
    """The parts of an http(s) address without a user name in it; None for anything else."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is not a number
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname and parts.username is None else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return (parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme))


def _refusal(answer: http.client.HTTPResponse, url: str, path: Path) -> Exception:
    """What to do about an answer that is neither the file nor a redirect."""
    status = answer.status
    if status >= 500 or status == 408:
        return TransferFailed(f"{urlsplit(url).netloc} answers {status}")
    after = answer.headers.get("Retry-After", "")
    wait = f"{after} s" if re.fullmatch("[0-9]{1,6}", after) else "a while"
    remedies = {
        401: "set HF_TOKEN to a token that may read it, or unset one that has expired",
        403: "set HF_TOKEN to a token that may read it, and accept the licence on its page",
        404: "no such file there; check VITRAIL_HUB and HF_ENDPOINT",
        429: f"too many requests; wait {wait}, or set HF_TOKEN",
    }
    remedy = remedies.get(status, "an answer that a hub does not give; check VITRAIL_HUB and HF_ENDPOINT")
    return WeightsNotFound(f"{url.partition('?')[0]} answers {status}: {remedy}; or put the file at {path}")


def _token() -> str | None:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise ConfigError("HF_TOKEN holds characters that no token has; set it again")
    return token or None


def _sha256(etag: str) -> str | None:
    """The checksum in an `X-Linked-Etag`; files outside of LFS have a git hash there instead, which is shorter."""
    match = re.fullmatch(r'(?:W/)?"?([0-9a-fA-F]{64})"?', etag.strip())
    return match[1].lower() if match else None
