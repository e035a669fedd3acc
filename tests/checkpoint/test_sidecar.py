"""What a foreign format cannot hold lies next to the weights, belongs to them alone, and brings everything back."""

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lanes import rest_slow
from tests.models.tiny import RESNET, VIT, awake
from vitrail.checkpoint.bundle import Bundle, Card, read_sidecar, sidecar_path, write_sidecar
from vitrail.checkpoint.convert import Conversion, export
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.key_table import Tensors
from vitrail.checkpoint.formats.registry import FORMATS
from vitrail.checkpoint.weights import load, to_bundle
from vitrail.core.errors import CorruptWeights, WeightsError
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import hybrid_backbone

# Of a published shape, so that a state dict says its heads, and with each format's own habits filled in below.
PLAIN = ViTConfig(width=192, depth=1, mlp_width=768, heads=3, image=(32, 32), classes=5, gelu="erf")
BIT = ResNetConfig(blocks=(1, 1), classes=5, standardisation_eps=1e-8)
HYBRID = replace(PLAIN, patch=(1, 1), backbone=hybrid_backbone((1, 1), (32, 32)))
TARGETS = {
    "timm": "out.safetensors",
    "torchvision": "out.pth",
    "huggingface": "out",
    "npz": "out.npz",
    "npz-bit": "out.npz",
    "npz-linen": "out.npz",
}


@cache
def tensors(config: ModelConfig) -> Tensors:
    torch.manual_seed(0)
    return to_bundle(awake(config, torch.float32)).tensors


def bundle(config: ModelConfig, form: str, **card: Any) -> Bundle:
    """A network whose card says what the format takes for granted, but for what is given."""
    habit = FORMATS[form].preprocessing(config)
    return Bundle(config=config, tensors=tensors(config), card=Card(**{"preprocessing": habit, **card}))


def written(made: Bundle, form: str, folder: Path, name: str | None = None) -> Conversion:
    return export(made, folder / (name or TARGETS[form]), form, unofficial=True)


def habits(form: str, **changes: Any) -> ViTConfig:
    """A ViT with the numerics that reading a file of this format assumes."""
    gelu = "tanh" if form.startswith("npz") else "erf"
    return replace(PLAIN, **{"gelu": gelu, "norm_eps": 1e-6, **changes})


@pytest.mark.parametrize("form", ["timm", "torchvision", "huggingface", "npz", "npz-linen"])
def test_a_plain_vit_needs_none(form: str, tmp_path: Path) -> None:
    done = written(bundle(habits(form), form), form, tmp_path)
    assert (done.sidecar, done.lost_fields) == (None, [])
    assert not list(tmp_path.rglob("*.vitrail.json"))
    assert read_bundle(done.target).config == habits(form)


OTHER_GELU = {"timm": "tanh", "torchvision": "tanh", "npz": "erf", "npz-linen": "erf"}
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    *((form, {"gelu": gelu}, ["gelu"]) for form, gelu in OTHER_GELU.items()),
    *((form, {"norm_eps": 1e-5}, ["norm_eps"]) for form in OTHER_GELU),
    *((form, {"dropout": 0.1}, ["dropout"]) for form in OTHER_GELU),
    *((form, {"position_prefix": False}, ["position_prefix"]) for form in ("torchvision", "huggingface", "npz")),
    *((form, {"image": (32, 48)}, ["image"]) for form in ("timm", "npz")),
    ("timm", {"heads": 6}, ["heads"]),
    ("torchvision", {"heads": 6}, ["heads"]),
    ("timm", {"pool": "mean"}, ["pool"]),
    ("npz", {"pool": "mean"}, ["pool"]),
    ("timm", {"attention_dropout": 0.1, "stochastic_depth": 0.2}, ["attention_dropout", "stochastic_depth"]),
    ("huggingface", {"stochastic_depth": 0.2}, ["stochastic_depth"]),
    ("huggingface", {"gelu": "tanh", "norm_eps": 1e-5, "dropout": 0.1, "attention_dropout": 0.2, "heads": 6}, []),
    ("huggingface", {"image": (32, 48), "patch": (16, 8), "channels": 1}, []),
    # What cannot even be read without being told is named for what it is, next to the rest.
    ("timm", {"width": 48, "heads": 2}, ["heads"]),
    ("torchvision", {"width": 48, "heads": 2, "gelu": "tanh"}, ["heads", "gelu"]),
    ("timm", {"image": (32, 48), "gelu": "tanh"}, ["image", "gelu"]),
    ("npz", {"image": (32, 48), "pool": "mean"}, ["image", "pool"]),
]


@pytest.mark.parametrize(("form", "changes", "unheld"), rest_slow(CASES, 0, 5, 10, 15, 20, 28), ids=str)
def test_fields_of_a_vit(form: str, changes: dict[str, Any], unheld: list[str], tmp_path: Path) -> None:
    config = habits(form, **changes)
    done = written(bundle(config, form), form, tmp_path)
    assert sorted(done.lost_fields) == sorted(unheld)
    assert (done.sidecar is not None) == bool(unheld)
    back = read_bundle(done.target)
    assert back.config == config
    assert (done.parity.identical, done.parity.tensors) == (len(back.tensors), len(back.tensors))


@pytest.mark.parametrize(
    ("form", "changes", "unheld"),
    rest_slow(
        [
            ("timm", {}, []),
            ("huggingface", {}, []),
            ("npz-bit", {"standardisation_eps": 1e-10}, []),
            ("timm", {"standardisation_eps": 1e-10}, ["standardisation_eps"]),
            ("huggingface", {"standardisation_eps": 1e-10}, ["standardisation_eps"]),
            (
                "npz-bit",
                {"standardisation_eps": 1e-8, "pool_padding": "infinity"},
                ["standardisation_eps", "pool_padding"],
            ),
            ("timm", {"image": (64, 48)}, ["image"]),
            ("huggingface", {"norm_eps": 1e-6}, ["norm_eps"]),
            ("timm", {"padding": "same"}, ["padding"]),
        ],
        0,
        3,
        8,
    ),
    ids=str,
)
def test_fields_of_a_bit(form: str, changes: dict[str, Any], unheld: list[str], tmp_path: Path) -> None:
    config = replace(BIT, **changes)
    habit = FORMATS[form].preprocessing(BIT)
    done = written(bundle(config, form, preprocessing=habit), form, tmp_path)
    assert sorted(done.lost_fields) == sorted(unheld)
    assert read_bundle(done.target).config == config


def test_the_numerics_of_a_google_hybrid_in_timms_names(tmp_path: Path) -> None:
    done = written(bundle(HYBRID, "timm"), "timm", tmp_path)
    assert done.lost_fields == ["backbone"]
    back = read_bundle(done.target).config
    assert back == HYBRID
    assert (back.backbone.standardisation, back.backbone.norm_eps) == ("std+eps", 1e-6)
    sidecar_path(done.target).unlink()
    assert read_bundle(done.target).config.backbone.standardisation == "sqrt(var+eps)"


CARDS: dict[str, Preprocessing] = {
    "half, straight": Preprocessing(image=(32, 32)),
    "tensorflow": Preprocessing(image=(32, 32), antialias=False),
    "half, crop": Preprocessing(image=(32, 32), resize=40, interpolation="bicubic"),
    "imagenet": Preprocessing(image=(32, 32), resize=37, interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD),
    "own": Preprocessing(image=(32, 32), resize=33, mean=(0.1, 0.2, 0.3), std=HALF),
}


NAMES = ("ant", "bee", "cat", "dog", "LABEL_0")


@pytest.mark.parametrize("form", rest_slow(["timm", "torchvision", "huggingface", "npz"], "timm", "huggingface"))
@pytest.mark.parametrize("which", CARDS)
@pytest.mark.parametrize(
    "labels", rest_slow([None, ("ant", "bee", "cat", "dog", "LABEL_0")], 1), ids=["nameless", "named"]
)
def test_cards(form: str, which: str, labels: tuple[str, ...] | None, tmp_path: Path) -> None:
    habit = {"timm": "imagenet", "torchvision": "imagenet", "npz": "tensorflow"}.get(form)
    made = bundle(habits(form), form, preprocessing=CARDS[which], labels=labels, provenance={"run": 7})
    done = written(made, form, tmp_path)
    holds = form == "huggingface"
    sharp = which == "tensorflow"  # Pillow's resize antialiases
    assert ("preprocessing" in done.lost_fields) == ((not holds or sharp) and which != habit)
    assert ("labels" in done.lost_fields) == (not holds and labels is not None)
    card = read_bundle(done.target).card
    assert (card.preprocessing, card.labels) == (CARDS[which], labels)


@pytest.mark.parametrize("which", CARDS)
def test_a_timm_folder_holds_its_card(which: str, tmp_path: Path) -> None:
    made = bundle(PLAIN, "timm", preprocessing=CARDS[which], labels=("a", "b", "c", "d", "e"))
    done = written(made, "timm", tmp_path, "folder")
    assert done.lost_fields == (["preprocessing"] if which == "tensorflow" else [])
    assert read_bundle(done.target).card.preprocessing == CARDS[which]
    assert read_bundle(done.target).card.labels == ("a", "b", "c", "d", "e")


def test_where_the_weights_came_from_is_told_in_full(tmp_path: Path) -> None:
    done = written(bundle(replace(PLAIN, dropout=0.1), "timm", provenance={"run": 7}), "timm", tmp_path)
    card = load(done.target).card
    assert card.provenance == {"imported_from": "timm", "file": "out.safetensors", "run": 7}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Weights and their sidecar."""
    done = written(bundle(replace(PLAIN, gelu="tanh"), "timm"), "timm", tmp_path)
    assert done.sidecar == tmp_path / "out.safetensors.vitrail.json"
    return done.target, done.sidecar


def test_a_sidecar_is_json_that_names_its_weights_and_its_reason(pair: tuple[Path, Path]) -> None:
    weights, beside = pair
    data = json.loads(beside.read_text("utf-8"))
    assert (data["format"], data["unheld"]) == (1, ["gelu"])
    assert data["weights"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert (data["config"]["family"], data["config"]["gelu"], data["labels"]) == ("vit", "tanh", None)


def test_without_its_sidecar_a_file_is_read_by_the_formats_habits(pair: tuple[Path, Path]) -> None:
    weights, beside = pair
    assert load(weights).config.gelu == "tanh"
    beside.unlink()
    assert load(weights).config.gelu == "erf"
    assert read_sidecar(weights) is None


def test_facts_are_stronger_than_a_sidecar(pair: tuple[Path, Path]) -> None:
    assert load(pair[0], gelu="erf", dropout=0.3).config == replace(PLAIN, dropout=0.3)


def test_a_sidecar_of_other_weights_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    weights, beside = pair
    other = written(bundle(PLAIN, "timm", labels=("a", "b", "c", "d", "e")), "timm", tmp_path, "other.safetensors")
    weights.write_bytes(other.target.read_bytes()[:-4] + b"\1\1\1\1")
    with pytest.raises(CorruptWeights) as caught:
        load(weights)
    assert str(caught.value).startswith(f"{beside}: belongs to another version of out.safetensors")
    assert "remove it or restore the weights" in str(caught.value)
    beside.unlink()
    assert load(weights).config == PLAIN


def test_one_flipped_bit_makes_a_sidecar_stale(pair: tuple[Path, Path]) -> None:
    content = bytearray(pair[0].read_bytes())
    content[-4] ^= 1
    pair[0].write_bytes(content)
    with pytest.raises(CorruptWeights, match="belongs to another version"):
        load(pair[0])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"[1]", "expected a JSON object"),
        (b"{}", "belongs to another version"),
    ],
    ids=["empty", "cut", "no text", "nested", "a list", "bare"],
)
def test_a_sidecar_that_is_none(content: bytes, complaint: str, pair: tuple[Path, Path]) -> None:
    pair[1].write_bytes(content)
    with pytest.raises(CorruptWeights, match=complaint) as caught:
        load(pair[0])
    assert str(caught.value).startswith(f"{pair[1]}: ")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"config": None}, "incomplete description"),
        ({"config": {"family": "vit"}}, "incomplete model config"),
        ({"labels": ["one"]}, "1 labels for 5 classes"),
        ({"preprocessing": {"image": [32, 32]}}, "incomplete preprocessing"),
        ({"format": 2}, "newer vitrail"),
    ],
    ids=str,
)
def test_a_sidecar_that_says_too_little_or_too_much(
    change: dict[str, Any], complaint: str, pair: tuple[Path, Path]
) -> None:
    pair[1].write_text(json.dumps(json.loads(pair[1].read_text("utf-8")) | change), "utf-8")
    with pytest.raises(WeightsError, match=complaint) as caught:
        load(pair[0])
    assert str(caught.value).startswith(f"{pair[1]}: ")


def test_a_sidecar_that_contradicts_its_tensors(pair: tuple[Path, Path]) -> None:
    data = json.loads(pair[1].read_text("utf-8"))
    data["config"]["mlp_width"] = 700
    pair[1].write_text(json.dumps(data), "utf-8")
    with pytest.raises(
        WeightsError, match=r"tensor 'blocks\.0\.mlp\.fc1\.weight' has shape \[768, 192\], expected \[700"
    ):
        load(pair[0])


def test_a_sidecar_that_is_no_longer_needed_goes(pair: tuple[Path, Path]) -> None:
    weights, beside = pair
    done = export(bundle(PLAIN, "timm"), weights, "timm")
    assert done.sidecar is None
    assert not beside.exists()
    assert load(weights).config == PLAIN


def test_in_a_folder_it_lies_beside_the_tensors(tmp_path: Path) -> None:
    done = written(bundle(replace(PLAIN, stochastic_depth=0.5), "huggingface"), "huggingface", tmp_path)
    assert done.sidecar == tmp_path / "out" / "model.safetensors.vitrail.json"
    assert load(done.target).config.stochastic_depth == 0.5


def test_written_and_read_by_hand(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"anything")
    card = Card(
        preprocessing=Preprocessing(image=(6, 12)), labels=("é", "\n", '"', "", "x"), provenance={"a": [1, None]}
    )
    for config in (VIT, RESNET, HYBRID):
        assert write_sidecar(weights, config, card, ["gelu"]) == sidecar_path(weights)
        assert read_sidecar(weights) == (config, card)
