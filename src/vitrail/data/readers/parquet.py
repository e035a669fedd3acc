"""Parquet files, saved Hugging Face datasets and tables in memory, all by way of pyarrow (the extra `data`).

Pictures are a column of encoded bytes, plain or as Hugging Face's {bytes, path}; labels are numbers, lists of them or
names. A saved dataset or a table is random access. A Parquet file is decoded a row group at a time, of which each
process keeps 256 MB: a shuffled pass over a bigger set decodes a group for nearly every sample, so pack it first
(`vitrail data pack`); reading in order costs nothing extra.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.core.errors import DataError, SourceNotFound
from vitrail.data.readers.columns import ArrowFiles, Blocks, ParquetFiles, Rows, Tables, arrow, choose, class_names
from vitrail.data.readers.columns import labels as labels_of
from vitrail.data.readers.folder import look, split_name
from vitrail.data.readers.naming import by_split
from vitrail.data.source import Source, Subset


def read(path: Path | str, *, image: str | None = None, label: str | None = None) -> dict[str, Source]:
    """The splits of a .parquet file or of a folder of them, as the Hugging Face hub lays them out
    (train-00000-of-00005.parquet, also below data/). `image` and `label` name the columns where that is not plain."""
    arrow()
    path = Path(path)
    files = parquet_files(path)
    if not files:
        raise SourceNotFound(f"{path}: no .parquet files here")
    blocks = {split: ParquetFiles([str(name) for name in names]) for split, names in files.items()}
    return built(str(path), blocks, image, label, None)


def read_saved(path: Path | str, *, image: str | None = None, label: str | None = None) -> dict[str, Source]:
    """The splits of a folder that `save_to_disk` of Hugging Face's datasets wrote; that library is not needed."""
    arrow()
    path = Path(path)
    parts = {"train": path}
    if (path / "dataset_dict.json").is_file():
        names: Any = described(path / "dataset_dict.json", "splits")
        parts = {split_name(name) or name: path / os.path.basename(name) for name in names}
    blocks: dict[str, Blocks] = {}
    features: Any = None
    for split, folder in parts.items():
        rows: Any = described(folder / "state.json", "_data_files")
        blocks[split] = ArrowFiles([str(folder / os.path.basename(row["filename"])) for row in rows])
        features = described(folder / "dataset_info.json", "features") or features
    return built(str(path), blocks, image, label, features)


def from_table(
    table: Any, *, image: str | None = None, label: str | None = None, called: str = "table"
) -> dict[str, Source]:
    """A pyarrow Table, a Hugging Face Dataset, or a DatasetDict with its splits, as sources. Nothing is copied."""
    arrow()
    tables: dict[str, Any] = {split_name(n) or n: t for n, t in table.items()} if hasattr(table, "items") else {}
    tables = tables or {"train": table}
    plain = {split: t.data.table if hasattr(t, "features") else t for split, t in tables.items()}
    blocks = {split: Tables(t, called) for split, t in plain.items()}
    sources = built(called, blocks, image, label, None)
    for split, t in tables.items():
        chosen: Any = getattr(t, "_indices", None)  # a Dataset that was shuffled, filtered or selected from
        if chosen is not None:
            sources[split] = Subset(sources[split], chosen.column(0).to_numpy())
    return sources


def built(
    where: str, blocks: Mapping[str, Blocks], image: str | None, label: str | None, features: Any
) -> dict[str, Source]:
    """One source a split, all with the same classes."""
    schema = next(iter(blocks.values())).schema()
    features = features or metadata(schema)
    picture, labelled = choose(where, schema, features, image, label)
    columns = {split: None if labelled is None else part.column(labelled) for split, part in blocks.items()}
    classes = class_names(where, features.get(labelled), [column for column in columns.values() if column is not None])
    sources: dict[str, Source] = {}
    for split, part in blocks.items():
        part.picture = picture
        if not len(part):
            raise DataError(f"{where}: the split {split} has no rows")
        sources[split] = Rows(part, labels_of(f"{where} ({split})", columns[split], len(part), classes), classes)
    return sources


def metadata(schema: Any) -> dict[str, Any]:
    """What Hugging Face's datasets notes of its columns in a schema."""
    try:
        found: Any = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return found if isinstance(found, dict) else {}
    except (KeyError, TypeError, ValueError):
        return {}


def described(path: Path, field: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))[field]
    except OSError as error:
        raise SourceNotFound(f"{path}: {error.strerror}; save_to_disk writes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no description of a saved dataset: {error!r}") from None


def parquet_files(path: Path) -> dict[str, Sequence[Path]]:
    """The files by split."""
    if path.is_file():
        return {split: [path] for split in by_split(str(path), [path.name])}
    if not path.is_dir():
        raise SourceNotFound(f"{path}: no such file or folder")
    contents = look(str(path))
    if names := contents.with_suffix(".parquet"):
        return {split: [path / name for name in files] for split, files in by_split(str(path), names).items()}
    if "data" in contents.folders:
        return parquet_files(path / "data")
    inner = {name: split for name in contents.folders if (split := split_name(name))}
    if len(set(inner.values())) < len(inner):
        raise DataError(f"{path} holds {', '.join(inner)}: two names for one split; keep one of them")
    found = {
        split: [path / name / file for file in look(str(path / name)).with_suffix(".parquet")]
        for name, split in inner.items()
    }
    return {split: files for split, files in found.items() if files}
