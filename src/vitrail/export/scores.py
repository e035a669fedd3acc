"""What an export says to given pictures, beside what the network says."""

from dataclasses import dataclass

import torch

from vitrail.core.errors import DataError
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.correctness import count_right
from vitrail.export.check import Forward
from vitrail.export.pictures import Pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of `count` readable pictures: to how many both gave one answer; of `labelled` ones, how many each got right;
    which could not be read."""

    count: int
    agree: int
    labelled: int = 0
    network: int = 0
    export: int = 0
    unread: tuple[str, ...] = ()

    @property
    def agreement(self) -> float:
        return self.agree / self.count

    @property
    def difference(self) -> float:
        """The export's accuracy less the network's."""
        return (self.export - self.network) / self.labelled if self.labelled else 0.0


@torch.inference_mode()
def score(
    reference: Forward, candidate: Forward, pictures: Pictures, preprocessing: Preprocessing, *, pixels: bool = False
) -> Scores:
    """Both on every picture once. With `pixels` both get bytes, else normalised pictures."""
    count = agree = labelled = right = exported = 0
    for batch in pictures.batches(preprocessing):
        if not bool(batch.valid.any()):
            continue
        shown = batch.pixels[batch.valid]
        images = shown if pixels else preprocessing.normalise(shown)
        mine, theirs = reference(images).argmax(1), candidate(images).argmax(1)
        count += len(mine)
        agree += int((mine == theirs).sum())
        if pictures.labels is not None:
            truth = torch.from_numpy(pictures.labels.rows(batch.sample[batch.valid].numpy()))
            hits, known = count_right(mine, truth)
            labelled, right, exported = labelled + known, right + hits, exported + count_right(theirs, truth)[0]
    if not count:
        raise DataError("none of the pictures could be read")
    return Scores(
        count=count,
        agree=agree,
        labelled=labelled,
        network=right,
        export=exported,
        unread=tuple(map(str, pictures.ledger.known.values())),
    )
