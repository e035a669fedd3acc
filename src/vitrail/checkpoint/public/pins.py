"""Checksums that somebody trusts: recorded once, at a download that is trusted, and demanded of the file ever after.

They lie in one JSON file, `CACHE/weights/checksums.json` or what VITRAIL_CHECKSUMS names, as {repository/file: sha256}.
A file of the cache that differs from its pin is not used, whatever the record beside it says.
"""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from vitrail.checkpoint.public.hub import cached_path, digest, fetch, recorded
from vitrail.checkpoint.public.registry import PUBLIC, PublicWeights
from vitrail.core.errors import WeightsError
from vitrail.core.storage import cache_folder, write_file

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
