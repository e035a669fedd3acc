"""Which samples of a source take part: a small file with a rule, the source's fingerprint and a hash of its own.

Dev splits, k-shot draws, VTAB-1k and the outcome of de-duplication are all kept this way, so that a result can say
exactly which pictures it saw.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import DataError, reason_of
from vitrail.core.storage import read_text, replacing
from vitrail.data.source import Source, Subset

KIND = "vitrail selection 1"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """The samples of `source` (a fingerprint) that `rule` chose, in order; or, with `drop`, those it leaves out."""

    source: str
    rule: dict[str, Any]  # what chose them: a name, a seed, sizes, thresholds
    indices: NDArray[np.int64]
    drop: bool = False

    @property
    def hash(self) -> str:
        """Of everything that matters: two equal hashes mean the same pictures in the same order."""
        head = json.dumps([KIND, self.source, self.rule, self.drop], sort_keys=True)
        return sha256(head.encode() + np.ascontiguousarray(self.indices, "<i8").tobytes()).hexdigest()

    def apply(self, source: Source) -> Subset:
        """The chosen samples. A source that has changed since is refused."""
        if source.fingerprint != self.source:
            raise DataError(
                f"the selection {self.rule.get('name', '')!r} is of a source with fingerprint {self.source[:12]}, but "
                f"this one has {source.fingerprint[:12]}: the data have changed since; make the selection anew"
            )
        kept = np.setdiff1d(np.arange(len(source)), self.indices) if self.drop else self.indices
        return Subset(source, kept)

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        body = {
            "kind": KIND,
            "hash": self.hash,
            "source": self.source,
            "rule": self.rule,
            "drop": self.drop,
            "indices": self.indices.tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps(body).encode())

    @classmethod
    def load(cls, path: Path) -> "Selection":
        """Reads a file that `save` wrote, and checks its hash."""
        try:
            body = json.loads(read_text(path))
            made = cls(
                source=body["source"],
                rule=body["rule"],
                indices=np.asarray(body["indices"], np.int64),
                drop=body["drop"],
            )
            if body["kind"] != KIND or body["hash"] != made.hash:
                raise ValueError("its hash does not fit")
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not a selection, or was edited: {reason_of(error)}; write it again with what made it, "
                "as `vitrail data dedup` does"
            ) from None
        return made
