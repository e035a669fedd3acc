"""`convert`: every network to every format or a refusal by field, odd targets, and an honest certificate."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.lanes import rest_slow
from tests.models.tiny import SOME, VARIANTS, VIT, awake
from vitrail.checkpoint import convert as module
from vitrail.checkpoint import parity_check as certificate
from vitrail.checkpoint.bundle import Bundle, sidecar_path
from vitrail.checkpoint.convert import Conversion, convert, export, format_for
from vitrail.checkpoint.find_weights import read_bundle
from vitrail.checkpoint.formats.timm.vit import architecture
from vitrail.checkpoint.weights import load, save, to_bundle
from vitrail.cli.app import main
from vitrail.core.errors import ConfigError, ExportRefused, UnknownName, WeightsError, WeightsNotFound
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import ZOO, hybrid_backbone

TARGETS = {
    "vitrail": "out.safetensors",
    "timm": "out.safetensors",
    "torchvision": "out.pth",
    "hf": "out",
    "npz": "out.npz",
    "npz-linen": "out.npz",
    "npz-big-vision": "out.npz",
    "npz-bit": "out.npz",
}
# Fields without which the other library computes something else, so that a large difference is the honest answer.
NUMERICS = {"gelu", "norm_eps", "standardisation", "standardisation_eps", "padding", "pool_padding", "backbone", "pool"}
R50X1 = ResNetConfig(blocks=(3, 4, 6, 3))
SQUARE = ViTConfig(width=192, depth=2, mlp_width=768, heads=3, image=(32, 32), classes=5, gelu="erf")


def bundle(config: ModelConfig) -> Bundle:
    torch.manual_seed(0)
    return to_bundle(awake(config, torch.float32))


def assert_same(found: Bundle, wanted: Bundle) -> None:
    assert found.config == wanted.config
    assert list(found.tensors) == list(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A plain ViT as a file of ours."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("plain") / "vit.safetensors"
    save(awake(SQUARE, torch.float32), path)
    return path.read_bytes()


@pytest.fixture
def source(content: bytes, tmp_path: Path) -> Path:
    """That file, in a folder of its own."""
    path = tmp_path / "source" / "vit.safetensors"
    path.parent.mkdir()
    path.write_bytes(content)
    return path


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


# Every network to every format.


REFUSAL = re.compile(r"field \w+=|holds ViTs|holds BiT ResNets")


def attempted(made: Bundle, target: Path, form: str) -> Conversion | ExportRefused:
    try:
        return export(made, target, form)
    except ExportRefused as refusal:
        return refusal


@pytest.mark.slow
@pytest.mark.parametrize("variant", rest_slow(SOME, 0, 1, 2))
def test_every_network_goes_whole_or_is_refused_by_field(variant: str, tmp_path: Path) -> None:
    made = bundle(VARIANTS[variant])
    for form, name in TARGETS.items():
        folder = tmp_path / form
        folder.mkdir()
        done = attempted(made, folder / name, form)
        if isinstance(done, ExportRefused):
            assert REFUSAL.search(str(done))
            assert not list(folder.iterdir()), (form, "left something behind")
            continue
        assert_same(read_bundle(done.target), made)
        assert done.parity.identical == done.parity.tensors == len(made.tensors)
        assert (done.parity.reference is None) == (done.parity.why_not is not None) == (not done.parity.rows)
        if done.sidecar is None or not NUMERICS & set(done.lost_fields):
            assert done.parity.worst < 1e-5, (form, done.parity.rows)


REFUSALS: list[tuple[ModelConfig, str, str]] = [
    (replace(VIT, registers=3), "torchvision", "field registers=3"),
    (replace(VIT, registers=3), "hf", "field registers=3"),
    (replace(VIT, registers=3), "npz", "field registers=3"),
    (replace(VIT, registers=3), "timm", "field position_prefix=True"),
    (replace(VIT, head="tanh"), "timm", "field head='tanh'"),
    *((replace(VIT, head="patches"), form, "field head='patches'") for form in ("timm", "torchvision", "hf", "npz")),
    (replace(VIT, head="tanh"), "hf", "field head='tanh' goes with classes=0"),
    *((replace(VIT, position="relative"), form, "field position='relative'") for form in ("timm", "torchvision", "hf")),
    (replace(VIT, position="relative"), "npz", "field placement='every'"),
    (replace(VIT, position="relative", placement="stem"), "npz-linen", "field position='relative'"),
    *((VARIANTS["axial"], form, "field attention='axial'") for form in ("timm", "torchvision", "hf", "npz")),
    (VIT, "npz-big-vision", "field position_prefix=True"),
    (VIT, "npz-bit", "this network is a ViT"),
    (replace(VIT, pool="mean"), "torchvision", "field pool='mean'"),
    (replace(VIT, pool="mean"), "hf", "field pool='mean'"),
    (replace(VIT, qkv_bias=False), "torchvision", "field qkv_bias=False"),
    (replace(VIT, qkv_bias=False), "npz", "field qkv_bias=False"),
    (replace(VIT, placement="shared"), "timm", "field position='learned' at 'shared'"),
    (replace(VIT, position="sincos2d"), "npz", "field position='sincos2d'"),
    (ZOO["BiT-mini-R14"], "timm", "field root='3x3'"),
    (ZOO["BiT-mini-R14"], "hf", "root='3x3'"),
    (ZOO["BiT-mini-R14"], "npz", "root='3x3'"),
    (ZOO["BiT-mini-R14"], "torchvision", "holds ViTs"),
    (ZOO["mini-R11+ViT-Nano/4"], "npz", "field root='3x3'"),
    (ZOO["mini-R11+ViT-Nano/4"], "timm", "field root='3x3'"),
    (ZOO["mini-R11+ViT-Nano/4"], "torchvision", "field backbone="),
    (ZOO["mini-R11+ViT-Nano/4"], "hf", "field backbone="),
    (VARIANTS["axial resnet"], "timm", "field mixing='axial'"),
    (VARIANTS["axial resnet"], "npz", "mixing='axial'"),
]
refused_bundle = cache(bundle)  # a refusal changes nothing


@pytest.mark.parametrize(
    ("config", "form", "field"),
    REFUSALS,
    ids=lambda value: "" if isinstance(value, ViTConfig | ResNetConfig) else value,
)
def test_a_refusal_names_the_format_and_the_field(config: ModelConfig, form: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match=re.escape(field)) as caught:
        export(refused_bundle(config), tmp_path / TARGETS[form], form)
    assert {"hf": "huggingface", "npz": "npz"}.get(form, form) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ResNetConfig(blocks=(1, 2), factor=0.5, groups=8, classes=5), "blocks=(1, 2)"),
        (replace(SQUARE, patch=(1, 1), backbone=hybrid_backbone((1, 1), (32, 32))), "blocks=(1, 1)"),
    ],
    ids=["bit", "hybrid"],
)
def test_a_timm_folder_needs_a_name_that_timm_knows(config: ModelConfig, field: str, tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match=re.escape(field)) as caught:
        export(bundle(config), tmp_path / "out", "timm")
    assert "write a file instead" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_width_between_two_names_has_none() -> None:
    with pytest.raises(ExportRefused, match=r"no name for a BiT of field blocks=\(3, 4, 6, 3\) at factor=1\.5"):
        architecture(replace(R50X1, factor=1.5))
    assert architecture(R50X1)[0] == "resnetv2_50x1_bit"


# What another library cannot build is written all the same, and the certificate says why nothing was compared.

UNBUILT: list[tuple[str, ModelConfig]] = [
    ("torchvision", replace(SQUARE, image=(32, 48))),
    ("torchvision", replace(SQUARE, patch=(16, 8))),
    ("torchvision", replace(SQUARE, channels=1)),
    ("timm", replace(SQUARE, patch=(1, 1), backbone=hybrid_backbone((1, 1), (32, 32)))),
    ("timm", ResNetConfig(blocks=(1, 1), factor=0.5, groups=8, classes=5)),
    ("timm", VARIANTS["post-activation"]),
]


@pytest.mark.parametrize(
    ("form", "config"), rest_slow(UNBUILT), ids=["pixels", "patch", "channels", "hybrid", "groups", "unit"]
)
def test_a_network_that_only_the_format_can_hold(form: str, config: ModelConfig, tmp_path: Path) -> None:
    made = bundle(config)
    done = export(made, tmp_path / TARGETS[form], form)
    assert_same(read_bundle(done.target), made)
    if done.parity.reference is None:
        assert form in (done.parity.why_not or "")
    else:
        assert done.parity.worst < 1e-3 or "groups" in done.lost_fields


def test_a_representation_without_classes(tmp_path: Path) -> None:
    """A hidden tanh layer without a classifier: transformers' pooler, torchvision's and the original's pre-logits."""
    made = bundle(replace(SQUARE, head="tanh", classes=0))
    for form in ("vitrail", "hf", "torchvision", "npz"):
        done = export(made, tmp_path / TARGETS[form], form)
        assert_same(read_bundle(done.target), made)
        assert done.parity.worst < 1e-5


# Names of formats and targets.


@pytest.mark.parametrize(
    ("target", "to", "expected"),
    [
        ("a.safetensors", None, "vitrail"),
        ("a.npz", None, "npz"),
        ("a", None, "huggingface"),
        ("a.safetensors", "vitrail", "vitrail"),
        ("a.safetensors", "timm", "timm"),
        ("a.pth", "timm", "timm"),
        ("a.bin", "torchvision", "torchvision"),
        ("a", "timm", "timm"),
        ("a", "hf", "hf"),
        ("a.npz", "google", "google"),
        ("a.npz", "bit", "bit"),
    ],
)
def test_formats_of_targets(target: str, to: str | None, expected: str) -> None:
    assert format_for(Path(target), to) == expected


NPZ = ("npz", "npz-linen", "npz-big-vision", "npz-bit")


@pytest.mark.parametrize(
    ("target", "to", "complaint"),
    [
        ("a.pth", None, "a.pth: .pth does not determine a format; add --to timm or --to torchvision"),
        ("a.bin", None, "a.bin: .bin does not determine a format"),
        ("a.onnx", None, "a.onnx: .onnx does not determine a format"),
        ("a.npz", "vitrail", "a.npz: format 'vitrail' goes into '.safetensors'"),
        ("a", "vitrail", "a: format 'vitrail' goes into '.safetensors'"),
        ("a.safetensors", "hf", "a.safetensors: format 'hf' goes into a folder"),
        ("a.npz", "timm", "a.npz: format 'timm' goes into a folder, '.safetensors', '.pth', '.bin'"),
        ("a", "torchvision", "a: format 'torchvision' goes into '.safetensors', '.pth', '.bin'"),
        ("a.npz", "torchvision", "a.npz: format 'torchvision' goes into '.safetensors'"),
        *(
            (f"a{suffix}", to, f"format {to!r} goes into '.npz'")
            for to in NPZ
            for suffix in (".safetensors", "", ".pth")
        ),
    ],
)
def test_a_format_and_a_target_that_do_not_go_together(
    target: str, to: str | None, complaint: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        convert(source, tmp_path / target, to)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize(
    ("to", "near"),
    [("tim", "timm"), ("torchvison", "torchvision"), ("npz-linnen", "npz-linen"), ("hugging-face", "huggingface")],
)
def test_an_unknown_format_names_the_nearest(to: str, near: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=f"unknown weight format '{to}'; did you mean .*{near}"):
        convert(source, tmp_path / "a.safetensors", to)


def test_a_folder_that_is_not_there(source: Path, tmp_path: Path) -> None:
    for name in ("a.npz", "a.safetensors", "a"):
        target = tmp_path / "nowhere" / name
        with pytest.raises(WeightsError, match=f"{re.escape(str(target))}: the folder .*nowhere does not exist"):
            convert(source, target)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFound, match=r"a\.safetensors: does not exist"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.npz")


@pytest.mark.parametrize("form", rest_slow(["vitrail", "timm", "torchvision", "hf", "npz"]))
def test_an_existing_target_is_replaced_whole(form: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / TARGETS[form]
    export(bundle(replace(SQUARE, depth=3, norm_eps=1e-5, classes=7)), target, form)
    done = convert(source, target, form)
    assert_same(read_bundle(target), read_bundle(source))
    beside = sidecar_path(target / "model.safetensors" if target.is_dir() else target)
    assert beside.exists() == (done.sidecar is not None)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_a_folder_that_exists_is_written_into(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "README.md").write_text("mine", "utf-8")
    assert_same(read_bundle(convert(source, target).target), read_bundle(source))
    assert (target / "README.md").read_text("utf-8") == "mine"
    convert(source, target, "timm")
    assert read_bundle(target).config == SQUARE


def test_a_file_where_a_folder_should_be(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", "utf-8")
    with pytest.raises(ExportRefused, match="out: is a file; this format is written as a folder"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out").read_text("utf-8") == "mine"


@pytest.mark.parametrize("form", ["vitrail", "timm", "torchvision", "npz"])
def test_a_folder_where_a_file_should_be(form: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / TARGETS[form]
    target.mkdir()
    with pytest.raises(WeightsError, match="is a folder") as caught:
        convert(source, target, form)
    assert str(target) in str(caught.value)
    assert not list(target.iterdir())
    assert not sidecar_path(target).exists()


def test_onto_itself(source: Path) -> None:
    before = read_bundle(source)
    assert_same(read_bundle(convert(source, source).target), before)
    done = convert(source, source, "timm")
    assert_same(read_bundle(source), before)
    assert "cls_token" in load_file(done.target)


@pytest.mark.parametrize("form", rest_slow(["timm", "npz", "torchvision", "hf"]))
def test_a_disk_that_is_full_leaves_the_old_file(
    form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / TARGETS[form]
    convert(source, target, form)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}

    def full(*_args: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    for name, owner in (("save_file", module), ("savez", module.np), ("save", module.torch)):
        monkeypatch.setattr(owner, name, full)
    with pytest.raises(WeightsError, match=r"cannot be written \(No space left on device\)") as caught:
        convert(source, target, form)
    monkeypatch.undo()
    assert target.name in str(caught.value) or "model.safetensors" in str(caught.value)
    assert {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()} == before


def test_facts_are_for_the_source(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out.safetensors", dropout=0.25)
    assert load(done.target).config == replace(SQUARE, dropout=0.25)


def test_a_conversion_says_what_it_did(source: Path, tmp_path: Path) -> None:
    done = convert(source, tmp_path / "out.pth", "torchvision")
    assert (done.source, done.target, done.format) == (source, tmp_path / "out.pth", "torchvision")
    assert (done.config, done.lost_fields) == (SQUARE, ["preprocessing"])


@pytest.mark.parametrize("dtype", rest_slow([torch.float16, torch.bfloat16, torch.float64]))
@pytest.mark.parametrize("form", rest_slow(["vitrail", "timm", "torchvision", "hf", "npz"], 0, 1))
def test_types_are_kept(dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    made = bundle(SQUARE)
    made = replace(made, tensors={name: tensor.to(dtype) for name, tensor in made.tensors.items()})
    done = export(made, tmp_path / TARGETS[form], form)
    if (form, dtype) == ("npz", torch.bfloat16):  # numpy has no such type, and float32 holds the same numbers
        made = replace(made, tensors={name: tensor.float() for name, tensor in made.tensors.items()})
    assert_same(read_bundle(done.target), made)


# The certificate.


@pytest.mark.slow
def test_a_certificate_has_a_row_for_every_place(source: Path, tmp_path: Path) -> None:
    for form, peer in (("timm", "timm "), ("torchvision", "torchvision "), ("hf", "transformers ")):
        seal = convert(source, tmp_path / TARGETS[form], form).parity
        assert [row.place for row in seal.rows] == ["stem", "block 1", "block 2", "logits"]
        assert (seal.reference or "").startswith(peer)
        assert seal.worst == max(row.relative for row in seal.rows) < 1e-5
    for form in ("npz", "vitrail"):
        seal = convert(source, tmp_path / TARGETS[form], form).parity
        assert (seal.reference, seal.rows, seal.why_not) == (None, [], "there is no other library to compare with")


def test_a_certificate_is_honest_about_numerics(tmp_path: Path) -> None:
    """What went to the sidecar the other library does not know: it shows from the first MLP on."""
    rows = export(bundle(replace(SQUARE, gelu="tanh")), tmp_path / "out.pth", "torchvision").parity.rows
    assert rows[0].relative < 1e-6
    assert all(1e-6 < row.relative < 1e-2 for row in rows[1:3])


def test_a_certificate_counts_what_did_not_come_back() -> None:
    made = bundle(SQUARE)
    names = list(made.tensors)
    other = dict(made.tensors)
    other[names[0]] = other[names[0]] + 1
    other[names[1]] = other[names[1]].flatten()
    del other[names[2]]
    seal = certificate.check_parity(made, replace(made, tensors=other), "npz", Path())
    assert (seal.identical, seal.tensors) == (len(names) - 3, len(names))


def test_a_row_is_relative_to_the_largest_value(source: Path, tmp_path: Path) -> None:
    from vitrail.checkpoint import parity_check as peers

    target = convert(source, tmp_path / "out.safetensors", "timm").target
    peer = peers.build_reference("timm", SQUARE, target)
    assert isinstance(peer, peers.ReferenceModel)
    with torch.no_grad():
        peer.network.head.bias[2] += 100
    row = certificate.compare(load(source), peer)[-1]
    assert row.place == "logits"
    assert row.absolute == pytest.approx(100, rel=1e-4)
    assert 0.9 < row.relative < 1.1


@pytest.mark.parametrize("library", ["timm", "transformers", "torchvision"])
def test_a_library_that_is_not_installed_is_no_obstacle(
    library: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.checkpoint import parity_check as peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    form = {"transformers": "hf"}.get(library, library)
    seal = convert(source, tmp_path / TARGETS[form], form).parity
    assert (seal.reference, seal.why_not) == (None, f"{library} is not installed")
    assert seal.identical == seal.tensors


# From the shell.


def test_the_command_prints_the_certificate(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.pth"
    assert main(["convert", str(source), str(target), "--to", "torchvision"]) == 0
    seen = lines(capsys.readouterr().out)
    count = sum(p.numel() for p in load(source).parameters())
    assert seen[0] == f"{source} -> {target} (torchvision), {count:,} parameters"
    assert seen[1].startswith(f"torchvision cannot hold preprocessing: written to {sidecar_path(target)}")
    tensors = len(read_bundle(source).tensors)
    assert seen[2] == f"read back: {tensors} of {tensors} tensors identical"
    assert re.fullmatch(r"against torchvision \S+, one seeded batch of 2", seen[3])
    rows = [line.rsplit(" ", 2) for line in seen if re.match(r"(stem|block|logits)", line)]
    assert [row[0] for row in rows] == ["stem", "block 1", "block 2", "logits"]
    assert all(float(row[2]) < 1e-5 for row in rows)


def test_the_command_says_why_there_is_nothing_to_compare(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "out.npz")]) == 0
    seen = lines(capsys.readouterr().out)
    assert seen[-1] == "parity: there is no other library to compare with"
    assert "npz cannot hold gelu" in seen[1]


def test_the_command_takes_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(SQUARE, width=48, heads=4, mlp_width=96)
    done = export(bundle(config), tmp_path / "in.pth", "timm")
    assert done.sidecar is not None
    done.sidecar.unlink()
    assert main(["convert", str(done.target), str(tmp_path / "out.safetensors")]) == 2
    assert "pass heads=" in capsys.readouterr().err
    assert main(["convert", str(done.target), str(tmp_path / "out.safetensors"), "--heads", "4"]) == 0
    assert load(tmp_path / "out.safetensors").config == config


def test_the_command_fails_when_tensors_do_not_come_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certificate.torch, "equal", lambda mine, theirs: mine.ndim > 1)
    assert main(["convert", str(source), str(tmp_path / "out.safetensors")]) == 1
    assert re.search(r"read back: \d+ of \d+ tensors identical", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "the following arguments are required: WEIGHTS"),
        (["SOURCE"], "the following arguments are required: --out OUT"),
        (["SOURCE", "out.pth"], "does not determine a format"),
        (["SOURCE", "out.npz", "--to", "tim"], "unknown weight format 'tim'; did you mean timm"),
        (["SOURCE", "out.npz", "--to", "npz-bit"], "npz-bit holds BiT ResNets; this network is a ViT"),
        (["SOURCE", "nowhere/out.npz"], "does not exist; make it first"),
        (["nowhere.npz", "out.npz"], "nowhere.npz: does not exist"),
        (["SOURCE", "out.npz", "--heads", "x"], "argument --heads: invalid int value: 'x'"),
        (["SOURCE", "out.npz", "--heads", "5"], "heads=5 does not divide width=192"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str], complaint: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *(str(source) if word == "SOURCE" else word for word in words)]) == 2
    seen = capsys.readouterr()
    assert complaint in seen.err
    assert (seen.out, seen.err.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
