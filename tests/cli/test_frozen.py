"""`vitrail fewshot`, `probe` and `knn`: what they print and write, what they share, and what they refuse."""

import io
import itertools
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.tiny import VIT
from vitrail.checkpoint.weights import build_fresh, save
from vitrail.cli.app import main
from vitrail.evaluation.result import Result

COLOURS = {"blue": (40, 60, 200), "green": (40, 190, 60), "red": (200, 50, 40)}
Run = Callable[..., str]


def picture(name: str, seed: int) -> Image.Image:
    """A colour with a good deal of noise."""
    rng = np.random.default_rng([seed, *COLOURS[name]])
    pixels = np.array(COLOURS[name]) * 0.4 + rng.normal(90, 45, 3) * 0.6 + rng.normal(0, 30, (24, 20, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def folder(root: Path, counts: dict[str, int]) -> None:
    for split, count in counts.items():
        for at, name in enumerate(COLOURS):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                seed = 1000 * len(split) + 100 * at + number
                picture(name, seed).save(root / split / name / f"{number}.png")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    save(build_fresh(VIT), "weights.safetensors")
    folder(tmp_path / "photos", {"train": 12, "test": 9})
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *more: str, data: str = "photos", status: int = 0) -> str:
        words = [command, "weights.safetensors", "--data", data, "--workers", "0", "--device", "cpu", *more]
        assert main(words) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return run


def row(said: str, first: str) -> list[str]:
    """The line of a table that begins so."""
    return next(line.split() for line in said.splitlines() if line.split()[:1] == [first])


def column(said: str) -> list[str]:
    """The first cells of the table that is printed."""
    body = said.partition("──\n")[2] or said.partition("── \n")[2]
    return [line.split()[0] for line in itertools.takewhile(str.strip, body.splitlines())]


def test_features_are_extracted_once_for_all_three(here: Path, run: Run) -> None:
    said = run("fewshot", "--shots", "1", "5", "all", "--out", "few.json")
    assert "photos: 3 classes; learned from 36 of train, scored on 27 of test;" in said
    assert "16 features each, extracted and cached" in said
    files = sorted((here / "cache" / "features").iterdir())
    assert len(files) == 2
    for command in ("fewshot", "probe", "knn"):
        assert "16 features each, from the cache" in run(command)
    assert sorted((here / "cache" / "features").iterdir()) == files
    result = Result.read(here / "few.json")
    assert [measure.name for measure in result.measures] == ["1-shot", "5-shot", "all shots"]
    assert result.kind == "fewshot"
    assert result.config["penalty"] == 1024
    assert result.data["train"]["pictures"] == 36
    for measure in result.measures:
        seeds = result.details["by_seed"][measure.name]
        assert len(seeds) == (1 if measure.name == "all shots" else 3)
        assert measure.value == pytest.approx(sum(seeds) / len(seeds))
        assert measure.low is not None
        assert measure.high is not None
        assert measure.low < measure.value < measure.high
        assert measure.count == 27
        shown = row(said, measure.name.split("-")[0].split()[0])
        assert shown[1] == f"{100 * measure.value:.2f}%"
        assert shown[3 if len(seeds) == 1 else 4 :] == ([] if len(seeds) == 1 else [f"{100 * s:.2f}" for s in seeds])
    assert result.measures[-1].value > 0.6  # colours are seen by any network


@pytest.mark.slow
def test_the_cache_can_be_left_alone(here: Path, run: Run) -> None:
    assert "extracted again" in run("knn", "--no-cache")
    assert not (here / "cache" / "features").exists()
    run("knn")
    assert "extracted again" in run("knn", "--no-cache")


def test_probe_says_how_it_ended(here: Path, run: Run) -> None:
    said = run("probe", "--out", "probe.json")
    assert "the best of 8 on a tenth of train" in said
    result = Result.read(here / "probe.json")
    assert [measure.name for measure in result.measures] == ["probe top-1"]  # of three classes five guesses are no test
    assert result.details["converged"] is True
    assert result.details["gradient"] <= 1e-6
    assert len(result.details["dev_accuracy"]) == 8
    assert f"{100 * result.measures[0].value:.2f}%" == row(said, "probe")[2]
    said = run("probe", "--penalty", "0.001", "--iterations", "2")
    assert "penalty 0.001, as given; 2 iterations" in said
    assert "note: not converged" in said


def test_knn_shows_both_votes(here: Path, run: Run) -> None:
    said = run("knn", "-k", "1", "7", "--out", "knn.json")
    result = Result.read(here / "knn.json")
    assert [measure.name for measure in result.measures] == ["1-nn", "1-nn plain", "7-nn", "7-nn plain"]
    one, plain = result.measures[:2]
    assert one.value == plain.value  # a single vote
    assert row(said, "7")[1::2] == [f"{100 * measure.value:.2f}%" for measure in result.measures[2:]]
    assert column(run("knn")) == ["1", "5", "10", "20"]  # 50 are not there
    assert "-k 37 exceeds the 36 training images" in run("knn", "-k", "37", status=2)


def test_the_sweep_takes_one_penalty_for_all_sets(here: Path, run: Run) -> None:
    folder(here / "more", {"train": 5, "val": 4})
    said = run("fewshot", "--data", "more", "--sweep", "--shots", "1", "5", "--out", "sweep.json")
    results = [Result.read(here / f"sweep-{name}.json") for name in ("photos", "more")]
    assert results[0].config["penalty"] == results[1].config["penalty"]
    assert results[0].config["ranked_over"] == ["photos", "more"]
    assert results[1].data["split"] == "val"
    for result in results:
        penalty = result.config["penalty"]["5-shot"]
        assert result.details["by_penalty"]["5-shot"][f"{penalty:g}"] == result.measures[1].value
        assert len(result.details["by_penalty"]["5-shot"]) == 30
    assert column(said) == ["photos", "photos", "more", "more"]
    assert "omit --seeds and --penalty" in run("fewshot", "--sweep", "--seeds", "1", status=2)
    assert "names a data set twice" in run("fewshot", "--data", "photos", status=2)


def test_where_the_pictures_to_score_are(here: Path, run: Run) -> None:
    folder(here / "single", {"train": 8})
    refused = run("fewshot", "--shots", "1", data="single", status=2)
    assert "single has only train" in refused
    assert "--test DATA" in refused
    assert "--held-out 0.5" in refused
    said = run("fewshot", "--shots", "1", "--held-out", "0.25", "--out", "held.json", data="single")
    assert "learned from 18 of train, scored on 6 held out of it" in said
    data = Result.read(here / "held.json").data
    assert (data["split"], data["pictures"], data["train"]["pictures"]) == ("0.25 of train", 6, 18)
    assert data["fingerprint"] != data["train"]["fingerprint"]
    said = run("knn", "--test", "photos", "--out", "there.json", data="single")
    assert "learned from 24 of train, scored on 27 of photos@test" in said
    data = Result.read(here / "there.json").data
    assert (data["name"], data["split"], data["train"]["name"]) == ("photos", "test", "single")
    assert "give one of them" in run("knn", "--test", "photos", "--held-out", "0.5", status=2)
    folder(here / "other", {"test": 2})
    (here / "other/test/green").rename(here / "other/test/grey")
    refused = run("knn", "--test", "other", data="single", status=2)
    assert "single: other@test has classes that train lacks: grey" in refused


def test_shots_that_a_class_has_not(here: Path, run: Run) -> None:
    said = run("fewshot")
    assert "note: photos: class 'blue' has 12 images with one label in train, too few for 25 shots" in said
    assert column(said) == ["1", "5", "10"]
    refused = run("fewshot", "--shots", "5", "13", status=2)
    assert "13 shots need 13 of every class; ask for --shots 5" in refused
    assert "must be at least 1" in run("fewshot", "--shots", "0", status=2)
    assert "must be above 0" in run("fewshot", "--penalty", "0", status=2)


def test_a_picture_that_cannot_be_read_is_out_and_named(here: Path, run: Run) -> None:
    (here / "photos/test/red/3.png").write_bytes(b"no image")
    (here / "photos/train/red/3.png").write_bytes(b"no image")
    for command in ("fewshot", "probe", "knn"):  # all but the first from the cache
        said = run(command, "--out", "result.json")
        assert "learned from 35 of train, scored on 26 of test" in said
        assert "note: test: skipped 1 unreadable image: test/red/3.png\n" in said
        result = Result.read(here / "result.json")
        assert result.measures[0].count == 26
        assert len(result.details["unreadable"]) == 2


def tar(path: Path, count: int, labels: Callable[[int], dict[str, object]], *, seed: int = 0) -> None:
    """Tar shards, the labels of each image in a JSON file."""
    with tarfile.open(path, "w") as archive:
        for at in range(count):
            image = io.BytesIO()
            picture(list(COLOURS)[at % 3], seed + at).save(image, "png")
            for suffix, body in (("png", image.getvalue()), ("json", json.dumps(labels(at)).encode())):
                member = tarfile.TarInfo(f"{at:03}.{suffix}")
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))


@pytest.mark.slow
def test_several_labels_are_scored_by_any_and_learnt_from_where_there_is_one(here: Path, run: Run) -> None:
    tar(here / "train.tar", 24, lambda at: {"labels": [at % 3] if at % 4 else [0, 1, 2]})
    tar(here / "test.tar", 12, lambda at: {"labels": [] if at == 0 else [0, 1, 2]}, seed=100)
    for command in ("fewshot", "probe", "knn"):
        said = run(command, "--test", "test.tar", "--out", "result.json", data="train.tar")
        assert "learned from 18 of train, scored on 12 of test.tar@" in said
        assert "note: 6 of train have no label or several, and are not used for training" in said
        result = Result.read(here / "result.json")
        assert result.measures[0].value == 1.0  # any answer is one of the three
        assert result.measures[0].count == 11
    tar(here / "train.tar", 24, lambda at: {"labels": [0, 1, 2]})
    for command in ("probe", "knn"):
        assert "exactly one label" in run(command, "--test", "test.tar", data="train.tar", status=2)
    assert "class '0' has 0 images with one label" in run("fewshot", "--test", "test.tar", data="train.tar", status=2)


@pytest.mark.slow
def test_the_references_view_and_the_precision_are_other_features(here: Path, run: Run) -> None:
    run("knn", "--out", "plain.json")
    weights = Result.read(here / "plain.json").weights["hash"]
    for more in (["--reference"], ["--precision", "bfloat16"], ["--image-size", str(2 * VIT.image[0])]):
        assert "extracted and cached" in run("knn", *more, "--out", "result.json")
        assert "from the cache" in run("knn", *more)
        assert Result.read(here / "result.json").weights["hash"] == weights


def test_a_number_of_shots_that_is_none_is_called_by_its_option(here: Path, run: Run) -> None:
    assert "--shots: 'few' is not a count" in run("fewshot", "--shots", "few", status=2)
    assert f"{here / 'photos'} is a folder" in run("fewshot", "--out", str(here / "photos"), status=2)


@pytest.mark.parametrize("command", ["fewshot", "probe"])
def test_a_penalty_without_end_is_refused(run: Run, here: Path, command: str) -> None:
    assert "--penalty inf" in run(command, "--penalty", "inf", status=2)


def test_iterations_are_refused_before_anything_is_read(run: Run, here: Path) -> None:
    assert "--iterations 0 must be at least 1" in run("probe", "--iterations", "0", status=2)
    assert not (here / "cache").exists()


def test_features_that_could_not_be_kept_are_not_said_to_be(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(here / "file"))
    said = run("knn", "-k", "1")
    assert "features each, extracted again" in said
    assert "cached" in said
