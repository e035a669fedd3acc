"""torch.export: a graph that torch alone can load."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.export.test_onnx_file import bundle
from tests.models.tiny import BACKBONE, HYBRID, RESNET, VARIANTS
from tests.models.tiny import VIT as TINY
from vitrail.checkpoint.bundle import parse_description
from vitrail.core.errors import ConfigError
from vitrail.export import to_torch_export
from vitrail.export import torch_export as program
from vitrail.export.exportable import make_reference
from vitrail.export.torch_export import silence_exporter


@pytest.mark.slow
def test_a_program_is_loaded_again_and_computes_the_same(tmp_path: Path) -> None:
    done = to_torch_export(bundle(TINY), tmp_path / "m.pt2")
    assert done.report.worst < 1e-4
    assert [(case.image, case.batch) for case in done.report.cases][3:] == [
        ((10, 15), 1),
        ((10, 15), 3),
        ((10, 15), 16),
    ]
    extra = {"vitrail.json": ""}
    with silence_exporter():
        loaded = torch.export.load(done.target, extra_files=extra).module()
    images = torch.randn(4, 3, 8, 9)
    assert torch.allclose(loaded(images), make_reference(bundle(TINY), (8, 9))(images), atol=1e-4)
    about = json.loads(extra["vitrail.json"])
    assert parse_description(about) == (TINY, bundle(TINY).card)
    with zipfile.ZipFile(done.target) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    for word in (b"site-packages", str(Path(program.__file__).parents[2]).encode()):
        assert not [name for name, content in held.items() if word in content], word
    shown = 4 * 2 * 3 * 4 * 9  # bytes of the images that it was traced with
    assert max(len(content) for name, content in held.items() if "sample" in name) < shown


def test_a_wrong_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.pt2"):
        to_torch_export(bundle(TINY), tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        RESNET,
        replace(RESNET, image=(24, 32)),
        replace(HYBRID, image=(16, 24), backbone=replace(BACKBONE, image=(16, 24))),
        VARIANTS["relative with registers"],
        VARIANTS["axial resnet"],
        VARIANTS["no head"],
    ],
    ids=["bit", "bit at multiples", "hybrid", "relative", "axial resnet", "no head"],
)
def test_other_networks(config, tmp_path: Path) -> None:
    done = to_torch_export(bundle(config), tmp_path / "m.pt2")
    assert done.report.worst < 1e-4
    assert len({case.image for case in done.report.cases}) == (1 if done.notes else 2)
    fixed = to_torch_export(bundle(config), tmp_path / "m.pt2", fixed_size=True)
    assert fixed.replaced
    assert fixed.notes
