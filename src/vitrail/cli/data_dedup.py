"""What `vitrail data dedup` does."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options.data_dedup import DedupOptions
from vitrail.cli.progress import bars, on_interrupt
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from vitrail.data.dataset import ImageDataset
    from vitrail.data.dedup.match import Embed


def run_dedup(options: DedupOptions) -> int:
    from vitrail.data.dedup.deduplicate import Job, find
    from vitrail.data.dedup.match import Method
    from vitrail.data.dedup.pairs_page import write_page
    from vitrail.data.dedup.record import COLUMNS
    from vitrail.data.tools.overview import cores

    if not (options.against or options.within):
        raise ConfigError("nothing to compare with; name test sets behind --against, or ask for --within")
    called, train = open_split(options.train, ("train",), options.download)
    tests: dict[str, ImageDataset] = {}
    for text in options.against:
        name, source = open_split(text, ("test", "val"), options.download)
        name = text if name in tests else name  # two folders of one name are told apart by their paths
        if name in tests:
            raise ConfigError(f"--against names {name} twice")
        tests[name] = source
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    workers = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if options.workers is None else options.workers
    embedding = identify_weights(options.embed) if options.embed else ""
    with bars() as bar, on_interrupt(f"what was read is kept in {options.out}; the same command resumes"):
        job = Job(
            train=train,
            tests=tests,
            out=Path(options.out),
            called=called,
            method=Method(near=not options.exact, cosine=options.cosine, embedding=embedding),
            embed=make_embedder(options.embed) if options.embed else None,
            within=options.within,
            workers=workers if workers > 1 else 0,  # one process is this one
            rank=rank,
            world=world,
            progress=bar,
        )
        outcome = find(job)
    if rank == 0:
        write_page(job, outcome, job.out / "pairs.html")
        print_table(COLUMNS, outcome.record.rows(), left=2)
        said = f"{outcome.record.dropped:,} of {outcome.record.pictures:,} images of {called} are to be left out"
        print(f"{said}: {job.out / 'drop.json'}; the pairs: {job.out / 'pairs.html'}")
        if outcome.record.dropped:
            print(f"To train without them: --set data.without={job.out / 'drop.json'}")
            print(f"To score without them: vitrail evaluate ... --without {job.out / 'drop.json'}")
    return 0


def identify_weights(weights: str) -> str:
    """What names the embeddings of a weight file: another file, another name."""
    from hashlib import file_digest

    try:
        with open(weights, "rb") as file:
            return f"{Path(weights).name} {file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        raise DataError(f"{weights}: {error.strerror}; --embed takes a file of weights") from None


def make_embedder(weights: str) -> "Embed":
    """From images to what a network makes of them before its classifier, on an accelerator where there is one."""
    import torch

    from vitrail.checkpoint.import_weights import read_bundle
    from vitrail.checkpoint.weights import network
    from vitrail.distributed.process_group import find_device

    bundle = read_bundle(weights)
    device = find_device("auto")
    model, preprocessing = network(bundle).to(device), bundle.card.preprocessing

    def embed(pictures: "list[Image]") -> "NDArray[np.float32]":
        pixels = torch.stack([preprocessing.pixels(picture) for picture in pictures]).to(device)
        with torch.inference_mode():
            tokens = model.forward_features(preprocessing.normalise(pixels))
            return model.forward_head(tokens, pre_logits=True).float().cpu().numpy()

    return embed


def open_split(text: str, splits: tuple[str, ...], download: bool) -> "tuple[str, ImageDataset]":
    """The split that a text names, else the first of the usual ones, else the only one."""
    from vitrail.cli.opening import open_data

    collection = open_data(text, download=download)
    there = collection.splits
    name = next((split for split in splits if split in there), None)
    if name is None and len(there) > 1:
        raise DataError(
            f"{text} has no {' or '.join(splits)}; say which split: {', '.join(f'{text}@{s}' for s in there)}"
        )
    name = next(iter(there)) if name is None or len(there) == 1 else name
    return f"{collection.title}@{name}", there[name]
