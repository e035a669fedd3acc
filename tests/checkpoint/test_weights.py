"""`load` and `save`: what goes into a file comes out of it, and fine-tuning surgery touches what it must alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.lanes import rest_slow
from tests.models.tiny import FAMILIES, HYBRID, RESNET, SOME, VARIANTS, VIT, awake, images
from vitrail.checkpoint.bundle import Card, describe
from vitrail.checkpoint.convert import convert
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.hub_repository import from_pretrained
from vitrail.checkpoint.weights import (
    build_fresh,
    build_network,
    create_model,
    load,
    replace_head_and_resize,
    save,
    to_bundle,
)
from vitrail.core.errors import (
    ConfigError,
    CorruptWeights,
    ImageSizeError,
    MismatchedWeights,
    UnknownName,
    WeightsError,
    WeightsNotFound,
)
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.positions.embeddings import resize_position
from vitrail.models.resampling.interpolation import resize_grid
from vitrail.models.vit_config import ViTConfig

Tensors = dict[str, Tensor]
LABELS = ["ant", "bee", "cat", "dog", "eel"]
PREPARED = Preprocessing(image=(6, 12), resize=9, interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))


def network(config: ModelConfig = VIT) -> Any:
    torch.manual_seed(0)
    return awake(config, torch.float32)


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ViT on disk with a full card."""
    path = tmp_path / "model.safetensors"
    save(network(), path, preprocessing=PREPARED, labels=LABELS, provenance={"run": 7})
    return path


# A new head of a later family, and its image size.


@pytest.mark.parametrize("kind", ["linear", "patches"])
@pytest.mark.parametrize("name", rest_slow(FAMILIES, "clip", "siglip", "deit, distilled", "sam"))
def test_a_new_head_replaces_all_that_stood_behind_the_pool(name: str, kind: str) -> None:
    """And nothing is left of a projection, or of attention pooling where patches are read."""
    old = to_bundle(network(VARIANTS[name]))
    for classes in (7, 0):
        made = build_network(replace_head_and_resize(old, classes, image_size=(10, 15), kind=kind))
        out = made(torch.randn(2, 3, 10, 15))
        if not classes:
            assert out.shape == (2, made.config.features)
            continue
        assert out.shape == ((2, 7) if kind == "linear" else (2, 7, 10, 15))
        assert not out.any()
        found = {key: tensor.shape for key, tensor in made.state_dict().items()}
        assert found == {key: tensor.shape for key, tensor in build_fresh(made.config).state_dict().items()}
        body = [key for key in found if key.startswith(("blocks.", "embedding.")) and "position_bias" not in key]
        assert all(torch.equal(made.state_dict()[key], old.tensors[key]) for key in body)


# A round trip.


@pytest.mark.parametrize("variant", SOME)
def test_every_kind_of_network_comes_back(variant: str, tmp_path: Path) -> None:
    model = network(VARIANTS[variant])
    save(model, tmp_path / "model.safetensors")
    back = load(tmp_path / "model.safetensors")
    assert back.config == model.config
    assert_same(back.state_dict(), model.state_dict())
    pixels = images(model.config, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(back(pixels), model(pixels))


def test_a_file_says_everything_about_itself(file: Path) -> None:
    card = load(file).card
    assert card == Card(preprocessing=PREPARED, labels=tuple(LABELS), provenance={"run": 7})


def test_what_was_loaded_is_saved_again_without_being_told(file: Path, tmp_path: Path) -> None:
    save(load(file), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_what_is_told_replaces_what_was_loaded(file: Path, tmp_path: Path) -> None:
    other = replace(PREPARED, interpolation="bilinear")
    save(load(file), tmp_path / "again.safetensors", labels=LABELS[::-1], preprocessing=other, provenance={})
    card = load(tmp_path / "again.safetensors").card
    assert card == Card(preprocessing=other, labels=tuple(LABELS[::-1]), provenance={})


def test_a_fresh_network_expects_pixels_from_minus_one_to_one(tmp_path: Path) -> None:
    save(build_fresh(VIT), tmp_path / "model.safetensors")
    card = load(tmp_path / "model.safetensors").card
    assert card == Card(preprocessing=Preprocessing(image=VIT.image), labels=None, provenance={})


def test_a_network_without_a_card_gets_one(tmp_path: Path) -> None:
    model = network()
    assert model.card is None
    save(model, tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors").card.preprocessing == Preprocessing(image=VIT.image)


def test_where_foreign_weights_came_from_is_kept(tmp_path: Path) -> None:
    from vitrail.checkpoint.convert import convert

    save(network(), tmp_path / "a.safetensors", provenance={"run": 7})
    convert(tmp_path / "a.safetensors", tmp_path / "b.npz")
    save(load(tmp_path / "b.npz"), tmp_path / "c.safetensors")
    card = load(tmp_path / "c.safetensors").card
    assert card.provenance == {"imported_from": "npz", "file": "b.npz", "run": 7}


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda model: nn.DataParallel(compiled(model))])
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module], file: Path, tmp_path: Path) -> None:
    save(wrap(load(file)), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_a_network_in_training_is_saved_as_it_is_and_loaded_for_use(tmp_path: Path) -> None:
    model = network(replace(VIT, dropout=0.5)).train()
    model(images(VIT, dtype=torch.float32)).sum().backward()
    save(model, tmp_path / "model.safetensors")
    assert model.training
    assert model.class_token.requires_grad
    back = load(tmp_path / "model.safetensors")
    assert not any(module.training for module in back.modules())
    assert_same(back.state_dict(), model.state_dict())


def test_a_loaded_network_can_be_trained(file: Path) -> None:
    model = load(file)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    model(images(VIT, dtype=torch.float32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_only_networks_of_ours_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear is not a vitrail network"):
        save(nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("labels", [LABELS[:4], [*LABELS, "fly"], []])
def test_as_many_labels_as_classes(labels: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{len(labels)} labels for 5 classes"):
        save(network(), tmp_path / "model.safetensors", labels=labels)


@pytest.mark.parametrize("classes", [3, 0])
def test_labels_go_with_the_head_they_belonged_to(classes: int, file: Path, tmp_path: Path) -> None:
    model = load(file)
    model.reset_classifier(classes)
    save(model, tmp_path / "new.safetensors")
    back = load(tmp_path / "new.safetensors")
    assert (back.card.labels, back.config.classes) == (None, classes)
    assert back.card.preprocessing == PREPARED


# Types.


@pytest.mark.parametrize("stored", rest_slow([torch.float16, torch.bfloat16, torch.float32, torch.float64], 2))
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    model = network().to(stored)
    save(model, tmp_path / "model.safetensors")
    assert_same(read_bundle(tmp_path / "model.safetensors").tensors, model.state_dict())
    back = load(tmp_path / "model.safetensors", dtype=wanted)
    assert_same(back.state_dict(), {name: tensor.to(wanted) for name, tensor in model.state_dict().items()})
    assert back(images(VIT, dtype=wanted)).dtype == wanted


def test_float32_unless_told_otherwise(tmp_path: Path) -> None:
    save(network().to(torch.float16), tmp_path / "model.safetensors")
    assert {p.dtype for p in load(tmp_path / "model.safetensors").parameters()} == {torch.float32}


# Surgery (3.2).

NEW = {"vit": (VIT, (8, 18)), "hybrid": (HYBRID, (28, 36)), "bit": (RESNET, (28, 36))}


@pytest.mark.parametrize("family", NEW)
def test_new_classes_and_a_new_size(family: str, tmp_path: Path) -> None:
    config, size = NEW[family]
    model = network(config)
    save(model, tmp_path / "model.safetensors", labels=LABELS, provenance={"run": 7})
    new = load(tmp_path / "model.safetensors", classes=37, image_size=size)
    old, tensors = model.state_dict(), new.state_dict()
    head = [name for name in tensors if name.startswith("head.")]
    assert len(head) == 2
    assert all(len(tensors[name]) == 37 and not tensors[name].count_nonzero() for name in head)
    position = "position.tables.0.table"
    if family != "bit":
        wanted = resize_position(old[position], config.grid, new.config.grid)
        assert torch.equal(tensors[position], wanted)
        assert torch.equal(tensors[position][:, 0], old[position][:, 0])
        assert tensors[position].shape != old[position].shape
    rest = [name for name in old if name not in (*head, position)]
    assert_same({name: tensors[name] for name in rest}, {name: old[name] for name in rest})
    assert (new.config.image, new.config.classes) == (size, 37)
    assert (new.card.labels, new.card.provenance, new.card.preprocessing.image) == (None, {"run": 7}, size)
    with torch.no_grad():
        assert not new(images(new.config, dtype=torch.float32)).count_nonzero()


def test_the_whole_pretraining_head_is_thrown_away(tmp_path: Path) -> None:
    save(network(replace(VIT, head="tanh")), tmp_path / "model.safetensors")
    new = load(tmp_path / "model.safetensors", classes=3)
    assert new.config.head == "linear"
    assert [name for name in new.state_dict() if name.startswith("head.")] == [
        "head.classifier.weight",
        "head.classifier.bias",
    ]


@pytest.mark.parametrize("family", NEW)
def test_no_classes_leave_no_head(family: str, tmp_path: Path) -> None:
    config, _ = NEW[family]
    model = network(config)
    save(model, tmp_path / "model.safetensors")
    bare = load(tmp_path / "model.safetensors", classes=0)
    pixels = images(config, dtype=torch.float32)
    with torch.no_grad():
        wanted = model.forward_head(model.forward_features(pixels), pre_logits=True)
        torch.testing.assert_close(bare(pixels), wanted)
    assert not any(name.startswith("head.") for name in bare.state_dict())
    save(bare, tmp_path / "bare.safetensors")
    assert load(tmp_path / "bare.safetensors", classes=4).config.classes == 4


@pytest.mark.parametrize("numerics", ["reference", "bilinear", "bicubic"])
def test_the_numerics_of_resizing(numerics: Any, file: Path) -> None:
    old = load(file).state_dict()["position.tables.0.table"]
    new = load(file, image_size=(10, 21), numerics=numerics).state_dict()["position.tables.0.table"]
    assert torch.equal(new, resize_position(old, (3, 4), (5, 7), numerics))
    others = {"reference", "bilinear", "bicubic"} - {numerics}
    assert all(not torch.equal(new, resize_position(old, (3, 4), (5, 7), other)) for other in others)


def test_unknown_numerics(file: Path) -> None:
    with pytest.raises(UnknownName, match="unknown position numerics 'bicubc'; did you mean bicubic"):
        load(file, image_size=(10, 21), numerics="bicubc")  # pyright: ignore[reportArgumentType]


def test_the_same_size_changes_nothing(file: Path) -> None:
    assert_same(load(file, image_size=VIT.image).state_dict(), load(file).state_dict())


@pytest.mark.parametrize("position", ["learned2d", "learned2d-sum"])
def test_tables_of_rows_and_columns_are_resized_along_their_axis(position: Any, tmp_path: Path) -> None:
    model = network(replace(VIT, position=position, placement="every"))
    save(model, tmp_path / "model.safetensors")
    new = load(tmp_path / "model.safetensors", image_size=(10, 21)).state_dict()
    for name, old in model.state_dict().items():
        match name.rpartition(".")[2]:
            case "rows":
                assert torch.equal(new[name], resize_grid(old[:, None], (5, 1))[:, 0])
            case "columns":
                assert torch.equal(new[name], resize_grid(old[None], (1, 7))[0])
            case _:
                assert torch.equal(new[name], old)


def test_fixed_and_absent_positions_take_any_size(tmp_path: Path) -> None:
    for position in ("sincos2d", "none"):
        save(network(replace(VIT, position=position)), tmp_path / "model.safetensors")
        new = load(tmp_path / "model.safetensors", image_size=(10, 21))
        assert new(images(new.config, dtype=torch.float32)).shape == (2, 5)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            replace(VIT, position="relative"),
            "relative positions run over the raster index of a 3x4 grid.*keep image_size=6x12",
        ),
        (
            replace(RESNET, mixing="axial", axial_heads=2),
            "keep image_size=20x28",
        ),
    ],
    ids=["relative", "axial"],
)
def test_positions_that_cannot_be_resized(config: ModelConfig, complaint: str, tmp_path: Path) -> None:
    save(network(config), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path / "model.safetensors", image_size=(12, 24))
    assert load(tmp_path / "model.safetensors", image_size=config.image, classes=3).config.classes == 3


def test_a_size_that_leaves_pixels_over(file: Path) -> None:
    with pytest.raises(ImageSizeError, match="image 7x12 leaves 1 pixel over at patch 2x3; use 6 or 8"):
        load(file, image_size=(7, 12))


def test_one_number_is_a_square(tmp_path: Path) -> None:
    save(network(replace(VIT, image=(12, 12))), tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors", image_size=18).config.image == (18, 18)


def test_the_shorter_side_grows_with_the_picture(file: Path) -> None:
    prepared = load(file, image_size=(12, 24)).card.preprocessing
    assert prepared == replace(PREPARED, image=(12, 24), resize=18)


# Facts.


def test_facts_replace_fields_of_the_config(file: Path) -> None:
    model = load(file, heads=4, dropout=0.25, stochastic_depth=0.1, gelu="erf")
    assert model.config == replace(VIT, heads=4, dropout=0.25, stochastic_depth=0.1, gelu="erf")
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}
    assert_same(model.state_dict(), load(file).state_dict())


def test_a_state_dict_of_no_published_width_must_be_told_its_heads(tmp_path: Path) -> None:
    from vitrail.checkpoint.convert import convert

    path = tmp_path / "timm.safetensors"
    save(network(replace(VIT, image=(6, 9), gelu="erf")), tmp_path / "ours.safetensors")
    sidecar = convert(tmp_path / "ours.safetensors", path, to="timm").sidecar
    assert sidecar is not None
    sidecar.unlink()
    with pytest.raises(MismatchedWeights, match=r"timm\.safetensors: width 16 is not a published shape.*pass heads="):
        load(path)
    assert load(path, heads=2).config == replace(VIT, image=(6, 9), gelu="erf")


@pytest.mark.parametrize(
    ("facts", "kind", "complaint"),
    [
        ({"droput": 0.1}, UnknownName, "unknown config field 'droput'; did you mean dropout"),
        ({"heads": 3}, ConfigError, "heads=3 does not divide width=16"),
        ({"gelu": "fast"}, UnknownName, "unknown gelu 'fast'"),
        ({"classes": -1}, ConfigError, "classes=-1"),
    ],
    ids=str,
)
def test_wrong_facts(facts: dict[str, Any], kind: type[Exception], complaint: str, file: Path) -> None:
    """A wrong argument is a mistake in the call; a file that is named with it is not to blame."""
    with pytest.raises((kind, MismatchedWeights), match=complaint):
        load(file, **facts)


# Files that are not what they should be.


def foreign(tensors: Tensors, path: Path) -> None:
    """The same tensors under timm's names."""
    from vitrail.checkpoint.formats.key_table import export_tensors
    from vitrail.checkpoint.formats.timm.vit import build_table

    config = replace(VIT, image=(6, 9), gelu="erf")
    names = {entry.ours: entry.names[0] for entry in build_table(config)}
    whole = export_tensors(build_table(config), network(config).state_dict())
    assert set(names.values()) == set(whole)
    save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, path)


def own(tensors: Tensors, path: Path) -> None:
    config = replace(VIT, image=(6, 9), gelu="erf")
    write_sealed(path, tensors, describe(config, Card(preprocessing=Preprocessing(image=(6, 9)))))


Write = Callable[[Tensors, Path], None]
NAMES = {own: "blocks.1.attention.qkv.bias", foreign: "blocks.1.attn.qkv.bias"}


@pytest.fixture
def whole() -> Tensors:
    return network(replace(VIT, image=(6, 9), gelu="erf")).state_dict()


@pytest.mark.parametrize("write", [own, foreign])
def test_a_missing_tensor_is_named(write: Write, whole: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write({n: t for n, t in whole.items() if n != "blocks.1.attention.qkv.bias"}, path)
    with pytest.raises(MismatchedWeights) as caught:
        load(path, heads=2)
    assert str(caught.value) == f"{path}: tensor '{NAMES[write]}' of shape [48] is missing; the file is not whole"


@pytest.mark.parametrize("write", [own, foreign])
def test_a_tensor_too_many_is_named(write: Write, whole: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write({**whole, "blocks.1.gamma": torch.ones(16), "blocks.0.gamma": torch.ones(16)}, path)
    with pytest.raises(MismatchedWeights) as caught:
        load(path, heads=2)
    assert str(caught.value).startswith(f"{path}: tensor 'blocks.0.gamma' and 1 more has no place in this network")


@pytest.mark.parametrize("write", [own, foreign])
def test_a_tensor_of_another_shape_is_named(write: Write, whole: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write({**whole, "blocks.1.attention.qkv.bias": torch.ones(47)}, path)
    with pytest.raises(MismatchedWeights) as caught:
        load(path, heads=2)
    assert str(caught.value) == f"{path}: tensor '{NAMES[write]}' has shape [47], expected [48]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_named(value: float, whole: Tensors, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole["blocks.1.attention.qkv.bias"] = whole["blocks.1.attention.qkv.bias"].clone()
    whole["blocks.1.attention.qkv.bias"][5] = value
    foreign(whole, path)
    with pytest.raises(CorruptWeights, match=r"tensor 'blocks\.1\.attn\.qkv\.bias' holds NaN or infinity") as caught:
        load(path, heads=2)
    assert str(path) in str(caught.value)


def test_a_network_that_is_not_finite_is_not_written(file: Path) -> None:
    before, model = file.read_bytes(), load(file)
    with torch.no_grad():
        model.blocks[1].attention.qkv.bias[5] = float("nan")
    with pytest.raises(CorruptWeights, match=r"tensor 'blocks\.1\.attention\.qkv\.bias' holds NaN"):
        save(model, file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pth"])
def test_an_empty_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.touch()
    with pytest.raises(CorruptWeights, match="is empty") as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFound, match=r"nowhere\.safetensors: no such weight file"):
        load(tmp_path / "nowhere.safetensors")


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(MismatchedWeights, match="no weight file in this folder; expected one of"):
        load(tmp_path)


def test_a_folder_that_is_not_there_to_save_in(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        save(network(), tmp_path / "nowhere" / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"config": {"family": "vit", "width": 16}}, "incomplete model config"),
        ({"config": {"family": "swin"}}, "unknown model family 'swin'"),
        ({"labels": ["one"]}, "1 labels for 5 classes"),
        ({"preprocessing": {}}, "incomplete preprocessing"),
        ({"labels": 3}, "incomplete description"),
        ({"provenance": 3}, "incomplete description"),
    ],
    ids=str,
)
def test_a_description_that_is_not_whole(
    change: dict[str, Any], complaint: str, whole: Tensors, tmp_path: Path
) -> None:
    config = replace(VIT, image=(6, 9))
    path = tmp_path / "model.safetensors"
    write_sealed(path, whole, describe(config, Card(preprocessing=Preprocessing(image=(6, 9)))) | change)
    with pytest.raises(MismatchedWeights, match=complaint) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 10**9},
        {"width": 2**40},
        {"mlp_width": 2**62},
        {"image": [2 * 10**6, 3 * 10**6]},
        {"image": [2 * 10**6, 3 * 10**6], "position": "sincos2d"},
    ],
    ids=str,
)
def test_a_description_that_promises_more_than_there_is(change: dict[str, Any], whole: Tensors, tmp_path: Path) -> None:
    """Numbers in a file are held against its tensors before anything of that size is made."""
    data = describe(replace(VIT, image=(6, 9)), Card(preprocessing=Preprocessing(image=(6, 9))))
    data["config"] |= change
    path = tmp_path / "model.safetensors"
    fixed = {n: t for n, t in whole.items() if not n.startswith("position.") or "position" not in change}
    write_sealed(path, fixed, data)
    with pytest.raises(WeightsError) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_bundles_hold_no_gradients() -> None:
    bundle = to_bundle(network())
    assert isinstance(bundle.config, ViTConfig)
    assert not any(tensor.requires_grad for tensor in bundle.tensors.values())


def test_positions_of_half_precision_weights_are_resized_in_full(tmp_path: Path) -> None:
    """Rounded once, when they were written, and not again."""
    model = awake(VIT)
    save(model, tmp_path / "whole.safetensors")
    convert(tmp_path / "whole.safetensors", tmp_path / "half.safetensors", dtype=torch.float16)
    assert (tmp_path / "half.safetensors").stat().st_size < (tmp_path / "whole.safetensors").stat().st_size
    half = load(tmp_path / "half.safetensors")
    save(half, tmp_path / "rounded.safetensors")
    size = (2 * VIT.image[0], 2 * VIT.image[1])
    mine, exact = (load(tmp_path / name, image_size=size) for name in ("half.safetensors", "rounded.safetensors"))
    for name, tensor in exact.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name


def test_a_network_that_has_yet_to_learn_its_head_is_in_training_mode(tmp_path: Path) -> None:
    """Lightning trains a network in the mode it is in; one that is complete is there to predict."""
    model = create_model("ViT-Nano/4", depth=1, classes=4, dropout=0.5)
    assert model.training
    save(model, tmp_path / "model.safetensors")
    modes = {
        classes: [made(tmp_path / "model.safetensors", classes=classes).training for made in (load, from_pretrained)]
        for classes in (None, 0, 7)
    }
    assert modes == {None: [False, False], 0: [False, False], 7: [True, True]}
    tuned, images = load(tmp_path / "model.safetensors", classes=0), torch.randn(2, 3, 32, 32)
    assert torch.equal(tuned(images), tuned(images))
    learner = load(tmp_path / "model.safetensors", classes=7)
    assert all(part.training for part in learner.modules())
