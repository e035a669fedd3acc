"""Find pictures of test sets in a training set: exact copies, near ones by perceptual hash, and with --embed those
that a network finds alike.

Prints a table and writes into the output folder: pairs.csv, a page that shows the pairs side by side (pairs.html), what
was compared and how (dedup.json), and a selection that leaves the copies out of training (drop.json). Under torchrun
the work is shared between the processes."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.progress import bars
from vitrail.core.console import print_table
from vitrail.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from vitrail.data.dedup.embedding import Embed
    from vitrail.data.source import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("train", help="the training set, as for `vitrail data`; without @SPLIT its train")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="TEST", help="test sets; without @SPLIT their test, else val"
    )
    parser.add_argument("--within", action="store_true", help="compare the training set with itself, too")
    parser.add_argument("--exact", action="store_true", help="only the same pixels: for drawn sets that all look alike")
    parser.add_argument("--embed", metavar="WEIGHTS", help="also compare the representations of this network")
    parser.add_argument("--cosine", type=float, default=0.95, help="from which these are the same (default: 0.95)")
    parser.add_argument("--out", default="dedup", metavar="DIR", help="the folder to write (default: dedup)")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--download", action="store_true", help="fetch the files of a named set that are missing")


def run(args: argparse.Namespace) -> int:
    from vitrail.data.dedup.find import Job, find
    from vitrail.data.dedup.record import COLUMNS
    from vitrail.data.dedup.search import Method
    from vitrail.data.dedup.show import write_page
    from vitrail.data.overview.survey import cores

    if not (args.against or args.within):
        raise ConfigError("nothing to compare with; name test sets behind --against, or ask for --within")
    called, train = chosen(args.train, ("train",), args.download)
    tests: dict[str, Source] = {}
    for text in args.against:
        name, source = chosen(text, ("test", "val"), args.download)
        name = text if name in tests else name  # two folders of one name are told apart by their paths
        if name in tests:
            raise ConfigError(f"--against names {name} twice")
        tests[name] = source
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    workers = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if args.workers is None else args.workers
    embedding = identity(args.embed) if args.embed else ""
    with bars() as bar:
        job = Job(
            train=train,
            tests=tests,
            out=Path(args.out),
            called=called,
            method=Method(near=not args.exact, cosine=args.cosine, embedding=embedding),
            embed=embedder(args.embed) if args.embed else None,
            within=args.within,
            workers=workers if workers > 1 else 0,  # one process is this one
            rank=rank,
            world=world,
            progress=bar,
        )
        outcome = find(job)
    if rank == 0:
        write_page(job, outcome, job.out / "pairs.html")
        print_table(COLUMNS, outcome.record.rows(), left=2)
        said = f"{outcome.record.dropped:,} of {outcome.record.pictures:,} pictures of {called} are to be left out"
        print(f"{said}: {job.out / 'drop.json'}; the pairs: {job.out / 'pairs.html'}")
        if outcome.record.dropped:
            print(f"To train without them: --set data.without={job.out / 'drop.json'}")
    return 0


def identity(weights: str) -> str:
    """What names the embeddings of a weight file: another file, another name."""
    from hashlib import file_digest

    try:
        with open(weights, "rb") as file:
            return f"{Path(weights).name} {file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        raise DataError(f"{weights}: {error.strerror}; --embed takes a file of weights") from None


def embedder(weights: str) -> "Embed":
    """From pictures to what a network makes of them before its classifier, on an accelerator where there is one."""
    import torch

    from vitrail.checkpoint.source import read_bundle
    from vitrail.checkpoint.weights import network

    bundle = read_bundle(weights)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, preprocessing = network(bundle).to(device), bundle.card.preprocessing

    def embed(pictures: "list[Image]") -> "NDArray[np.float32]":
        pixels = torch.stack([preprocessing.pixels(picture) for picture in pictures]).to(device)
        with torch.inference_mode():
            tokens = model.forward_features(preprocessing.normalise(pixels))
            return model.forward_head(tokens, pre_logits=True).float().cpu().numpy()

    return embed


def chosen(text: str, splits: tuple[str, ...], download: bool) -> "tuple[str, Source]":
    """The split that a text names, else the first of the usual ones, else the only one."""
    from vitrail.data.collection import open_collection

    with bars(bytes_=True) as bar:
        collection = open_collection(text, download=download, progress=bar)
    there = collection.splits
    name = next((split for split in splits if split in there), None)
    if name is None and len(there) > 1:
        raise DataError(
            f"{text} has no {' or '.join(splits)}; say which split: {', '.join(f'{text}@{s}' for s in there)}"
        )
    name = next(iter(there)) if name is None or len(there) == 1 else name
    return f"{collection.title}@{name}", there[name]
