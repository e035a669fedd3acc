"""Every public file of every weight family, as names and shapes: what the hub holds, on the meta device.

No hub is asked: timm's networks of the same names say which tensors its files hold, and
transformers' those of the others.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vitrail.checkpoint.find_weights import known_settings, trained_numerics
from vitrail.checkpoint.formats.key_table import TensorShapes, export_tensors
from vitrail.checkpoint.formats.registry import find_format, recognise
from vitrail.checkpoint.known_weights import PUBLIC, PublicWeights
from vitrail.models.build import tensor_shapes
from vitrail.models.families import WEIGHT_FAMILIES
from vitrail.models.zoo import adapt_config

PUBLISHED = [name for name, family in WEIGHT_FAMILIES.items() if family.weights]


def distinct(family: str) -> Iterator[PublicWeights]:
    """The files of a family, one of each network with a head and without, with all numerics. Others differ from one of
    these by the image size or the number of classes, and their counts are held against the table elsewhere."""
    seen: dict[tuple[str, bool, str], PublicWeights] = {}
    for entry in PUBLIC:
        if entry.family == family:
            seen.setdefault((entry.network, entry.classes > 0, str(entry.numerics)), entry)
    return iter(seen.values())


def timm_tensors(entry: PublicWeights) -> dict[str, Tensor]:
    """The tensors of timm's network with the head that its weights have."""
    import timm

    with torch.device("meta"):
        return timm.create_model(entry.timm, pretrained=False).state_dict()


def our_tensors(entry: PublicWeights) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in tensor_shapes(entry.config).items()}


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def transformers_tensors(entry: PublicWeights) -> dict[str, Tensor]:
    """The tensors of transformers' network, whose class the table's config.json names."""
    import transformers

    settings = dict(known_settings(entry) or {})
    kind = settings.pop("architectures")[0]
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        return getattr(transformers, kind)(config).state_dict()


@pytest.mark.slow
def test_files_of_transformers_are_read_without_their_config() -> None:
    pytest.importorskip("transformers")
    others = [entry for entry in PUBLIC if not entry.repo.startswith("timm/")]
    assert {entry.family for entry in others} == {"I-JEPA"}
    for entry in others:
        path, facts, settings = Path(entry.name), trained_numerics(entry), known_settings(entry)
        known, tensors = recognise(path, transformers_tensors(entry), settings)
        config = known.infer(TensorShapes(path=path, tensors=tensors, settings=settings, facts=facts))
        assert adapt_config(config, **facts) == entry.config, entry.name


@pytest.mark.slow
@pytest.mark.parametrize("family", PUBLISHED)
def test_published_files(family: str) -> None:
    """They hold what our network of the table writes for timm; and read without a config.json, with what the table says
    of them, they are that network."""
    pytest.importorskip("timm")
    for entry in distinct(family):
        theirs, ours = timm_tensors(entry), our_tensors(entry)
        assert sum(tensor.numel() for tensor in ours.values()) == entry.parameters, entry.name
        table = find_format("timm", entry.config).table(entry.config)
        assert shapes_of(export_tensors(table, ours)) == shapes_of(theirs), entry.name
        path, facts = Path(entry.name), trained_numerics(entry)
        known, tensors = recognise(path, theirs)
        config = known.infer(TensorShapes(path=path, tensors=tensors, facts=facts))
        assert adapt_config(config, **facts) == entry.config, entry.name
