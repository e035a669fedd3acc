"""Pictures that an export is given: to score both sides on, and to calibrate int8 with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from vitrail.core.errors import DataError
from vitrail.data.ledger import Ledger
from vitrail.data.loader import Batch, sweep
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.source import Source
from vitrail.data.targets import CLASS_LABELS, Targets

CALIBRATION: Final = 128  # pictures


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pictures:
    """`source` is scored on; `has_targets` where the network's task finds its targets there, numbered as the outputs
    are. `calibration` is where int8 finds its ranges, the same pictures unless there are others."""

    source: Source
    has_targets: bool = False
    calibration: Source | None = None
    batch: int = 64
    workers: int = 0
    progress: Callable[[str, int, int | None], None] = lambda what, done, total: None
    ledger: Ledger = field(default_factory=Ledger)

    def batches(self, preprocessing: Preprocessing, targets: Targets = CLASS_LABELS) -> Iterator[Batch]:
        """Every picture once."""
        size = min(self.batch, max(len(self.source), 1))
        every = sweep(self.source, preprocessing, batch=size, workers=self.workers, ledger=self.ledger, targets=targets)
        for done, batch in enumerate(every, start=1):
            yield batch
            self.progress("pictures", min(done * size, len(self.source)), len(self.source))

    def for_calibration(self, preprocessing: Preprocessing, count: int = CALIBRATION) -> Iterator[Tensor]:
        """Bytes [B, 3, H, W] of pictures that lie evenly over the set."""
        import numpy as np

        from vitrail.data.source import Subset

        source = self.source if self.calibration is None else self.calibration
        if not len(source):
            raise DataError("there are no pictures to calibrate int8 with")
        places = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).astype(np.int64))
        for batch in sweep(Subset(source, places), preprocessing, batch=min(8, len(places)), ledger=self.ledger):
            if bool(batch.valid.any()):
                yield batch.pixels[batch.valid]
