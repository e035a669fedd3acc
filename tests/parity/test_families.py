"""vitrail against the libraries of its weight families: every judge is read, computed with at two sizes, and written.

Judges are tiny and hold a random value in every parameter (judges.py). A file of a family that vitrail does not read is
refused, and the refusal names that family.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.lanes import rest_slow
from tests.parity.judges import PACKAGES, Judge, judge, library_of, names
from tests.parity.networks import TOLERANCE, Tensors, assert_same
from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.key_table import export_tensors
from vitrail.checkpoint.formats.registry import FORMATS
from vitrail.checkpoint.weights import build_network
from vitrail.core.errors import MismatchedWeights

# One judge of every part that a family adds; the others are variants.
FAST = (
    "timm:deit distilled", "timm:deit3", "timm:dinov2 giant", "timm:siglip", "timm:aimv2", "timm:eva02",
    "timm:eva02 clip", "timm:eva02 enormous", "timm:pe core", "timm:dinov3 qkvb", "timm:rope mixed ape",
    "timm:beit oblong", "timm:samvit", "huggingface:dinov2 registers classifier", "huggingface:dinov3 gated",
    "huggingface:clip whole", "huggingface:siglip2 naflex", "huggingface:beit shared", "huggingface:pixio",
    "huggingface:vitdet", "huggingface:aimv2 head", "meta:dinov2", "meta:dinov3",
)  # fmt: skip
JUDGES = rest_slow(names(), *FAST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judges")


def seat(name: str) -> Judge:
    """A judge, or a skipped test where its library is not installed."""
    pytest.importorskip(PACKAGES[library_of(name)])
    return judge(name)


def write(folder: Path, tensors: Tensors, settings: dict[str, Any] | None) -> Path:
    """A folder with a config.json, or a bare file where there is none."""
    if settings is None:
        torch.save(tensors, path := folder / "weights.pth")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@cache
def imported(name: str, folder: Path, generation: str = "tensors") -> Bundle:
    theirs = judge(name)
    place = folder / name.replace(":", " ") / generation
    place.mkdir(parents=True)
    return read_bundle(write(place, getattr(theirs, generation), theirs.settings), **theirs.facts)


def plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def matches(field: str, value: Any, expected: Any, library: str) -> bool:
    """A field as expected. Of a part (rotary positions, windows) only what the judge states is compared; where scales
    of branches started is known to Hugging Face's configs alone."""
    if field == "layer_scale" and library != "huggingface":
        return bool(value) == bool(expected)
    if isinstance(expected, dict):
        found = plain(value) or {}
        return {name: found.get(name) for name in expected} == expected
    return value == expected


@pytest.mark.parametrize("name", JUDGES)
def test_the_config_is_recognised(name: str, folder: Path) -> None:
    """Also by the names of an older generation, from which the same network comes."""
    theirs = seat(name)
    bundle = imported(name, folder)
    wrong = {
        field: (value, expected)
        for field, expected in theirs.expected.items()
        if not matches(field, value := getattr(bundle.config, field), expected, theirs.library)
    }
    assert not wrong
    if theirs.older is not None:
        older = imported(name, folder, "older")
        assert older.config == bundle.config
        assert_same(older.tensors, bundle.tensors)


def stages(model: Any, images: Tensor) -> dict[str, Tensor]:
    """Our own activations under the names of a judge's."""
    found: dict[str, Tensor] = {}

    def take(stage: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _inputs, output: found.update({stage: output.clone()})

    hooks = [model.blocks[0].register_forward_pre_hook(lambda _module, inputs: found.update(stem=inputs[0].clone()))]
    hooks += [block.register_forward_hook(take(f"block {at}")) for at, block in enumerate(model.blocks)]
    with torch.no_grad():
        output = model(images)
        for hook in hooks:
            hook.remove()
        found |= {"tokens": model.forward_features(images), "output": output}
        return found if model.neck is None else found | {"neck": model.patch_map(images)}


@pytest.mark.parametrize("name", JUDGES)
def test_every_stage_agrees(name: str, folder: Path) -> None:
    """The stem, each block, all tokens behind the last norm and what comes out: at the size of the weights, and at
    another that is not square."""
    theirs = seat(name)
    bundle = imported(name, folder)
    changes: Any = {"position_resample": theirs.resample} if theirs.resample else {}
    model = build_network(replace(bundle, config=replace(bundle.config, **changes)))
    assert any(height != width for height, width in theirs.sizes) or theirs.fixed
    for size in theirs.sizes:
        images = theirs.images(size)
        reference, ours = theirs.run(images), stages(model, images)
        wanted = {"stem": reference.stem, "tokens": reference.tokens, "output": reference.output}
        wanted |= {f"block {at}": value for at, value in enumerate(reference.blocks)} | {"neck": reference.neck}
        far = {stage: distance(ours[stage], value) for stage, value in wanted.items() if value is not None}
        assert max(far.values()) < TOLERANCE, (size, {stage: f"{value:.1e}" for stage, value in far.items()})


def distance(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    assert wanted.std() > 0
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", JUDGES)
def test_tensors_come_back_bit_by_bit(name: str, folder: Path) -> None:
    theirs, bundle = seat(name), imported(name, folder)
    known = FORMATS[bundle.card.provenance["imported_from"]]
    written = known.finish(export_tensors(known.table(bundle.config), bundle.tensors), bundle.config)
    assert_same_as_published(written, theirs)


def assert_same_as_published(written: Tensors, theirs: Judge) -> None:
    """The names of one generation, and under each the same bits; without what an import leaves out."""
    both = [tensors for tensors in (written, theirs.tensors, theirs.older) if tensors is not None]
    written, *published = ({n: t for n, t in one.items() if not n.startswith(theirs.dropped)} for one in both)
    wanted = next((tensors for tensors in published if tensors.keys() == written.keys()), published[-1])
    for name, cut in theirs.parts.items():
        wanted, written = ({**tensors, name: cut(tensors[name])} for tensors in (wanted, written))
    assert_same(written, wanted)


@pytest.mark.parametrize("name", rest_slow([n for n in names() if not n.startswith("meta:")], "timm:eva02"))
def test_a_converted_folder_gives_the_same_network(name: str, folder: Path, tmp_path: Path) -> None:
    """Its config.json says all that the tensors do not, and the other library runs it: the certificate agrees."""
    theirs, bundle = seat(name), imported(name, folder)
    source = write(tmp_path / "in", theirs.tensors, theirs.settings)
    done = convert(source, tmp_path / "out", to=theirs.library)
    assert read_bundle(done.target).config == bundle.config
    assert done.parity.identical == done.parity.tensors
    assert done.parity.worst is None or done.parity.worst < TOLERANCE


STAGED: dict[str, Any] = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "embed_dim": 12}
PLAIN: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 1}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
TIMM_STRANGERS: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("swin_tiny_patch4_window7_224", STAGED),
    "swin v2": ("swinv2_tiny_window8_256", STAGED),
    "convnext": ("convnext_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 16)}),
    "mobilevit": ("mobilevit_xxs", {}),
    "maxvit": ("maxvit_rmlp_pico_rw_256", {}),
    "cait": ("cait_xxs24_224", {**PLAIN, "num_heads": 2}),
    "hiera": ("hiera_tiny_224", {"embed_dim": 8, "num_heads": 1, "stages": (1, 1, 1, 1)}),
    "relpos": ("vit_relpos_small_patch16_224", PLAIN),
    "relpos, shared": ("vit_srelpos_small_patch16_224", PLAIN),
    "hybrid of bottlenecks": ("vit_small_resnet26d_224", {**PLAIN, "img_size": 64}),
    "hybrid stem": ("vit_tiny_r_s16_p8_224", {**PLAIN, "img_size": 64}),
    "parallel": ("vit_small_patch16_18x2_224", PLAIN),
    "naflexvit": ("naflexvit_base_patch16_gap", PLAIN),
    "xcit": ("xcit_nano_12_p8_224", {"embed_dim": 16, "depth": 2, "num_heads": 2}),
    "pvt": ("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8), "num_heads": (1, 1, 1, 1)}),
    "convit": ("convit_tiny", {"embed_dim": 16, "depth": 2, "num_heads": 2}),
    "resnet": ("resnet18", {}),
}
STRANGERS: dict[str, tuple[str, dict[str, Any]]] = {
    "swin": ("Swin", {**STAGED, "depths": [1, 1], "num_heads": [1, 2], "image_size": 32}),
    "convnext": ("ConvNext", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}),
    "dinov3_convnext": ("DINOv3ConvNext", {"hidden_sizes": [8] * 4, "depths": [1] * 4}),
    "videomae": ("VideoMAE", {**SMALL, "image_size": 32, "num_frames": 2}),
    "yolos": ("Yolos", {**SMALL, "image_size": [32, 32], "num_detection_tokens": 3}),
    "radio": ("Radio", SMALL),
    "sapiens2": ("Sapiens2", SMALL),
    "tipsv2": ("Tipsv2Vision", {**SMALL, "image_size": 32, "patch_size": 8}),
}


@pytest.mark.parametrize("bare", [False, True], ids=["folder", "bare"])
@pytest.mark.parametrize("name", rest_slow(TIMM_STRANGERS, "convnext", "cait", "hiera"))
def test_a_stranger_from_timm_is_refused_by_name(name: str, bare: bool, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    architecture, args = TIMM_STRANGERS[name]
    tensors = timm.create_model(architecture, pretrained=False, **args).state_dict()
    settings = {"architecture": architecture, "num_classes": 1000, "model_args": args, "pretrained_cfg": {}}
    path = write(tmp_path, tensors, None if bare else settings)
    with pytest.raises(MismatchedWeights, match=f"(?i){name.replace(',', '').split()[0]}"):
        read_bundle(path)


@pytest.mark.parametrize("name", rest_slow(STRANGERS, "convnext", "videomae", "yolos"))
def test_a_stranger_from_transformers_is_refused_by_name(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind, settings = STRANGERS[name]
    network = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings))
    path = write(tmp_path, network.state_dict(), json.loads(network.config.to_json_string()))
    with pytest.raises(MismatchedWeights, match=f"(?i){name}"):
        read_bundle(path)
