"""Embeddings as a file: Parquet, one row per image, or .npz, one array per column. Written part by part.

| column | holds |
|---|---|
| split, sample | which split, and which image of it, from 0 |
| name | its path, its place in an archive, or its row |
| label | the name of its class; null without one, joined by "|" if there are several |
| feature | D numbers |

Equal content gives equal bytes: the file has no date.
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.data.dataset import ImageDataset
from vitrail.data.readers.parquet import import_arrow

KEY: Final = "vitrail"
COUNTS: Final = "vitrail.counts"  # metadata of a Parquet file, known only at the end
FORMATS: Final = (".parquet", ".npz")
FIRST: Final = 100  # unreadable images listed in the file itself
LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)  # a zip file needs a date

Bad = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingPart:
    """Features [n, D] of samples [n], by their indices in the whole source, and the unreadable images."""

    features: Tensor
    samples: Tensor
    unreadable: Bad


Parts = Callable[[], Iterator[EmbeddingPart]]
Columns = dict[str, Any]  # split, sample, name and label of each row
Describe = Callable[[EmbeddingPart], Columns]


def join_parts(
    parts: Parts, source: ImageDataset, splits: Mapping[str, ImageDataset], about: Mapping[str, Any], path: Path
) -> Bad:
    """Writes all parts into one file, with `about`; returns the unreadable images."""
    ends = np.cumsum([len(one) for one in splits.values()])

    def describe(part: EmbeddingPart) -> Columns:
        places, names = part.samples.numpy(), list(splits)
        within = np.searchsorted(ends, places, side="right")
        labels = ["|".join(source.classes[one] for one in source.labels[at]) or None for at in places.tolist()]
        return {
            "split": [names[at] for at in within.tolist()],
            "sample": places - np.concatenate([[0], ends])[within],
            "name": [to_printable(source.name(at)) for at in places.tolist()],
            "label": labels,
        }

    write = write_parquet if path.suffix == ".parquet" else write_npz
    return write(parts, describe, about, path)


def to_printable(name: str) -> str:
    """A name as valid text: undecodable bytes are escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def describe_counts(images: int, unreadable: Bad) -> dict[str, Any]:
    return {"pictures": images, "unreadable": len(unreadable), "first": unreadable[:FIRST]}


def write_parquet(parts: Parts, describe: Describe, about: Mapping[str, Any], path: Path) -> Bad:
    pa = import_arrow()
    number, word = pa.float16() if about["facts"]["type"] == "float16" else pa.float32(), pa.string()
    kinds = {"split": pa.dictionary(pa.int32(), word), "sample": pa.int64(), "name": word}
    kinds |= {"label": kinds["split"], "feature": pa.list_(number, about["width"])}
    schema = pa.schema(list(kinds.items()), metadata={KEY: json.dumps(about)})
    packed: dict[str, str] = dict.fromkeys(("split", "sample", "name", "label"), "zstd")
    packed["feature.list.element"] = "none"  # such numbers do not compress
    images, unreadable = 0, Bad()
    with pa.parquet.ParquetWriter(path, schema, compression=packed, use_dictionary=["split", "label"]) as writer:
        for part in parts():
            columns, flat = describe(part), pa.array(part.features.numpy().reshape(-1), number)
            images, unreadable = images + len(part.samples), [*unreadable, *part.unreadable]
            arrays = [
                pa.array(columns["split"], word).dictionary_encode(),
                pa.array(columns["sample"], pa.int64()),
                pa.array(columns["name"], word),
                pa.array(columns["label"], word).dictionary_encode(),
                pa.FixedSizeListArray.from_arrays(flat, about["width"]),
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        writer.add_key_value_metadata({COUNTS: json.dumps(describe_counts(images, unreadable))})
    return unreadable


def write_npz(parts: Parts, describe: Describe, about: Mapping[str, Any], path: Path) -> Bad:
    """Holds all names and labels in memory, but not the features; their number is counted first."""
    columns, unreadable = list[Columns](), Bad()
    for part in parts():
        columns.append(describe(part))
        unreadable += part.unreadable

    def join(name: str) -> list[Any]:
        return [value for one in columns for value in one[name]]

    count = sum(len(one["name"]) for one in columns)
    plain = {
        "splits": np.array(join("split"), np.str_),
        "samples": np.array(join("sample"), np.int64),
        "names": np.array(join("name"), np.str_),
        "labels": np.array([text or "" for text in join("label")], np.str_),
        KEY: np.array(json.dumps({**about, **describe_counts(count, unreadable)})),
    }
    kind = np.dtype(str(about["facts"]["type"])).newbyteorder("<")
    header = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": (count, about["width"])}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("features.npy", LONG_AGO), "w", force_zip64=True) as file:
            npy.write_array_header_1_0(file, header)
            for part in parts():
                file.write(part.features.numpy().astype(kind, copy=False).tobytes())
        for name, array in plain.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", LONG_AGO), "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)
    return unreadable


def read_description(path: Path) -> dict[str, Any]:
    """The description in a file of embeddings."""
    try:
        if path.suffix == ".parquet":
            stored: dict[bytes, bytes] = import_arrow().parquet.read_metadata(path).metadata or {}
            found: dict[str, Any] = json.loads(stored[KEY.encode()]) | json.loads(stored[COUNTS.encode()])
        else:
            with np.load(path, allow_pickle=False) as archive:
                found = json.loads(str(archive[KEY]))
        if not {"facts", "pictures", "width", "unreadable", "first"} <= set(found):
            raise ValueError("incomplete")
        return found
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        wrong = f"{path} exists and was not written by `vitrail embed` ({type(error).__name__})"
        raise ConfigError(f"{wrong}; name another file, or add --force to replace it") from None
