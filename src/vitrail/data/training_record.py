"""Records in the provenance of weights which images they were trained on, and finds which images they have seen.

Up to MOST_IMAGES images of MOST_BYTES together are recorded by a 64-bit hash of the content of each: this takes 11
bytes per image in the file, and recognises the images in any folder, archive or subset, under any name. A larger set is
recorded by the fingerprint of its source and one bit per image: this recognises the set, or any part of the same
source, wherever it is stored. Weights that started from others also carry the records of those.

The module also hashes the images of a source, and traces where its samples come from.
"""

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from vitrail.data.dataset import ImageDataset, RelabelledDataset, SubsetDataset, total_bytes

Hashes = NDArray[np.uint64]

REPORTED: Final = 64  # samples between two reports of progress


def hash_contents(
    source: ImageDataset, *, rank: int = 0, world: int = 1, advance: Callable[[int], None] = lambda _: None
) -> Hashes:
    """Computes the content hash of every sample, or of every world-th one from `rank` on; 0 for one that cannot be
    read. `advance` is called with the number of samples done, out of all."""
    places = range(rank, len(source), world)
    hashes = np.zeros(len(places), np.uint64)
    for at, place in enumerate(places):
        hashes[at] = source.content_hash(place)
        if at % REPORTED == 0:
            advance(place)
    advance(len(source))
    return hashes


def interleave(shares: Sequence[Hashes]) -> Hashes:
    """Merges the shares of all ranks into the hashes of the whole source."""
    whole = np.zeros(sum(map(len, shares)), np.uint64)
    for rank, share in enumerate(shares):
        whole[rank :: len(shares)] = share
    return whole


def trace_samples(source: ImageDataset) -> tuple[ImageDataset, NDArray[np.int64]]:
    """Returns the source that the samples are drawn from, and their indices in it."""
    places = np.arange(len(source))
    while isinstance(source, SubsetDataset | RelabelledDataset):
        if isinstance(source, SubsetDataset):
            places = source.indices[places]
        source = source.source
    return source, places


KEY: Final = "trained_on"  # in a provenance: a list of records, all of which apply
MOST_IMAGES: Final = 100_000
MOST_BYTES: Final = 16 << 30
BULK: Final = ("hashes", "places")  # fields that are of no use to a reader

Hashing = Callable[[ImageDataset], Hashes]  # of every sample; several processes may share the work


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """What is known about weights and some images: which of the images they were trained on, and which weights, out of
    these and those they started from, have no record that can tell."""

    seen: NDArray[np.bool_]  # [N]
    unrecorded: tuple[str, ...]  # "" for the weights themselves

    @property
    def count(self) -> int:
        return int(self.seen.sum())


def record_training(
    train: ImageDataset,
    *,
    out_of: int,
    selection: Mapping[str, Any],
    others: Mapping[str, ImageDataset],
    hashing: Hashing = hash_contents,
) -> dict[str, Any]:
    """Makes the record of a training run on `train`, which `selection` chose from `out_of` images. `others` are sources
    of the same collection. All processes must call it."""
    facts = {"images": len(train), "held_out": out_of - len(train), "fingerprint": train.fingerprint}
    facts = {**facts, "digest": train.content_digest, "selection": dict(selection)}
    if len(train) <= MOST_IMAGES and total_bytes(train) <= MOST_BYTES:
        hashes = hashing(train)
        known = np.unique(hashes[hashes != 0]).astype("<u8").tobytes()
        return {**facts, "hashes": base64.b64encode(known).decode()}
    base, places = trace_samples(train)
    chosen = np.zeros(len(base), np.bool_)
    chosen[places] = True
    apart = {name: trace_samples(other)[0].fingerprint for name, other in others.items()}
    apart = {name: fingerprint for name, fingerprint in apart.items() if fingerprint != base.fingerprint}
    bits = zlib.compress(np.packbits(chosen).tobytes(), 9)
    return {**facts, "source": base.fingerprint, "places": base64.b64encode(bits).decode(), "apart": apart}


def find_exposure(provenance: Mapping[str, Any], source: ImageDataset, hashing: Hashing = hash_contents) -> Exposure:
    """Finds which samples of a source the weights with this provenance were trained on. All processes must call it."""
    seen, unrecorded = np.zeros(len(source), np.bool_), list[str]()
    hashes: Hashes | None = None
    for name, records in list_records(provenance):
        if hashes is None and any("hashes" in record for record in records):
            hashes = hashing(source)
        found = [match_record(record, source, hashes) for record in records]
        if not found or any(one is None for one in found):
            unrecorded.append(name)
        for one in found:
            seen |= False if one is None else one
    return Exposure(seen=seen, unrecorded=tuple(dict.fromkeys(unrecorded)))


def list_records(provenance: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Lists the records of weights, under the name "", and of those they started from, under their names."""
    link: Any = provenance
    name = ""
    while isinstance(link, Mapping):
        facts = cast("Mapping[str, Any]", link)
        yield name, read_records(facts)
        link = facts.get("from")
        name = str(cast("Mapping[str, Any]", link).get("weights") or "?") if isinstance(link, Mapping) else ""


def read_records(provenance: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads the records of the weights themselves."""
    records: Any = provenance.get(KEY)
    return [one for one in records if isinstance(one, dict)] if isinstance(records, list) else []


def match_record(record: Mapping[str, Any], source: ImageDataset, hashes: Hashes | None) -> NDArray[np.bool_] | None:
    """Finds which samples of a source are in a record. None if the record cannot tell, or is damaged."""
    try:
        if "hashes" in record:
            known = np.frombuffer(base64.b64decode(record["hashes"], validate=True), "<u8")
            if hashes is None or not np.isin(hashes[hashes != 0] & 1, known & 1).all():
                return None  # the record hashes files and the source hashes pixels, or the reverse
            return np.isin(hashes, known) & (hashes != 0)
        base, places = trace_samples(source)
        if base.fingerprint in record["apart"].values():
            return np.zeros(len(source), np.bool_)
        if base.fingerprint != record["source"]:
            return None
        size = (len(base) + 7) // 8
        bits = zlib.decompressobj().decompress(base64.b64decode(record["places"], validate=True), size)
        chosen = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(base))
        return chosen.astype(np.bool_)[places]
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, zlib.error):
        return None


def shorten_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Shortens a provenance for display: leaves out the bulk of the records, which only comparisons need."""
    out = dict(provenance)
    if KEY in out:
        out[KEY] = [{name: row[name] for name in row if name not in BULK} for row in read_records(out)]
    if isinstance(out.get("from"), Mapping):
        out["from"] = shorten_provenance(out["from"])
    return out
