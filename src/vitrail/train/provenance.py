"""What the weights of a run will say of the images they were trained on."""

from typing import Any, Final

from vitrail.checkpoint.store.saved import Saved
from vitrail.data.content import Hashes, hash_contents, interleave
from vitrail.data.source import Source
from vitrail.data.training_record import KEY as KEY
from vitrail.data.training_record import record_training
from vitrail.distributed.world import World
from vitrail.train.config import Data
from vitrail.train.observer import Advance, ignore
from vitrail.train.pictures import Pictures

READING: Final = "reading the training images"


def training_records(
    data: Data, pictures: Pictures, world: World, saved: Saved | None, advance: Advance = ignore
) -> list[dict[str, Any]]:
    """One record, or several where a resumed run was made to train on other images than before: all of them count. The
    processes share the work, and a run that resumes with the same images keeps what it had."""
    before: list[dict[str, Any]] = [] if saved is None else saved.facts.get(KEY, [])
    same = any(
        (record["fingerprint"], record["digest"]) == (pictures.train.fingerprint, pictures.train.content_digest)
        for record in before
    )
    if world.agree(same):
        return before

    def hashing(source: Source) -> Hashes:
        share = hash_contents(
            source, rank=world.rank, world=world.size, advance=lambda done: advance(READING, done, len(source))
        )
        return interleave(world.gather(share))

    selection = {
        "source": data.source,
        "split": data.train,
        "part": data.part,
        "part_seed": data.part_seed,
        "dev": data.dev,
        "without": "" if pictures.without is None else pictures.without.hash,
    }
    made = record_training(
        pictures.train,
        out_of=pictures.out_of or len(pictures.train),
        selection=selection,
        others=pictures.others,
        hashing=hashing,
    )
    return [*before, made]
