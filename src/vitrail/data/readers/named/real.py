"""ReaL: what is really on the 50,000 validation pictures of ImageNet, several classes each or none.

`real.json` is a list of lists of class numbers, in the order of the pictures' own numbers: ILSVRC2012_val_00000293 is
entry 292.
"""

import json
from operator import index
from pathlib import Path

import numpy as np

from vitrail.core.errors import BadLabels, DataError, reason_of
from vitrail.data.labels import Labels
from vitrail.data.readers.named.imagenet import val_number
from vitrail.data.source import Relabelled, Source, Subset


def read_real(path: Path) -> list[tuple[int, ...]]:
    """The classes of validation picture 1, 2, ..."""
    try:
        held = json.loads(path.read_text("utf-8"))
        rows = [tuple(int(np.int64(index(label))) for label in row) for row in held]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a list of lists of class numbers ({reason_of(error)})") from None
    return rows


def real_rows(source: Source, path: Path) -> list[tuple[int, ...]]:
    """The ReaL labels of every picture of a source, by its name; an empty row where a picture has none."""
    rows = read_real(path)
    found = np.array([val_number(source.name(i)) for i in range(len(source))], np.int64)
    wrong = np.flatnonzero((found < 1) | (found > len(rows)))
    if wrong.size:
        name = source.name(int(wrong[0]))
        raise BadLabels(
            f"{name}: no validation picture of ImageNet by its name (ILSVRC2012_val_00000001 to {len(rows)})"
        )
    return [rows[number - 1] for number in found.tolist()]


def real_labels(source: Source, path: Path) -> Source:
    """Validation pictures of ImageNet with their ReaL labels. Those that have none are left out of the count."""
    rows = real_rows(source, path)
    kept = np.array([i for i, row in enumerate(rows) if row], np.int64)
    labels = Labels.several(rows[i] for i in kept.tolist())
    labels.check(len(source.classes), str(path))
    return Relabelled(Subset(source, kept), labels, source.classes)
