"""A picture behind an address, for whoever asks for it: http and https alone, and never more than was agreed to."""

import http.client
import time
import urllib.error
import urllib.request
from typing import IO, Any, Final
from urllib.parse import urlsplit

from vitrail.core.errors import BadPicture

MAX_BYTES: Final = 64 * 2**20
TIMEOUT_S: Final = 30.0
REDIRECTS: Final = 5
CHUNK: Final = 2**16


class Upward(urllib.request.HTTPRedirectHandler):
    """Redirects, a few of them, never from https down to http or off to another protocol."""

    max_redirections = REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            fp.close()
            raise BadPicture(f"redirects to {newurl[:200]!r}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_address(text: str) -> bool:
    """Whether this names a place on a network: an address of any kind, so that none is taken for a file's name."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and scheme.isascii() and scheme.isalpha()


def fetch(url: str) -> bytes:
    """What lies at an address, whole. BadPicture with the reason where it is too large, too slow or not there."""
    if urlsplit(url).scheme.lower() not in ("http", "https"):
        raise BadPicture("only http and https addresses are fetched")
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        Upward(),
    ):
        opener.add_handler(handler)
    asked = urllib.request.Request(url, headers={"User-Agent": "vitrail", "Accept": "image/*"})
    until = time.monotonic() + TIMEOUT_S
    try:
        answer = opener.open(asked, timeout=TIMEOUT_S)
        if answer is None:
            raise BadPicture("no answer that could be read")
        with answer:
            return _received(answer, until)
    except urllib.error.HTTPError as error:
        error.close()
        raise BadPicture(f"the server answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadPicture(f"cannot be fetched: {getattr(error, 'reason', None) or error}") from None


def _received(answer: http.client.HTTPResponse, until: float) -> bytes:
    content = bytearray()
    while chunk := answer.read1(CHUNK):
        content += chunk
        if len(content) > MAX_BYTES:
            raise BadPicture(f"more than {MAX_BYTES:,} bytes are not fetched")
        if time.monotonic() > until:
            raise BadPicture(f"was not here after {TIMEOUT_S:.0f} s")
    length = answer.headers.get("Content-Length", "")
    if length.isdecimal() and len(content) < int(length):
        raise BadPicture(f"the connection broke after {len(content):,} of {int(length):,} bytes")
    return bytes(content)
