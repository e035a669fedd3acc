"""The pictures of a request, as bytes: a form's files, or base64 in JSON. No address is fetched, no path is opened."""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Final, cast

from vitrail.core.errors import reason_of
from vitrail.serve.multipart import parse_form
from vitrail.serve.refusal import Refused

FIELD: Final = "image"
FORM: Final = "multipart/form-data"
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Upload:
    """One picture, not decoded, and what its sender calls it."""

    name: str
    data: bytes


def uploads(content_type: str, body: bytes, most: int) -> list[Upload]:
    """At least one and at most `most` pictures. Refused says what is wrong with the body."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == FORM:
        found = of_form(content_type, body, most)
    elif kind == JSON:
        found = of_json(body, most)
    else:
        raise Refused(
            415,
            "content type not read",
            f"{kind[:60] or 'no Content-Type'!r}: send {FORM} with pictures in the field {FIELD!r}, or {JSON} with "
            '{"images": [base64, ...]}',
        )
    if not found:
        raise Refused(
            400, "no picture", f"send at least one, in the form's field {FIELD!r} or the JSON's list 'images'"
        )
    return found


def of_form(content_type: str, body: bytes, most: int) -> list[Upload]:
    found = list[Upload]()
    for field, name, data in parse_form(content_type, body, most):
        if field != FIELD:
            raise Refused(400, "unknown field", f"the form has a field {field!r}; pictures go into {FIELD!r}")
        found.append(Upload(name or f"image {len(found) + 1}", data))
    return found


def of_json(body: bytes, most: int) -> list[Upload]:
    # Before anything is made of it: empty lists by the million would take twenty times the memory of their text.
    if sum(body.count(sign) for sign in (b",", b"[", b"{")) > 8 * most + 64:
        raise Refused(400, "too many values", f"an object with the key 'images' and at most {most} strings is wanted")
    try:
        given: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        words = reason_of(error)
        raise Refused(400, "unsound JSON", f"the body cannot be read as JSON: {words}") from None
    if not isinstance(given, dict) or set(cast("dict[str, Any]", given)) != {"images"}:
        raise Refused(400, "unknown JSON", 'an object with one key is wanted: {"images": [base64, ...]}')
    images = cast("dict[str, Any]", given)["images"]
    if not isinstance(images, list):
        raise Refused(400, "unknown JSON", "'images' has to be a list of base64 strings")
    several = cast("list[Any]", images)
    if len(several) > most:
        raise Refused(400, "too many pictures", f"{len(several)} are in 'images'; at most {most} go in one request")
    return [Upload(f"image {at + 1}", decoded(text, at)) for at, text in enumerate(several)]


def decoded(text: Any, at: int) -> bytes:
    if not isinstance(text, str):
        raise Refused(400, "unknown JSON", f"images[{at}] is no string; each picture is one, in base64")
    if text.startswith("data:"):  # what a browser's FileReader gives: the picture is in there
        text = text.partition(",")[2]
    elif "://" in text[:12]:
        raise Refused(
            400, "not base64", f"images[{at}] is an address; none is fetched: send the picture itself, in base64"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(400, "not base64", f"images[{at}] is not base64, or is cut short") from None
