"""What the weights of a run will say of the images they were trained on."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from vitrail.checkpoint.store.saved import Saved
from vitrail.data.content import Hashes, hash_contents, interleave
from vitrail.data.source import Source, total_bytes
from vitrail.data.training_record import KEY as KEY
from vitrail.data.training_record import MOST_BYTES, MOST_IMAGES, find_exposure, record_training
from vitrail.distributed.world import World
from vitrail.train.config import Data
from vitrail.train.observer import Advance, ignore
from vitrail.train.pictures import Pictures

READING: Final = "reading the images"


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
        hashing=lambda source: hash_together(source, world, advance),
    )
    return [*before, made]


def note_seen(
    pictures: Pictures,
    records: list[dict[str, Any]],
    start: Mapping[str, Any],
    world: World,
    tell: Callable[[str], None],
) -> None:
    """Says which images that the run is scored on were trained on: by the run itself, or by the weights it starts from,
    whose provenance is `start`. A set that is too large to record is not read for it."""
    provenance = {**start, KEY: records}
    for name, part in ((pictures.watched, pictures.watch), (pictures.tested, pictures.test)):
        if part is None or len(part) > MOST_IMAGES or total_bytes(part) > MOST_BYTES:
            continue
        count = find_exposure(provenance, part, lambda source: hash_together(source, world)).count
        if count:
            tell(
                f"{count:,} of the {len(part):,} images of {name} are trained on, too, or were by the weights that the "
                "run starts from: its score says less about new images; `vitrail data dedup` finds such copies"
            )


def hash_together(source: Source, world: World, advance: Advance = ignore) -> Hashes:
    """The content hashes of a source; the processes share the reading."""
    tell = lambda done: advance(READING, done, len(source))  # noqa: E731
    return interleave(world.gather(hash_contents(source, rank=world.rank, world=world.size, advance=tell)))
