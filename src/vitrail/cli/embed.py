"""What `vitrail embed` does."""

import contextlib
import os

from vitrail.cli.fit import size_of
from vitrail.cli.opening import open_data
from vitrail.cli.options.embed import EmbedOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.cli.subject import describe_weights, load_subject
from vitrail.core.atomic_files import check_writable
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size
from vitrail.data.collection import Collection
from vitrail.data.dataset import ImageDataset
from vitrail.distributed.process_group import World, joined
from vitrail.evaluation.frozen.embed import EmbeddingSummary, embed
from vitrail.evaluation.frozen.embedding_file import FORMATS
from vitrail.evaluation.scoring import choose_workers

NAMED = 3  # unreadable images that are named
PATIENCE_S = 3600.0  # a process may be that much longer at its last part than the others


def run_embed(options: EmbedOptions) -> int:
    out = options.out
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out}: embeddings are written as {' or '.join(FORMATS)}; give such a name")
    if options.batch < 0:
        raise ConfigError(f"--batch {options.batch} must be at least 1")
    with joined(options.device, timeout_s=PATIENCE_S) as world:
        if world.is_main:
            check_writable(out)
            if options.download:
                open_data(options.data, download=True)
        world.barrier()
        collection = open_data(options.data)
        splits = select_splits(collection, options.split)
        about = load_subject(options.weights, world.device, image_size=options.image_size)
        about.computing_in(options.precision)
        origin = {
            "name": options.weights,
            "network": about.facts["network"],
            "source": collection.name,
            "made_by": "vitrail embed",
        }
        if world.is_main:
            image = format_size(about.preprocessing.image)
            count = sum(map(len, splits.values()))
            print(describe_weights(options.weights, about.facts, f"{image} px", options.precision))
            print(f"{collection.title}: {count:,} images of {', '.join(splits)}", flush=True)
        kept = on_interrupt("the parts that are done are kept; the same command resumes")
        with bars() as bar, kept if world.is_main else contextlib.nullcontext():
            if world.is_main:
                bar("pictures", 0, sum(map(len, splits.values())))
            tell = (
                (lambda done, total: bar("pictures", done * world.size, total * world.size)) if world.is_main else None
            )
            done = embed(
                about.network,
                splits,
                out,
                preprocessing=about.preprocessing,
                world=world,
                dtype=options.type,
                precision=options.precision,
                batch=options.batch or (256 if world.device.type == "cuda" else 64),
                workers=options.workers if options.workers >= 0 else shared_workers(world),
                origin=origin,
                force=options.force,
                tell=tell,
            )
        if world.is_main:
            show_embedded(done, options.type)
    return 1 if done.unreadable and not done.pictures else 0


def shared_workers(world: World) -> int:
    """The loader processes of this process: the machine's, shared out."""
    return max(choose_workers() // world.local_size, min(1, (os.cpu_count() or 1) - 1))


def select_splits(collection: Collection, split: str | None) -> dict[str, ImageDataset]:
    if split is None:
        return dict(collection.splits)
    chosen = collection.split(split)
    return {name: source for name, source in collection.splits.items() if source is chosen}


def show_embedded(done: EmbeddingSummary, kind: str) -> None:
    if done.found == done.parts:
        print("all of it was there already, of the same weights, images and settings")
    elif done.found:
        print(f"went on: {done.found:,} of {done.parts:,} parts were there from an earlier start")
    if done.unreadable:
        some = ", ".join(str(one) for one in done.first[:NAMED]) + (", ..." if done.unreadable > NAMED else "")
        verb = "is" if done.unreadable == 1 else "are"
        print(f"note: {done.unreadable:,} could not be read and {verb} out, see {done.path}.unreadable.txt: {some}")
    size = size_of(done.path)
    print(f"embeddings: {done.path} ({size}): {done.pictures:,} rows of {done.width:,} {kind} features")
