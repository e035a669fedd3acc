"""`vitrail fit`: what it prints and writes, that the file is a network like any other, and what it refuses."""

import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vitrail
from tests.cli.test_frozen import folder, picture
from tests.models.tiny import VIT, awake
from tests.tasks.segmentation.drawn import draw_folder
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.cli.use import fit
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.result import Result

Run = Callable[..., str]
CLASS_ROW = re.compile(r"^ *(ground|disc|bar) +[\d.]+%", re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = awake(VIT, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=VIT.image), labels=tuple("abcde"))
    save(model, "weights.safetensors")
    folder(tmp_path / "photos", {"train": 12, "test": 9})
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*more: str, data: str = "photos", out: str = "out.safetensors", status: int = 0) -> str:
        words = ["fit", "weights.safetensors", data, "--out", out, "--workers", "0", "--device", "cpu", *more]
        assert main(words) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return run


def test_a_folder_becomes_a_classifier(here: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(out="new/photos.safetensors")
    assert "photos: 3 classes; images: 36 of train, 27 of test" in said
    assert "learned from 36 images of train, 16 features each, extracted and cached" in said
    assert re.search(r"estimated accuracy: [\d.]+% \(95% interval [\d.]+–[\d.]+\), on 32 images", said)
    assert "logits" not in said
    scored = re.search(r"test: accuracy ([\d.]+%) \(95% interval [\d.]+–[\d.]+, 27 images\)", said)
    assert scored
    assert re.search(r"^network: new/photos\.safetensors \([\d.]+ kB\), in [\d.]+ s$", said, re.MULTILINE)
    assert "next: vitrail predict new/photos.safetensors IMAGE...   or   vitrail serve new/photos.safetensors" in said
    model = vitrail.load("new/photos.safetensors")
    assert model.card is not None
    assert model.card.labels == ("blue", "green", "red")
    assert model.card.provenance["made_by"] == "vitrail fit"
    assert model.card.provenance["from"]["weights"] == "weights.safetensors"
    # And as any other command sees the file:
    words = ["evaluate", "new/photos.safetensors", "--data", "photos", "--out", "r.json", "--workers", "0"]
    assert main(words) == 0
    capsys.readouterr()
    found = Result.read(here / "r.json").measures[0]
    assert f"{100 * found.value:.2f}%" == scored[1]
    assert found.value > 0.6


@pytest.mark.slow
def test_the_same_again_is_the_same_file_from_kept_features(here: Path, run: Run) -> None:
    run(out="a.safetensors")
    assert "from the cache" in run(out="b.safetensors")
    assert (here / "a.safetensors").read_bytes() == (here / "b.safetensors").read_bytes()
    assert "extracted again" in run("--no-cache", out="c.safetensors")
    assert (here / "a.safetensors").read_bytes() == (here / "c.safetensors").read_bytes()


@pytest.mark.slow
def test_what_may_be_said_otherwise(here: Path, run: Run) -> None:
    assert "l2 3, as given" in run("--l2", "3")
    assert "learned from 6 images of train" in run("--shots", "2")
    assert "(l2 1024)" in run("--dev", "0")
    assert "ViT, 0.00M parameters, 12x12 px" in run("--image-size", "12")
    assert vitrail.load("out.safetensors").config.image == (12, 12)


@pytest.mark.slow
def test_pictures_without_a_test_and_elsewhere(here: Path, run: Run) -> None:
    said = run(data="photos/train")
    assert "not evaluated" in said
    said = run("--test", "photos/test", data="photos/train")
    assert re.search(r"^test@train: accuracy [\d.]+% .* 27 images", said, re.MULTILINE)
    with tarfile.open(here / "set.tar", "w") as archive:
        for at, name in enumerate(("blue", "green", "red", "blue", "green", "red")):
            picture(name, at).save(here / "p.png")
            (here / "p.cls").write_text(str(at % 3))
            archive.add(here / "p.png", f"{at}.png")
            archive.add(here / "p.cls", f"{at}.cls")
    assert "learned from 6 images" in run(data="set.tar")


def test_bad_pictures_are_named(here: Path, run: Run) -> None:
    (here / "photos" / "train" / "red" / "3.png").write_bytes(b"no image")
    said = run()
    assert re.search(r"^note: skipped 1 unreadable image of train: .*red/3\.png$", said, re.MULTILINE)
    assert "learned from 35 images" in said


def test_what_is_refused_says_what_to_do(here: Path, run: Run) -> None:
    assert "a network is written as .safetensors; name it m.safetensors" in run(out="m.pt", status=2)
    assert "is the weight file itself" in run(out="weights.safetensors", status=2)
    assert "--l2 -1 must be above 0" in run("--l2=-1", status=2)
    assert "--dev 1 must be at least 0 and below 1" in run("--dev", "1", status=2)
    assert "--shots 0 must be at least 1" in run("--shots", "0", status=2)
    assert "neither a path nor a known set" in run(data="nowhere", status=2)
    (here / "flat").mkdir()
    assert "flat" in run(data="flat", status=2)  # nothing in it
    picture("red", 0).save(here / "flat" / "a.png")
    assert "flat has no labels: put the images of each class into a folder" in run(data="flat", status=2)
    (here / "one" / "red").mkdir(parents=True)
    picture("red", 0).save(here / "one" / "red" / "a.png")
    assert "one has one class, 'red'" in run(data="one", status=2)
    assert not (here / "out.safetensors").exists()


def test_one_picture_a_class(here: Path, run: Run) -> None:
    for name in ("red", "blue"):
        (here / "two" / name).mkdir(parents=True)
        picture(name, 0).save(here / "two" / name / "a.png")
    said = run(data="two")
    assert "learned from 2 images" in said
    assert "note: nothing was held out" in said
    assert vitrail.load("out.safetensors").config.classes == 2


def test_images_with_masks_become_a_segmenter(
    here: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_folder(here / "discs")
    said = run("--rename", "disc=ball", data="discs")
    assert "discs: 3 classes of pixels; images: 24 of train, 8 of test" in said
    assert re.search(r"learned from 24 images of train, \d+ patches each, solved in [\d.]+ s without the network", said)
    assert re.search(r"estimated mIoU: [\d.]+%, on [\d,]+ pixels of 2 images held out \(l2", said)
    scored = re.search(r"mIoU +([\d.]+)% +[\d.]+–[\d.]+", said)
    assert scored
    assert CLASS_ROW.findall(said) == ["ground", "disc", "bar"]
    model = vitrail.load("out.safetensors")
    assert model.card is not None
    assert (model.card.task, model.card.labels) == ("segmentation", ("ground", "ball", "bar"))
    with monkeypatch.context() as patch:
        patch.setattr(fit, "PRINTED", 2)
        many = run(data="discs", out="plain.safetensors")
    assert "IoU of each of the 3 classes: vitrail evaluate FILE DATA --page score.html" in many
    assert not CLASS_ROW.search(many)
    words = ["evaluate", "plain.safetensors", "--data", "discs", "--out", "r.json", "--workers", "0"]
    assert main(words) == 0
    capsys.readouterr()
    found = Result.read(here / "r.json").measures[0]
    assert (found.name, f"{100 * found.value:.2f}") == ("mIoU", scored[1])
    assert "is for classes of whole images" in run("--shots", "3", data="discs", status=2)
    assert "photos has no masks" in run("--task", "segmentation", status=2)
    assert "panoptic" in run("--task", "panoptic", data="discs", status=2)
    assert "has no labels" in run("--task", "classification", data="discs", status=2)


def test_the_penalty_is_not_only_of_a_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    assert "L2 penalty of the new last layer" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_fine_tuning_prints_it_beside_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "--from", "weights.safetensors", "--data", "photos", "--device", "cpu", "--out", "run"]
    settings = ("steps=4", "schedule.warmup=1", "baseline=on", "data.workers=0")
    assert main([*words, *(word for one in settings for word in ("--set", one))]) == 0
    said = capsys.readouterr().out
    first = re.search(r"^a linear classifier on the frozen features.*: ([\d.]+%) of 27 test images", said, re.MULTILINE)
    assert first
    assert re.search(rf"^test: accuracy .* {first[1]}$", said, re.MULTILINE)
