"""--labels and --rename: what the classes are called, in every command that names or writes them."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.core.atomic_files import read_text
from vitrail.core.errors import BadLabels, ConfigError, DataError, unknown
from vitrail.data.class_names import BUNDLED, bundled_names

if TYPE_CHECKING:
    from vitrail.predict.predictor import Predictor


def resolve_class_names(
    labels: str | None, renames: Sequence[str], names: Sequence[str] | None, num_classes: int
) -> tuple[str, ...] | None:
    """The class names that --labels and --rename ask for, given those there are; none where neither was given."""
    if labels is None and not renames:
        return None
    if labels is not None:
        names = read_labels(labels, num_classes)
    if not renames:
        return tuple(names or ())
    if names is None:
        raise ConfigError(f"--rename {renames[0]}: these weights have no class names; name all classes with --labels")
    return _apply_renames(names, _parse_renames(renames))


def rename_predictor(asker: "Predictor[Any]", labels: str | None, renames: Sequence[str]) -> "Predictor[Any]":
    """The predictor with the names that --labels and --rename ask for."""
    from vitrail.checkpoint.bundle import card_of

    names = resolve_class_names(labels, renames, card_of(asker.network).labels, len(asker.labels))
    return asker if names is None else asker.called(names)


def read_labels(text: str, num_classes: int) -> tuple[str, ...]:
    """One name per class, from a file or from the bundled ones."""
    from vitrail.tasks.classification.metrics import read_names

    if text not in BUNDLED or Path(text).exists():
        return read_names(Path(text), num_classes)
    names = bundled_names(text)
    if len(names) != num_classes:
        raise BadLabels(f"--labels {text} has {len(names):,} names, but there are {num_classes:,} classes")
    return names


def _parse_renames(texts: Sequence[str]) -> dict[str, str]:
    """{old: new} of all OLD=NEW and all files."""
    found: dict[str, str] = {}
    for text in texts:
        pairs = [text.partition("=")[::2]] if "=" in text and not Path(text).exists() else _read_rename_file(Path(text))
        for old, new in pairs:
            if found.setdefault(old.strip(), new.strip()) != new.strip() or not old.strip() or not new.strip():
                raise ConfigError(f"--rename {text}: {old.strip()!r} needs one new name; write OLD=NEW")
    return found


def _read_rename_file(path: Path) -> list[tuple[str, str]]:
    try:
        rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    except (DataError, csv.Error) as error:
        why = str(error) if isinstance(error, DataError) else f"{path} is not a comma-separated list of names"
        raise DataError(f"--rename {why}; give OLD=NEW or a file") from None
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise DataError(f"--rename {path}: line {number} has {len(row)} columns; each line is old,new")
    return [(row[0], row[1]) for row in rows]


def _apply_renames(names: Sequence[str], changes: dict[str, str]) -> tuple[str, ...]:
    """The names with changes applied; an unknown old name or two classes of one name are refused."""
    for old in changes:
        if old not in names:
            raise unknown("class", old, names)
    new = tuple(changes.get(name, name) for name in names)
    if twice := sorted({name for name in changes.values() if new.count(name) > 1}):
        raise ConfigError(f"--rename gives the name {twice[0]!r} to {new.count(twice[0])} classes; names must differ")
    return new
