"""Trained weights and real images: DeiT-Ti through every format, with the accuracy that it should have."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.networks import assert_same
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.weights import load
from vitrail.data.class_names import read_class_names
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

DATA = Path(__file__).parents[2].parent / "shared" / "data"
WEIGHTS = DATA / "deit_tiny_patch16_224.safetensors"
PICTURES = DATA / "imagenet_val_1000.tar"
pytestmark = pytest.mark.skipif(
    not WEIGHTS.is_file(), reason=f"no trained weights: {WEIGHTS.name} is not next to the checkout"
)


def test_it_is_read_by_its_timm_names() -> None:
    model = load(WEIGHTS)
    config = model.config
    assert (config.width, config.depth, config.heads, config.mlp_width) == (192, 12, 3, 768)
    assert (config.image, config.patch, config.classes) == ((224, 224), (16, 16), 1000)
    assert (config.gelu, config.norm_eps, config.head, config.pool) == ("erf", 1e-6, "linear", "token")
    assert sum(parameter.numel() for parameter in model.parameters()) == 5_717_416
    assert {tensor.dtype for tensor in read_bundle(WEIGHTS).tensors.values()} == {torch.float16}
    assert model.card.labels == read_class_names("imagenet")
    assert model.card.preprocessing == Preprocessing(
        image=(224, 224), resize=256, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD
    )


@pytest.mark.slow
def test_it_goes_through_every_format_and_comes_back_as_it_was(tmp_path: Path) -> None:
    """One after the other, so that a loss anywhere would show at the end."""
    steps = [
        ("deit.npz", None),
        ("huggingface", None),
        ("torchvision.pth", "torchvision"),
        ("folder", "timm"),
        ("ours.safetensors", None),
        ("timm.safetensors", "timm"),
    ]
    wanted, source = read_bundle(WEIGHTS), WEIGHTS
    for name, form in steps:
        done = convert(source, tmp_path / name, form)
        assert done.parity.identical == done.parity.tensors == len(wanted.tensors)
        assert done.parity.worst < 1e-5
        source = done.target
        back = read_bundle(source)
        assert (back.config, back.card.preprocessing) == (wanted.config, wanted.card.preprocessing)
        assert_same(back.tensors, wanted.tensors)
    assert_same(load_file(source), load_file(WEIGHTS))


def samples() -> Iterator[tuple[str, Image.Image, int]]:
    """Name, image and class of every sample; a sample's members follow each other."""
    with tarfile.open(PICTURES) as archive:
        found: dict[str, bytes] = {}
        for member in archive:
            stem, _, suffix = member.name.rpartition(".")
            content = archive.extractfile(member)
            assert content is not None
            found[suffix] = content.read()
            if {"webp", "cls"} <= set(found):
                yield stem, Image.open(io.BytesIO(found["webp"])), int(found["cls"])
                found = {}


@pytest.mark.slow
@pytest.mark.skipif(not PICTURES.is_file(), reason=f"no images: {PICTURES.name} is not next to the checkout")
def test_accuracy_on_a_thousand_pictures() -> None:
    model = load(WEIGHTS)
    real = json.loads((DATA / "real.json").read_text("utf-8"))
    names, pixels, classes = list[str](), list[Tensor](), list[int]()
    for name, picture, label in samples():
        names.append(name)
        pixels.append(model.card.preprocessing(picture))
        classes.append(label)
    assert len(names) == 1000
    with torch.inference_mode():
        logits = torch.cat([model(torch.stack(pixels[i : i + 50])) for i in range(0, 1000, 50)])
    top = logits.topk(5).indices.tolist()
    labels = [real[int(name.rsplit("_", 1)[1]) - 1] for name in names]
    judged = [(first[0], allowed) for first, allowed in zip(top, labels, strict=True) if allowed]
    assert sum(first[0] == label for first, label in zip(top, classes, strict=True)) == 701
    assert sum(label in five for five, label in zip(top, classes, strict=True)) == 907
    assert len(judged) == 946
    assert sum(first in allowed for first, allowed in judged) == 765  # 80.87 %
