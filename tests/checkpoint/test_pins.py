"""A checksum that was recorded once is demanded ever after."""

import hashlib
import json
from pathlib import Path

import pytest

from vitrail.checkpoint import download_weights as pins
from vitrail.checkpoint.download_weights import cached_path, fetch
from vitrail.checkpoint.known_weights import find_public_weights
from vitrail.cli.app import main
from vitrail.core.errors import CorruptWeights, WeightsError

ENTRY = find_public_weights("vit_ti_16", "augreg_in21k")
TEXT = "vit_ti_16:augreg_in21k"
BODY = b"weights" * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    monkeypatch.delenv("VITRAIL_CHECKSUMS", raising=False)


def place(body: bytes = BODY) -> Path:
    path = cached_path(ENTRY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def states() -> list[str]:
    return [each.state for each in pins.verify()]


def test_a_file_put_there_by_hand_is_unverified_until_it_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    path = place()
    assert fetch(pins.apply_pin(ENTRY)) == path
    assert states() == ["unverified"]
    assert pins.pin(ENTRY) == SHA256
    assert states() == ["pinned"]
    capsys.readouterr()
    assert fetch(pins.apply_pin(ENTRY)) == path
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("record", [True, False])
def test_changed_bytes_are_refused_even_with_a_record_that_agrees(record: bool) -> None:
    path = place()
    pins.pin(ENTRY)
    other = BODY[:-1] + b"!"
    path.write_bytes(other)
    beside = path.with_name(f"{path.name}.json")
    if record:
        beside.write_text(
            json.dumps({**json.loads(beside.read_text()), "sha256": hashlib.sha256(other).hexdigest(), "etag": "x"})
        )
    else:
        beside.unlink()
    assert states() == ["changed"]
    with pytest.raises(CorruptWeights):
        fetch(pins.apply_pin(ENTRY))
    with pytest.raises(CorruptWeights):
        pins.pin(ENTRY)
    assert main(["models", "--verify"]) == 1


def test_what_the_hub_named_is_said_so() -> None:
    path = place()
    record = {"sha256": SHA256, "size": len(BODY), "url": "https://hub", "etag": SHA256, "date": "today"}
    path.with_name(f"{path.name}.json").write_text(json.dumps(record))
    assert states() == ["as the hub said"]


def test_a_pin_without_a_file_is_demanded_of_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of pins may lie elsewhere, in a repository for instance."""
    elsewhere = tmp_path / "mine.json"
    elsewhere.write_text(json.dumps({pins.pin_key(ENTRY): "0" * 64}))
    monkeypatch.setenv("VITRAIL_CHECKSUMS", str(elsewhere))
    assert pins.apply_pin(ENTRY).sha256 == "0" * 64
    place()
    assert states() == ["changed"]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": "xyz"}', "[" * 100_000])
def test_a_damaged_list_of_pins_is_refused(content: str) -> None:
    place()
    pins.pins_file().write_text(content)
    with pytest.raises(WeightsError, match=r"checksums\.json"):
        pins.apply_pin(ENTRY)
    assert main(["models", "--verify"]) == 2


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    place()
    assert main(["models", "--pin", TEXT]) == 0
    assert SHA256 in capsys.readouterr().out
    assert json.loads(pins.pins_file().read_text()) == {pins.pin_key(ENTRY): SHA256}
    assert main(["models", "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "pinned"
    for wrong in ("vit_ti_16", "vit_ti_16:nothing", "nothing:x", ":"):
        assert main(["models", "--pin", wrong]) == 2
    assert main(["models", "--pin", "vit_b_16:augreg_in21k"]) == 2  # offline, and not there
