"""`create_model` with public weights, from a hub of our own that serves small files under their names."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import vitrail
from tests.lanes import rest_slow
from tests.models.tiny import awake
from vitrail.checkpoint.formats.key_table import export_tensors
from vitrail.checkpoint.formats.registry import find_format
from vitrail.checkpoint.known_weights import find_public_weights
from vitrail.checkpoint.weights import create_model, load
from vitrail.core.errors import ConfigError, CorruptWeights, UnknownName, VitrailError, WeightsNotFound
from vitrail.data.preprocessing import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.models.family import ModelConfig
from vitrail.models.positions.embeddings import resize_position
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import hybrid_backbone, model_config, slug

# Width and MLP of ViT-Ti, so that a state dict says its heads; one layer on a 4x4 grid keeps it small.
TI = ViTConfig(width=192, depth=1, mlp_width=768, heads=3, image=(64, 64), classes=7, gelu="tanh")
Serve = Callable[[str, str, ModelConfig], dict[str, Tensor]]


class Hub(ThreadingHTTPServer):
    """Files by address, each with the checksum that the real hub sends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.missing = 404


class Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        content = self.server.files.get(self.path)
        self.send_response(self.server.missing if content is None else 200)
        if content is not None:
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("VITRAIL_HUB", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
        for name in ("VITRAIL_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def serve(hub: Hub) -> Serve:
    """Put a random network of a config on the hub in the place of public weights; its tensors by our names."""

    def put(model: str, tag: str, config: ModelConfig) -> dict[str, Tensor]:
        torch.manual_seed(0)
        tensors = {name: tensor.detach() for name, tensor in awake(config, torch.float32).state_dict().items()}
        entry = find_public_weights(model, tag)
        table = find_format("timm", config).table(config)
        hub.files[f"/{entry.repo}/resolve/main/{entry.file}"] = save(export_tensors(table, tensors))
        return tensors

    return put


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_googles_vits_compute_as_they_were_trained(serve: Serve, hub: Hub, tmp_path: Path) -> None:
    tensors = serve("vit_ti_16", "augreg_in21k", TI)
    model = create_model("ViT-Ti/16", weights="augreg_in21k")
    assert model.config == TI
    assert_same(model.state_dict(), tensors)
    assert not model.training
    assert model.card.preprocessing == Preprocessing(
        image=(224, 224), resize=249, interpolation="bicubic", mean=HALF, std=HALF
    )
    repo = "timm/vit_tiny_patch16_224.augreg_in21k"
    assert model.card.provenance == {"weights": repo, "tag": "augreg_in21k", "licence": "apache-2.0"}
    assert model.card.labels is None
    cached = next((tmp_path / "cache").rglob("model.safetensors"))
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(pixels), load(cached, gelu="tanh")(pixels))
        assert not torch.equal(model(pixels), load(cached)(pixels))
    assert hub.requests == ["/timm/vit_tiny_patch16_224.augreg_in21k/resolve/main/model.safetensors"]


def test_the_second_time_nobody_is_asked(serve: Serve, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("vit_ti_16", "augreg_in21k", TI)
    first = create_model("vit_ti_16", weights="augreg_in21k")
    monkeypatch.setenv("VITRAIL_OFFLINE", "1")
    assert_same(create_model("vit_ti_16", weights="augreg_in21k").state_dict(), dict(first.state_dict()))
    assert len(hub.requests) == 1


@pytest.mark.parametrize("name", ["vit_b_16", "vit_ti_16"])
def test_others_weights_keep_the_exact_gelu(name: str, serve: Serve) -> None:
    """Meta's weights and those that timm tuned were trained in PyTorch; Meta's positions are resampled its own way."""
    tag = {"vit_b_16": "augreg2_in21k_ft_in1k", "vit_ti_16": "fb_in1k"}[name]
    serve(name, tag, TI)
    model = create_model(name, weights=tag)
    resample = "bicubic-sharp" if tag == "fb_in1k" else "reference"
    assert model.config == replace(TI, gelu="erf", position_resample=resample)
    statistics = (IMAGENET_MEAN, IMAGENET_STD) if tag == "fb_in1k" else (HALF, HALF)
    assert (model.card.preprocessing.mean, model.card.preprocessing.std) == statistics


def test_weights_of_a_larger_size_are_not_cropped(serve: Serve) -> None:
    serve("vit_ti_16", "augreg_in21k_ft_in1k_384", TI)
    prepared = create_model("vit_ti_16", weights="augreg_in21k_ft_in1k_384").card.preprocessing
    assert (prepared.image, prepared.resize) == ((384, 384), 384)


@pytest.mark.slow
def test_googles_hybrids_standardise_as_they_were_trained(serve: Serve) -> None:
    image = (32, 32)
    config = replace(TI, image=image, patch=(1, 1), backbone=hybrid_backbone((3, 4, 9), image))
    tensors = serve("r50_vit_b_16", "orig_in21k", config)
    model = create_model("R50+ViT-B/16", weights="orig_in21k")
    assert model.config == config
    inner = model.config.backbone
    assert (inner.standardisation, inner.standardisation_eps, inner.norm_eps) == ("std+eps", 1e-5, 1e-6)
    assert_same(model.state_dict(), tensors)


@pytest.mark.parametrize(("tag", "image", "resize"), [("goog_in21k", 224, 256), ("goog_in21k_ft_in1k", 448, 448)])
def test_googles_bit_standardises_as_it_was_trained(tag: str, image: int, resize: int, serve: Serve) -> None:
    serve("bit_r50x1", tag, ResNetConfig(blocks=(1, 1), classes=7))
    model = create_model("BiT-R50x1", weights=tag)
    prepared = model.card.preprocessing
    assert (prepared.image, prepared.resize, prepared.interpolation) == ((image, image), resize, "bilinear")
    assert model.config == ResNetConfig(blocks=(1, 1), classes=7, image=(image, image))


def test_surgery(serve: Serve) -> None:
    tensors = serve("vit_ti_16", "augreg_in21k", TI)
    model = create_model("vit_ti_16", weights="augreg_in21k", classes=37, image_size=96, numerics="bicubic")
    assert model.config == replace(TI, classes=37, image=(96, 96))
    found = model.state_dict()
    table = "position.tables.0.table"
    assert torch.equal(found[table], resize_position(tensors[table], (4, 4), (6, 6), "bicubic"))
    assert found["head.classifier.weight"].shape == (37, 192)
    assert not found["head.classifier.weight"].count_nonzero()
    rest = [name for name in tensors if name != table and not name.startswith("head.")]
    assert_same({name: found[name] for name in rest}, {name: tensors[name] for name in rest})
    assert model.card.preprocessing.image == (96, 96)


def test_fields_can_be_replaced(serve: Serve) -> None:
    serve("vit_ti_16", "augreg_in21k", TI)
    model = create_model("vit_ti_16", weights="augreg_in21k", dropout=0.1, gelu="erf")
    assert model.config == replace(TI, dropout=0.1, gelu="erf")
    with pytest.raises(VitrailError, match="unknown config field 'droput'; did you mean dropout"):
        create_model("vit_ti_16", weights="augreg_in21k", droput=0.1)


def test_what_the_card_says_goes_into_a_file(serve: Serve, tmp_path: Path) -> None:
    serve("vit_ti_16", "augreg_in21k", TI)
    model = create_model("vit_ti_16", weights="augreg_in21k")
    vitrail.save(model, tmp_path / "model.safetensors")
    back = vitrail.load(tmp_path / "model.safetensors")
    assert (back.card, back.config) == (model.card, model.config)


def small(name: str, **changes: Any) -> ViTConfig:
    """A network of a family as its public weights have it, of one layer and few tokens."""
    config = model_config(name, classes=0, depth=1, image_size=64 if "/16" in name else 56, **changes)
    assert isinstance(config, ViTConfig)
    return config


@pytest.mark.parametrize(
    ("name", "tag"),
    rest_slow(
        [
            ("DINOv2-S/14", "lvd142m"),
            ("DINOv2-reg-S/14", "lvd142m"),
            ("DeiT-III-S/16", "fb_in1k"),
            ("SigLIP-B/16", "webli"),
            ("CLIP-B/16", "openai"),
            ("CLIP-B/16", "laion2b"),
            ("BEiT-B/16", "in22k_ft_in22k_in1k"),
            ("EVA-02-Ti/14", "mim_in22k"),
            ("EVA-02-B/14", "mim_in22k"),
            ("PE-Core-S/16", "fb"),
            ("PE-Spatial-S/16", "fb"),
            ("AIMv2-L/14", "apple_pt"),
            ("DINOv3-S/16", "lvd1689m"),
            ("DINOv3-S+/16", "lvd1689m"),
            ("DINOv3-S/16", "lvd1689m_qkvb"),
        ],
        *(0, 4, 7),
    ),
)
def test_weights_of_later_families_come_with_their_numerics(name: str, tag: str, serve: Serve, hub: Hub) -> None:
    entry = find_public_weights(slug(name), tag)
    config = small(name, **entry.numerics)
    tensors = serve(slug(name), tag, config)
    model = vitrail.load(f"{name}:{tag}", image=config.image)
    assert model.config == config
    assert_same(model.state_dict(), tensors)
    assert (model.card.preprocessing.mean, model.card.preprocessing.std) == (entry.mean, entry.std)
    assert model.card.provenance["licence"] == entry.licence
    assert hub.requests == [f"/{entry.repo}/resolve/main/model.safetensors"]


def test_terms_are_named_at_load_and_travel(serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    serve("vit_b_16", "mae", TI)
    model = vitrail.load("MAE-B/16:mae")
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warned) == 1
    assert "vit_b_16:mae is non-commercial (cc-by-nc-4.0)" in warned[0]
    vitrail.save(model, tmp_path / "model.safetensors")
    kept = vitrail.load(tmp_path / "model.safetensors").card.provenance
    assert kept["licence"] == "cc-by-nc-4.0"
    assert "not for commercial use" in kept["terms"]
    serve("vit_ti_16", "augreg_in21k", TI)
    vitrail.load("vit_ti_16:augreg_in21k")
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403])
def test_a_gate_says_how_it_is_opened(status: int, hub: Hub) -> None:
    hub.missing = status
    with pytest.raises(WeightsNotFound) as caught:
        vitrail.load("dinov3_s_16:lvd1689m")
    for words in ("gated", "accept the terms", "timm/vit_small_patch16_dinov3.lvd1689m", "HF_TOKEN"):
        assert words in str(caught.value)
    with pytest.raises(WeightsNotFound, match="HF_TOKEN") as caught:
        vitrail.load("vit_ti_16:augreg_in21k")
    assert "gated" not in str(caught.value)


def test_a_file_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(WeightsNotFound, match="answers 404"):
        create_model("vit_ti_16", weights="augreg_in21k")
    assert len(hub.requests) == 1


def test_a_file_that_is_no_weights(hub: Hub) -> None:
    hub.files["/timm/vit_tiny_patch16_224.augreg_in21k/resolve/main/model.safetensors"] = b"<html>" + bytes(100)
    with pytest.raises(CorruptWeights, match="is a web page or other markup"):
        create_model("vit_ti_16", weights="augreg_in21k")


def test_names_are_checked_before_anybody_is_asked(hub: Hub) -> None:
    with pytest.raises(UnknownName, match=r"unknown weights of vit_ti_16 'augreg_21k'; did you mean augreg_in21k"):
        create_model("vit_ti_16", weights="augreg_21k")
    with pytest.raises(UnknownName, match="unknown model 'vit_ty_16'; did you mean"):
        create_model("vit_ty_16", weights="augreg_in21k")
    with pytest.raises(UnknownName, match="no public weights of 'vit_nano_4'"):
        create_model("ViT-Nano/4", weights="augreg_in21k")
    assert not hub.requests


def test_without_weights_a_network_is_fresh() -> None:
    torch.manual_seed(0)
    model = create_model("ViT-Nano/4", classes=3, image_size=(16, 24), dropout=0.1)
    assert model.config == replace(model_config("vit_nano_4"), classes=3, image=(16, 24), dropout=0.1)
    assert model.card.preprocessing == Preprocessing(image=(16, 24))
    assert not model.head.classifier.weight.count_nonzero()
    assert model.blocks[0].mlp.expand.weight.std() > 0
    with pytest.raises(ConfigError, match="image_size or image, not both"):
        create_model("ViT-Nano/4", image_size=16, image=(16, 16))


def test_load_takes_every_way_in(serve: Serve, tmp_path: Path) -> None:
    serve("vit_ti_16", "augreg_in21k", TI)
    public = create_model("ViT-Ti/16", weights="augreg_in21k")
    images = torch.randn(2, 3, 64, 64)
    loaded = vitrail.load("ViT-Ti/16:augreg_in21k")
    assert torch.equal(loaded(images), public(images))
    assert loaded.card == public.card
    assert vitrail.load("ViT-Ti/16:augreg_in21k", classes=3, dropout=0.1).config.dropout == 0.1
    vitrail.save(public, tmp_path / "last.safetensors")
    for way in (tmp_path / "last.safetensors", tmp_path, str(tmp_path)):  # a file, and the folder of a run
        assert torch.equal(vitrail.load(way)(images), public(images))
    assert vitrail.load("vitrail-cifar10").config.classes == 10
    for wrong in ("ViT-Ti/16:nonsense", "nonsense:augreg_in21k", str(tmp_path / "none")):
        with pytest.raises(VitrailError):
            vitrail.load(wrong)
