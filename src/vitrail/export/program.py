"""torch.export: the network as one graph of torch's operations (.pt2), for whoever has torch and not vitrail."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from vitrail import __version__
from vitrail.checkpoint.bundle import describe
from vitrail.checkpoint.weights import network
from vitrail.core.shapes import Pair
from vitrail.export.check import check
from vitrail.export.draft import check_target, drafted
from vitrail.export.form import shipped
from vitrail.export.subject import Weights, count_choices, path_of, references, taken
from vitrail.export.trace import hushed, traced
from vitrail.export.written import Written, files_of
from vitrail.models.family import ImageSizes

SUFFIX: Final = (".pt2",)
DESCRIPTION: Final = "vitrail.json"  # in the archive: config, preprocessing, labels, provenance and version


def to_torch_export(
    weights: Weights, target: str | Path, *, fixed_size: bool = False, image_size: int | Pair | None = None
) -> Written:
    """Writes an ExportedProgram with an open batch and, where the network allows it, open image sizes; loads it again
    and runs it beside the network before the file gets its name."""
    target = Path(target)
    check_target(target, suffixes=SUFFIX, source=path_of(weights))
    bundle = taken(weights, image_size, exact=True)
    config = bundle.config
    open_sizes = ImageSizes(step=None, why="a fixed size was asked for") if fixed_size else config.open_sizes
    open_sizes = replace(open_sizes, any=False)  # torch holds to the multiples that it was traced with
    if open_sizes.step is not None and any(
        side % step for side, step in zip(config.image, open_sizes.step, strict=True)
    ):
        open_sizes = ImageSizes(step=None, why=f"{config.image} is not a multiple of the stride {open_sizes.step[0]}")
    replaced = target.exists()
    with drafted(target) as draft:
        form = shipped(network(bundle), dynamic=open_sizes.step is not None)
        program = traced(form, config.image, config.channels, open_sizes)
        about = json.dumps({"vitrail": __version__, **describe(config, bundle.card.abridged())})
        with hushed():
            torch.export.save(program, draft, extra_files={DESCRIPTION: about})
            loaded: Any = torch.export.load(draft).module()
        report = check(
            references(bundle, open_sizes),
            loaded,
            subject=target.name,
            against=f"torch {torch.__version__}",
            channels=config.channels,
            classes=count_choices(bundle),
        )
    return Written(
        target=target,
        to="torch-export",
        files=files_of(target),
        report=report,
        use=f'torch.export.load("{target}").module()(images)',
        notes=tuple(f"one image size only: {open_sizes.why}" for _ in range(open_sizes.step is None)),
        replaced=replaced,
    )
