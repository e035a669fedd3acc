"""The public functions: the numbers of the commands, as values, from every way in."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch

import vitrail
from tests.tasks.segmentation.drawn import CLASSES, draw_folder
from vitrail.checkpoint.bundle import get_card
from vitrail.cli import main
from vitrail.core.errors import ConfigError, DataError, WeightsNotFound
from vitrail.evaluation.result import Result
from vitrail.models.build import Model
from vitrail.train import loop
from vitrail.train.config import Run

WEIGHTS = "tiny.safetensors"
PHOTOS = 5  # of each class and split


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn shapes as a folder with a train and a test split."""
    folder = tmp_path_factory.mktemp("api")
    torch.manual_seed(0)
    vitrail.save(vitrail.create_model("ViT-Nano/4", image_size=16, depth=2, classes=3), folder / WEIGHTS)
    shapes = vitrail.open_collection("shapes")
    for split in ("train", "test"):
        source, counts = shapes.split(split), [0] * len(shapes.classes)
        for at in range(150):
            label = source.labels[at][0]
            if label < 3 and counts[label] < PHOTOS:
                counts[label] += 1
                path = folder / "photos" / split / shapes.classes[label] / f"{at}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                source.open_image(at).rgb().save(path)
        assert counts[:3] == [PHOTOS] * 3
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return place


def test_fit_and_evaluate_give_the_numbers_of_the_commands(here: Path, tmp_path: Path) -> None:
    fitted = vitrail.fit(WEIGHTS, "photos", device="cpu")
    assert fitted.scored is not None
    out, result = str(tmp_path / "w.safetensors"), tmp_path / "result.json"
    assert main(["fit", WEIGHTS, "photos", "--out", out, "--device", "cpu", "--workers", "0"]) == 0
    for name, tensor in vitrail.load(out).state_dict().items():
        assert torch.equal(tensor, fitted.model.state_dict()[name]), name

    words = ["evaluate", out, "photos", "--out", str(result), "--device", "cpu", "--workers", "0"]
    assert main(words) == 0
    score = vitrail.evaluate(out, Path("photos"), device="cpu")
    expected = Result.read(result)
    assert score.result.measures == expected.measures
    assert (score.split, score.count, score.left_out) == ("test", 3 * PHOTOS, 0)
    assert score.top1 == fitted.scored.top1.value == score.measures["top-1"].value
    assert score.top5 is None
    assert score.mean_average_precision is None


@pytest.mark.slow
def test_a_network_is_scored_as_its_file_is_and_stays_as_it_was(here: Path) -> None:
    model = vitrail.load(WEIGHTS).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitted = vitrail.fit(model, vitrail.open_collection("photos"), device="cpu", cache=False)
    assert model.training
    again = vitrail.fit(WEIGHTS, "photos", device="cpu", cache=False)
    assert torch.equal(fitted.model.get_classifier().weight, again.model.get_classifier().weight)
    score = vitrail.evaluate(fitted.model, "photos", precision="bfloat16", device="cpu")
    assert score.count == 3 * PHOTOS
    assert {tensor.dtype for tensor in fitted.model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_images_that_were_learnt_from_are_left_out(here: Path) -> None:
    fitted = vitrail.fit(WEIGHTS, "photos", device="cpu", shots=2)
    score = vitrail.evaluate(fitted.model, "photos@train", device="cpu")
    assert (score.count, score.left_out) == (3 * (PHOTOS - 2), 3 * 2)
    whole = vitrail.evaluate(fitted.model, "photos@train", device="cpu", include_seen=True)
    assert (whole.count, whole.left_out) == (3 * PHOTOS, 0)
    with pytest.raises(DataError):
        vitrail.evaluate(vitrail.fit(WEIGHTS, "photos", device="cpu").model, "photos@train", device="cpu")


def test_mistakes_raise_the_package_s_own_errors(here: Path) -> None:
    with pytest.raises(ConfigError):
        vitrail.fit(WEIGHTS, "photos", l2=-1.0, device="cpu")
    with pytest.raises(ConfigError):
        vitrail.fit(WEIGHTS, "photos", dev=1.0, device="cpu")
    with pytest.raises(ConfigError):
        vitrail.evaluate(WEIGHTS, "photos", threshold=0.5, device="cpu")
    with pytest.raises(ConfigError):
        vitrail.evaluate(WEIGHTS, "photos", windows="fit", device="cpu")
    with pytest.raises(ConfigError):
        vitrail.evaluate(WEIGHTS, "photos", seed=-1, device="cpu")
    with pytest.raises(WeightsNotFound):
        vitrail.evaluate("nowhere", "photos", device="cpu")
    with pytest.raises(DataError):
        vitrail.evaluate(WEIGHTS, "nowhere", device="cpu")


def test_features_are_what_the_last_layer_reads(here: Path) -> None:
    model = vitrail.load(WEIGHTS).train()
    train = vitrail.extract_features(model, "photos@train", device="cpu")
    assert model.training
    assert (train.split, train.classes) == ("train", vitrail.open_collection("photos").classes)
    assert train.labels.tolist() == [label for label in range(3) for _ in range(PHOTOS)]
    assert [Path(name).parent.name for name in train.names] == [train.classes[label] for label in train.labels]
    images = sorted(Path("photos/train").glob("*/*.png"))
    assert torch.allclose(train.features, vitrail.Predictor(WEIGHTS, device="cpu").features(images), atol=1e-5)
    again = vitrail.extract_features(WEIGHTS, vitrail.open_collection("photos@train"), cache=False, device="cpu")
    assert torch.equal(again.features, train.features)
    near = vitrail.find_nearest(train.features, train.features, k=2)
    assert near.index[:, 0].tolist() == list(range(3 * PHOTOS))
    with pytest.raises(ConfigError):  # of two networks
        vitrail.find_nearest(train.features, train.features[:, :8], k=2)
    with pytest.raises(DataError):  # which split?
        vitrail.extract_features(WEIGHTS, "photos", device="cpu")


def test_features_of_images_without_labels_leave_out_what_cannot_be_read(here: Path, tmp_path: Path) -> None:
    for number, image in enumerate(sorted(Path("photos/test").glob("*/*.png"))[:3]):
        (tmp_path / f"{number}.png").write_bytes(image.read_bytes() if number else b"no image")
    found = vitrail.extract_features(WEIGHTS, tmp_path, precision="bfloat16", device="cpu")
    assert (found.features.shape, found.features.dtype) == ((2, 96), torch.float32)
    assert (found.labels.tolist(), found.classes) == ([-1, -1], ())
    assert [Path(name).name for name in (*found.names, *found.unreadable)] == ["1.png", "2.png", "0.png"]


def train_digits(out: Path) -> vitrail.Trained:
    settings: dict[str, object] = {"schedule.warmup": 1, "data.part": 0.05, "evaluation.every": 2}
    return vitrail.train("digits", out=out, steps=3, batch=8, settings=settings, device="cpu")


def test_a_training_is_a_call_and_the_same_call_finds_it_done(here: Path, tmp_path: Path) -> None:
    run = train_digits(tmp_path / "a")
    assert (run.state, run.step, run.folder) == ("done", 3, tmp_path / "a")
    assert run.accuracy == run.scores["test"]["accuracy"]
    assert [row["step"] for row in run.metrics if row["kind"] == "train"][-1] == 3
    again = train_digits(tmp_path / "a")
    assert (again.state, again.step, again.accuracy) == ("done", 3, run.accuracy)
    with pytest.raises(ConfigError):  # it holds another run
        vitrail.train("digits", out=tmp_path / "a", steps=4, batch=8, seed=1, device="cpu")


@pytest.mark.slow
def test_a_training_is_that_of_the_command(here: Path, tmp_path: Path) -> None:
    run = train_digits(tmp_path / "a")
    words = "--steps 3 --batch 8 --set schedule.warmup=1 --set data.part=0.05 --set evaluation.every=2 --device cpu"
    assert main(["pretrain", "digits", "--out", str(tmp_path / "b"), *words.split()]) == 0
    expected = vitrail.load(tmp_path / "b").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.model.state_dict().items())
    score = vitrail.evaluate(run.folder, "digits", device="cpu")
    assert (score.top1, score.count) == (run.accuracy, run.scores["test"]["count"])
    assert main(["pretrain", "--resume", str(tmp_path / "a"), "--device", "cpu"]) == 0


@pytest.mark.slow
def test_a_fine_tuning_scores_what_it_held_out(here: Path, tmp_path: Path) -> None:
    run = vitrail.finetune(WEIGHTS, Path("photos"), out=tmp_path / "tuned", steps=2, device="cpu")
    assert run.state == "done"
    assert any("steps" in line for line in run.choices)
    assert run.model.card.labels == vitrail.open_collection("photos").classes
    score = vitrail.evaluate(run.folder, "photos", device="cpu")
    assert (score.top1, score.count) == (run.accuracy, 3 * PHOTOS)
    assert vitrail.Predictor(run.weights, device="cpu").labels == run.model.card.labels


@pytest.mark.parametrize(
    "words",
    [
        {"recipe": "nonsense"},
        {"recipe": "digits", "steps": 0},
        {"recipe": "digits", "steps": 2, "epochs": 1.0},
        {"recipe": "digits", "lr": 0.1, "settings": {"optim.lr": 0.2}},
        {"recipe": "digits", "settings": {"optim.nonsense": 0.2}},
    ],
)
def test_a_training_that_cannot_be_is_refused_before_anything_is_written(words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(vitrail.VitrailError):
        vitrail.train(**words, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError):
        vitrail.finetune("vitrail-cifar10")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Nano/4", {"image_size": (16, 24), "classes": 3, "depth": 2}),
        ("vit_nano_4", {"classes": 0}),
        ("BiT-mini-R14", {"classes": 5}),
        ("vit_tiny_patch16_384", {}),
        ("vit_tiny_patch16_384", {"img_size": 64, "num_classes": 7}),
        ("vit_tiny_patch16_384", {"image": (32, 48)}),
    ],
)
def test_a_config_is_that_of_the_network_and_costs_nothing(name: str, changes: dict[str, Any]) -> None:
    config = vitrail.create_config(name, **changes)
    model = vitrail.create_model(name, **changes)
    assert config == model.config
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_network_is_built_from_a_config() -> None:
    own = vitrail.ViTConfig(width=48, depth=2, mlp_width=96, heads=4, image=(28, 28), patch=(7, 7), channels=1)
    torch.manual_seed(0)
    model = vitrail.create_model(own, classes=10)
    assert model.config == vitrail.create_model(own, num_classes=10).config
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    torch.manual_seed(0)
    named = vitrail.create_model(vitrail.create_config("ViT-Nano/4", depth=1, classes=2))
    torch.manual_seed(0)
    same = vitrail.create_model("ViT-Nano/4", depth=1, classes=2)
    assert all(torch.equal(tensor, same.state_dict()[key]) for key, tensor in named.state_dict().items())
    refused: list[dict[str, Any]] = [{"pretrained": True}, {"weights": "augreg_in21k"}, {"nonsense": 1}]
    for wrong in [*refused, {"classes": 0, "num_classes": 3}]:
        with pytest.raises(vitrail.VitrailError):
            vitrail.create_model(own, **wrong)
    with pytest.raises(vitrail.VitrailError):
        vitrail.create_config("ViT-H/14", image_size=384)


def test_a_network_to_finetune_is_asked_for_as_a_file() -> None:
    with pytest.raises(ConfigError, match=r"vitrail\.save"):
        vitrail.finetune(cast(Any, vitrail.create_model("ViT-Nano/4")), "digits")


class PlannedError(Exception):
    """Ends a call before its first step."""


def plan(call: Any, *words: Any, **more: Any) -> Run:
    """The run that a call would start."""

    def stop(run: Run, **_: Any) -> NoReturn:
        raise PlannedError(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", stop)
        with pytest.raises(PlannedError) as planned:
            call(*words, steps=2, batch=4, device="cpu", **more)
    return cast(Run, planned.value.args[0])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with masks."""
    return draw_folder(tmp_path_factory.mktemp("drawn"))


def test_a_decoder_is_asked_for_as_in_the_commands(here: Path, drawn: Path) -> None:
    assert not plan(vitrail.finetune, WEIGHTS, drawn).model.has_queries
    for decoder, kind in (("eomt", vitrail.EoMTConfig), ("pmt", vitrail.PMTConfig)):
        tuned = plan(vitrail.finetune, WEIGHTS, drawn, decoder=decoder)
        trained = plan(vitrail.train, "digits", drawn, task="segmentation", decoder=decoder)
        assert isinstance(tuned.model, kind)
        assert isinstance(trained.model, kind)
    for data, decoder in (("photos", "eomt"), (drawn, "nonsense")):
        with pytest.raises(ConfigError):
            vitrail.finetune(WEIGHTS, data, decoder=decoder, device="cpu")


def segmenter() -> Model:
    torch.manual_seed(0)
    model = vitrail.create_model("ViT-Nano/4", image_size=16, depth=1, classes=3, head="patches")
    model.card = replace(get_card(model), task="segmentation", labels=CLASSES)
    return model


def test_sliding_windows_give_the_numbers_of_the_command(here: Path, drawn: Path, tmp_path: Path) -> None:
    model, weights, out = segmenter(), str(tmp_path / "w.safetensors"), tmp_path / "result.json"
    vitrail.save(model, weights)
    words = ["--windows", "full", "--out", str(out), "--device", "cpu", "--workers", "0"]
    assert main(["evaluate", weights, str(drawn), *words]) == 0
    score = vitrail.evaluate(model, drawn, windows="full", device="cpu")
    assert score.result.measures == Result.read(out).measures
    assert score.result.config["windows"] == "full"
    with pytest.raises(ConfigError):
        vitrail.evaluate(model, drawn, windows=cast(Any, "nonsense"), device="cpu")


@pytest.mark.slow
def test_queries_are_trained_scored_and_predict(here: Path, drawn: Path, tmp_path: Path) -> None:
    run = vitrail.finetune(WEIGHTS, drawn, decoder="eomt", out=tmp_path / "run", steps=2, batch=4, device="cpu")
    assert isinstance(run.model.config, vitrail.EoMTConfig)
    assert "mIoU" in vitrail.evaluate(run.folder, drawn, windows="fit", device="cpu").measures
    assert isinstance(vitrail.Predictor(run.folder, device="cpu")(drawn / "test/images/00.png"), vitrail.PredictedMask)
