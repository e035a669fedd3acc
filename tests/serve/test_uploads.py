"""Bodies taken apart: sound ones whole, others refused with a reason, and never a file on disk."""

import base64
import contextlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.client import form
from tests.serve.in_process_server import inside, picture
from vitrail.serve.http_errors import RequestError
from vitrail.serve.requests import FORM, JSON, read_uploads

MOST = 4
TYPE, SOUND = form([("a.png", b"one"), ("b.png", b"two\r\n--two")])
KIND = TYPE.decode()


def refused(content_type: str, body: bytes, status: int = 400) -> str:
    with pytest.raises(RequestError) as caught:
        read_uploads(content_type, body, MOST)
    assert caught.value.status == status
    return f"{caught.value.error}: {caught.value.reason}"


def test_a_form_comes_apart_byte_by_byte() -> None:
    found = read_uploads(KIND, SOUND, MOST)
    assert [(each.name, each.data) for each in found] == [("a.png", b"one"), ("b.png", b"two\r\n--two")]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=MOST))
@settings(max_examples=60, deadline=None)
def test_any_bytes_come_through(datas: list[bytes]) -> None:
    if any(b"vitrail-boundary" in data for data in datas):
        return
    found = read_uploads(*kind_and_body(form([("x", data) for data in datas])), MOST)
    assert [each.data for each in found] == datas
    text = json.dumps({"images": [base64.b64encode(data).decode() for data in datas]}).encode()
    assert [each.data for each in read_uploads(JSON, text, MOST)] == datas


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_is_refused_or_read(data: st.DataObject) -> None:
    body = bytearray(SOUND if data.draw(st.booleans()) else b'{"images": ["aGVsbG8=", "aGVsbG8="]}')
    kind = data.draw(
        st.sampled_from([KIND, JSON, "multipart/form-data; boundary=", 'multipart/form-data; boundary="x'])
    )
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(1, len(body))) :]
    with contextlib.suppress(RequestError):  # and nothing else
        assert 1 <= len(read_uploads(kind, bytes(body), MOST)) <= MOST


def test_names_with_markup_paths_and_other_letters_are_kept_as_text() -> None:
    for name in ("../../etc/passwd", "<img src=x>", "Löwe.png", "a" * 900):
        (found,) = read_uploads(*kind_and_body(form([(name, b"x")])), MOST)
        assert found.name == name[:200]
    (found,) = read_uploads(*kind_and_body(form([("", b"x")])), MOST)
    assert found.name == "image 1"


def kind_and_body(made: tuple[bytes, bytes]) -> tuple[str, bytes]:
    return made[0].decode(), made[1]


def test_forms_that_are_not_sound() -> None:
    assert "boundary" in refused(FORM, SOUND)
    assert "cannot be parsed" in refused(KIND, b"nonsense")
    assert "ends before its last boundary" in refused(KIND, SOUND[:-4])
    assert "ends before its last boundary" in refused(KIND, b"")
    assert "too many parts" in refused(*kind_and_body(form([("x", b"")] * 1000)))
    assert "unknown field: the form has a field 'file'" in refused(*kind_and_body(form([("x", b"")], "file")))
    assert "cannot be parsed" in refused(KIND, SOUND.replace(b"Content-Type: image/png", b"X: " + b"y" * 9000))
    many = b"".join(b"X-%d: y\r\n" % at for at in range(100)) + b"Content-Type"
    assert "cannot be parsed" in refused(KIND, SOUND.replace(b"Content-Type", many))
    assert "Content-Disposition" in refused(KIND, SOUND.replace(b"Content-Disposition", b"Content-Position"))
    assert "cannot be parsed" in refused(f"{FORM}; boundary={'b' * 500}", SOUND)
    assert "no image" in refused(KIND, b"--vitrail-boundary--\r\n")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 9000, "too many values"),
        (b'{"a":' * 9000, "too many values"),
        (b'{"images": [' + b"[]," * 5000 + b"[]]}", "too many values"),
        (b"[]", "an object with one key"),
        (b'{"images": [], "more": 1}', "an object with one key"),
        (b'{"images": "aGVsbG8="}', "one key"),
        (b'{"images": []}', "no image"),
        (b'{"images": [1]}', "is not a string"),
        (b'{"images": ["%%%"]}', "images.0."),
        (b'{"images": ["aGVsbG8"]}', "base64"),
        (b'{"images": ["\\u00e9"]}', "base64"),
        (b'{"images": ["https://example.org/cat.jpg"]}', "none is fetched"),
        (b'{"images": ["file:///etc/passwd"]}', "none is fetched"),
        (b'{"images": ["/etc/passwd"]}', "padding|base64"),
        (b'{"images": ["a","a","a","a","a"]}', "4 at most"),
        (b'{"images": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
    ],
)
def test_json_that_is_not_what_is_wanted(body: bytes, words: str) -> None:
    assert re.search(words, refused(JSON, body)), refused(JSON, body)


@pytest.mark.parametrize("kind", ["", "image/png", "text/plain", "application/x-www-form-urlencoded", "x" * 500])
def test_other_content_types(kind: str) -> None:
    assert "multipart/form-data" in refused(kind, b"x", 415)


def test_packed_bodies_are_not_unpacked() -> None:
    with inside() as here:
        response = here.client.post(
            "/predict", content=b"x", headers={"Content-Encoding": "gzip", "Content-Type": JSON}
        )
        assert response.status_code == 415
        assert "gzip" in response.json()["reason"]


def test_nothing_is_written_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form's file beyond a megabyte is where others begin to write."""
    monkeypatch.chdir(tmp_path)
    made: list[Any] = []
    for name in ("TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, lambda *args, **more: made.append(args))
    with inside() as here:
        large = picture(size=(1200, 900), kind="BMP")
        assert len(large) > 3_000_000
        assert here.post(data=large).status_code == 200
        assert here.post(data=large[: len(large) // 2]).status_code == 415
        text = base64.b64encode(large).decode()
        assert here.client.post("/predict", json={"images": [text]}).status_code == 200
    assert not made
    assert not list(tmp_path.iterdir())
