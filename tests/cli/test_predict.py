"""`vitrail predict` answers for every image in order, names what it passes over, and exits by what happened."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.models.tiny import HYBRID, RESNET, VIT
from tests.predict.pictures import CLASSES, drawn, folder_of, network, weights
from vitrail.checkpoint.known_weights import BUNDLED, DEFAULT_WEIGHTS
from vitrail.checkpoint.weights import save
from vitrail.cli.app import main
from vitrail.cli.use import predict as predict_output
from vitrail.cli.use import predict_inputs as predict_pictures
from vitrail.cli.use.predict import AttentionImages, crop_view
from vitrail.cli.use.predict_inputs import StdinNames, is_weights, list_images, split_words
from vitrail.core.errors import DataError
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.rollout import overlay, rollout
from vitrail.predict.predictor import Predictor
from vitrail.tasks.classification.task import CLASSIFICATION

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return weights(tmp_path)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny network in the place of the one that comes with the package."""
    (tmp_path / "inside").mkdir()
    save(network(VIT), tmp_path / "inside" / "w.safetensors")
    monkeypatch.setitem(BUNDLED, DEFAULT_WEIGHTS, str(tmp_path / "inside" / "w.safetensors"))


def told(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    """The lines of --json."""
    main(["predict", *words, "--json", "--device", "cpu"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_picture_in_order_and_as_the_predictor_says(tmp_path: Path, path: str, capsys: Capture) -> None:
    names = folder_of(tmp_path / "a folder", 7) + folder_of(tmp_path / "b" / "ünter" / "日本", 3, "webp")
    rows = told(capsys, path, str(tmp_path / "a folder"), str(tmp_path / "b"), "--batch", "4", "--topk", "2")
    assert [row["path"] for row in rows] == names
    for row, prediction in zip(rows, vitrail.predictor(path, device="cpu")(names, topk=2), strict=True):
        assert [answer["label"] for answer in row["top"]] == [answer.label for answer in prediction.top]
        assert row["top"][0]["probability"] == pytest.approx(prediction.probability, abs=1e-6)


@pytest.mark.parametrize("workers", ["0", "1", "3"])
def test_what_cannot_be_read_is_named_and_the_rest_goes_on(
    tmp_path: Path, path: str, capsys: Capture, workers: str
) -> None:
    names = folder_of(tmp_path / "p", 6)
    Path(names[2]).write_bytes(b"")
    (tmp_path / "p" / "text.jpg").write_text("hello")
    (tmp_path / "p" / "broken.jpg").symlink_to("nowhere")
    (tmp_path / "p" / "notes.txt").write_text("x")
    (tmp_path / "p" / "loop").symlink_to(tmp_path / "p")
    words = ["predict", path, str(tmp_path / "p"), "gone.png", "--workers", workers, "--batch", "2"]
    assert main([*words, "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert [line.partition(": ")[0] for line in said.out.splitlines()] == [n for n in names if n != names[2]]
    for line in (
        f"vitrail: skipped {names[2]}: empty file",
        f"vitrail: skipped {tmp_path / 'p' / 'text.jpg'}: not an image: starts with 'hello'",
        f"vitrail: skipped {tmp_path / 'p' / 'broken.jpg'}: No such file or directory",
        "vitrail: skipped gone.png: No such file or directory",
        f"vitrail: {tmp_path / 'p'}: skipped 1 file without an image suffix",
        "vitrail: 4 of 9 images were unreadable",
    ):
        assert line in said.err.splitlines()
    rows = told(capsys, path, str(tmp_path / "p"), "gone.png", "--workers", workers)
    assert [row["path"] for row in rows if "error" in row] == [
        names[2],
        str(tmp_path / "p" / "broken.jpg"),
        str(tmp_path / "p" / "text.jpg"),
        "gone.png",
    ]
    assert rows[2] == {"path": names[2], "error": "empty file"}


def test_odd_pictures_are_pictures(tmp_path: Path, path: str, capsys: Capture) -> None:
    folder, draw = tmp_path / "odd", np.random.default_rng(0)
    folder.mkdir()
    picture = drawn(1)[0]
    Image.new("RGB", (1, 1)).save(folder / "one.png")
    Image.new("RGB", (1, 5000)).save(folder / "strip.png")
    picture.save(folder / "moves.gif", save_all=True, append_images=drawn(2))
    Image.fromarray(draw.integers(0, 65536, (9, 9)).astype(np.uint16)).save(folder / "sixteen.png")
    picture.convert("CMYK").save(folder / "cmyk.jpg")
    for mode in ("L", "LA", "P", "1", "RGBA"):
        picture.convert(mode).save(folder / f"{mode}.png")
    assert main(["predict", path, str(folder), "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_the_same_picture_twice_is_answered_twice(tmp_path: Path, path: str, capsys: Capture) -> None:
    names = folder_of(tmp_path / "p", 2)
    rows = told(capsys, path, names[0], names[0], str(tmp_path / "p"))
    assert [row["path"] for row in rows] == [names[0], names[0], *names]


def test_options_may_stand_anywhere(tmp_path: Path, path: str, capsys: Capture) -> None:
    name = folder_of(tmp_path / "p", 1)[0]
    assert main(["predict", path, "--topk", "1", name, "--device", "cpu"]) == 0
    assert main(["predict", "--topk", "1", path, name, "--device", "cpu"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_csv_has_a_header_and_quotes_what_needs_it(tmp_path: Path, path: str, capsys: Capture) -> None:
    names = folder_of(tmp_path / 'a "b", c', 2)
    Path(names[1]).write_text("<html>")
    assert main(["predict", path, *names, "--csv", "--topk", "2", "--device", "cpu"]) == 1
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["path"], row["rank"]) for row in rows] == [(names[0], "1"), (names[0], "2"), (names[1], "")]
    assert rows[0]["label"] == CLASSES[int(rows[0]["index"])]
    assert float(rows[0]["probability"]) >= float(rows[1]["probability"]) > 0
    assert rows[2]["error"] == "not an image: starts with '<html>'"


def test_names_that_are_no_text_are_spelt_out(tmp_path: Path, path: str, capsys: Capture) -> None:
    odd = os.fsencode(str(tmp_path)) + b"/bad\xff\n\x1b[31m.png"
    try:
        with open(odd, "wb") as file:
            drawn(1)[0].save(file, "PNG")
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    name = os.fsdecode(odd)
    assert main(["predict", path, name, "--device", "cpu"]) == 0
    assert "bad\\udcff\\x0a\\x1b[31m.png: " in capsys.readouterr().out
    assert told(capsys, path, name)[0]["path"] == name


def test_a_terminal_gets_bars(path: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    made = predict_output.TerminalWriter
    monkeypatch.setattr(predict_output, "LineWriter", lambda file: made(file, CLASSIFICATION))
    name = folder_of(tmp_path / "p", 1)[0]
    assert main(["predict", path, name, "--topk", "3", "--device", "cpu"]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == name
    assert len(rows) == 3
    assert "█" in rows[0]
    assert rows[0].endswith(" %")
    assert len({row.index("%") for row in rows}) == 1  # they stand below each other


def test_bars_are_as_long_as_their_share() -> None:
    assert predict_output.draw_bar(1.0) == "█" * predict_output.BAR_WIDTH
    assert predict_output.draw_bar(0.0) == ""
    assert predict_output.draw_bar(0.5) == "█" * (predict_output.BAR_WIDTH // 2)
    assert len(predict_output.draw_bar(0.013)) == 1


@pytest.mark.usefixtures("stand_in")
def test_without_weights_the_network_of_the_package_answers(tmp_path: Path, capsys: Capture) -> None:
    names = folder_of(tmp_path / "p", 3)
    Path(tmp_path / "p" / "picture").write_bytes(Path(names[0]).read_bytes())
    for words, count in (([names[0]], 1), ([str(tmp_path / "p")], 3), ([str(tmp_path / "p" / "picture"), names[1]], 2)):
        assert main(["predict", *words, "--device", "cpu"]) == 0
        said = capsys.readouterr()
        assert said.err.startswith("vitrail-cifar10 (bundled): ViT, ")
        assert len(said.out.splitlines()) == count
    assert main(["predict", DEFAULT_WEIGHTS, names[0], "--device", "cpu"]) == 0


def test_which_word_is_weights(tmp_path: Path, path: str) -> None:
    names = folder_of(tmp_path / "p", 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "best.safetensors").write_bytes(Path(path).read_bytes())
    bare = tmp_path / "bare"
    bare.write_bytes(Path(path).read_bytes())
    for word in (path, str(run), str(bare), DEFAULT_WEIGHTS, "vit_b_16:augreg_in21k", "missing.npz"):
        assert is_weights(word), word
        assert split_words([word, names[0]]) == (word, names)
    for word in (names[0], str(tmp_path / "p"), "-", "missing.jpg", "photo.heic"):
        assert not is_weights(word), word
        assert split_words([word]) == (DEFAULT_WEIGHTS, [word])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nothing"], "nothing: there is no such file or folder; the first word is weights"),
        (["{w}"], "is weights, but no images follow"),
        (["a.jpg", "{w}"], "looks like weights, which come first: vitrail predict"),
        (["{w}", "{empty}"], "no images found; names end in .jpg"),
        (["{w}", "-", "-"], "stdin, which can be read once"),
        (["{w}", "a.jpg", "--topk", "0"], "--topk 0 must be at least 1"),
        (["{w}", "a.jpg", "--batch", "0"], "--batch 0 must be at least 1"),
        (["{w}", "a.jpg", "--json", "--csv"], "not allowed with argument"),
        (["{headless}", "a.jpg"], "has no head, so it names no classes; give it one with `vitrail fit`"),
        (["{bit}", "a.jpg", "--attention", "out"], "ResNet has no tokens and no attention"),
        (["{w}", "a.jpg", "--attention", "{w}"], "cannot be written|is a file"),
        (["{w}", "a.jpg", "--image-size", "7"], "leaves 1 pixel over"),
        (["{w}", "a.jpg", "--labels", "{labels}"], "has 2 lines, but the network has 5 classes"),
        ([], "the following arguments are required"),
    ],
)
def test_a_mistake_is_one_line_and_2(tmp_path: Path, path: str, capsys: Capture, words: list[str], reason: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "labels.txt").write_text("a\nb\n")
    known = {
        "w": path,
        "empty": str(tmp_path / "empty"),
        "headless": weights(tmp_path, replace(VIT, classes=0, head="none"), "headless.safetensors"),
        "bit": weights(tmp_path, RESNET, "bit.safetensors"),
        "labels": str(tmp_path / "labels.txt"),
    }
    assert main(["predict", *(word.format(**known) for word in words)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert re.search(reason, said.err)
    assert said.err.startswith("vitrail: error: ")
    assert len(said.err.splitlines()) == 1


def test_names_from_stdin(tmp_path: Path, path: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    names = folder_of(tmp_path / "p", 3)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{names[0]}\r\n\n{names[1]}"))
    assert [row["path"] for row in told(capsys, path, names[2], "-", names[2])] == [names[2], *names[:2], names[2]]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["predict", path, "-", "--device", "cpu"]) == 2
    assert "stdin named no images" in capsys.readouterr().err


def test_names_that_come_slowly_come_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "wb", 0) as out:
        monkeypatch.setattr(sys, "stdin", stdin)
        bursts = StdinNames().bursts()
        out.write(b"a.jpg\nb \xff.jpg\nc")
        assert [found.path for found in next(bursts)] == ["a.jpg", os.fsdecode(b"b \xff.jpg")]
        out.write(b".jpg\n")
        assert [found.path for found in next(bursts)] == ["c.jpg"]
        out.write(b"d.jpg\ne.jpg")
        out.close()
        assert [found.path for burst in bursts for found in burst] == ["d.jpg", "e.jpg"]


def test_folders_are_walked_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/10.jpg", "a/z/1.png", "c.gif", ".hidden/x.jpg", "a/.x.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    found = [one for burst in list_images([str(tmp_path)]).bursts() for one in burst]
    assert [one.inside for one in found] == ["c.gif", "a/z/1.png", "b/10.jpg", "b/2.jpg"]
    assert [one.path for one in found] == [str(tmp_path / one.inside) for one in found]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no images found"):
        list_images([str(tmp_path / "empty")])


def test_overlays_of_earlier_predictions_are_skipped(tmp_path: Path) -> None:
    """In folders; a file that is named is read."""
    for name in ("a.jpg", "a.overlay.png", "b/c.overlay.jpg", "b/c.Overlay.PNG", "b/overlay.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    listing = list_images([str(tmp_path)])
    assert [one.inside for one in listing.known_images()] == ["a.jpg", "b/c.overlay.jpg", "b/overlay.png"]
    assert listing.notes == (f"{tmp_path}: skipped 2 overlays of earlier predictions (*.overlay.png)",)
    assert list_images([str(tmp_path / "a.overlay.png")]).total == 1
    (tmp_path / "a.jpg").unlink()
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(DataError, match="no images found but 1 overlay of earlier predictions"):
        list_images([str(tmp_path)])


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, path: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "p", 1)
    (tmp_path / "p" / "closed").mkdir()
    real = predict_pictures.list_entries

    def listed(folder: str) -> "list[os.DirEntry[str]]":
        if folder.endswith("closed"):
            raise DataError(f"{folder}: the folder cannot be read: Permission denied")
        return real(folder)

    monkeypatch.setattr(predict_pictures, "list_entries", listed)
    assert main(["predict", path, str(tmp_path / "p"), "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    assert "closed: the folder cannot be read: Permission denied" in said.err


def test_what_was_drawn_before_is_not_looked_at(tmp_path: Path, path: str, capsys: Capture) -> None:
    folder_of(tmp_path / "p", 2)
    words = [path, str(tmp_path / "p"), "--attention", str(tmp_path / "p" / "looked")]
    assert told(capsys, *words) == told(capsys, *words)
    assert len(list((tmp_path / "p" / "looked").iterdir())) == 2


@pytest.mark.parametrize("config", [VIT, HYBRID])
def test_attention_over_each_picture(tmp_path: Path, config: Any, capsys: Capture) -> None:
    names = folder_of(tmp_path / "p" / "deep", 3)
    Path(names[1]).write_text("no")
    out = tmp_path / "new" / "out"
    words = [weights(tmp_path, config), str(tmp_path / "p"), names[0], "--attention", str(out), "--batch", "2"]
    rows = told(capsys, *words)
    made = ["deep--00.png.png", "deep--02.png.png", "00.png.png"]
    assert [row.get("attention") for row in rows] == [str(out / made[0]), None, str(out / made[1]), str(out / made[2])]
    assert sorted(path.name for path in out.iterdir()) == sorted(made)
    with Image.open(out / made[0]) as picture:
        assert max(picture.size) == 256  # small ones are enlarged, so that one can see something
        model, original = network(config), drawn(1)[0]
        map = rollout(model, model.card.preprocessing(original)[None])[0]
        np.testing.assert_allclose(
            np.asarray(picture), overlay(np.asarray(crop_view(original, model.card.preprocessing)), map), atol=1
        )


def test_names_of_drawn_pictures_neither_meet_nor_leave(tmp_path: Path) -> None:
    drawing = AttentionImages(tmp_path / "out", Predictor(network(VIT), device="cpu"))
    given = [
        "a/b.jpg",
        "a--b.jpg",
        "A--B.jpg",
        "b.jpg",
        "b.jpg",
        "b.jpg.2",
        "",
        "..",
        "../../x.png",
        "é" * 200,
        "é" * 201,
    ]
    names = [drawing.free_name(name) for name in given]
    assert len({name.casefold() for name in names}) == len(given)
    assert names[:2] == ["a--b.jpg.png", "a--b.jpg.2.png"]
    for name in names:
        assert (tmp_path / "out" / name).resolve().parent == tmp_path / "out"
        assert len(os.fsencode(name)) < 255


def test_what_is_drawn_is_what_the_network_saw() -> None:
    picture = Image.new("RGB", (400, 300))
    picture.paste((255, 0, 0), (150, 100, 250, 200))
    whole = crop_view(picture, Preprocessing(image=(32, 32)))
    assert whole.size == (400, 300)
    centre = crop_view(picture, Preprocessing(image=(32, 32), resize=96))  # the middle third of the shorter side
    assert centre.size == (256, 256)
    assert np.asarray(centre)[20:-20, 20:-20, 0].min() > 250
    bordered = np.asarray(
        crop_view(Image.new("RGB", (400, 300), (255, 0, 0)), Preprocessing(image=(32, 32), fit="pad"))
    )
    assert bordered.shape == (400, 400, 3)
    assert bordered[:300, :, 0].min() == 255
    assert bordered[300:].max() == 0


def shell(*words: str, **more: Any) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "vitrail", "predict", *words, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **more,
    )


@pytest.mark.slow
def test_answers_come_early_and_a_pipe_or_an_interrupt_ends_it_quietly(tmp_path: Path, path: str) -> None:
    name = folder_of(tmp_path / "p", 1)[0]
    left, waits = shell(path, *[name] * 3000, "--batch", "2", "--workers", "2"), shell(path, "-", stdin=subprocess.PIPE)
    with left, waits:
        assert left.stdout is not None
        assert left.stderr is not None
        assert left.stdout.readline().startswith(name.encode())
        left.stdout.close()  # as head -1 does
        assert left.wait(60) == 141
        assert len(left.stderr.read().splitlines()) == 1  # the line that names the weights
        assert waits.stdin is not None
        assert waits.stdout is not None
        assert waits.stderr is not None
        waits.stdin.write(f"{name}\n".encode())
        waits.stdin.flush()
        assert waits.stdout.readline().startswith(name.encode())  # though stdin is still open
        waits.send_signal(signal.SIGINT)
        assert waits.wait(60) == 130
        assert waits.stderr.read().splitlines()[-1] == b"vitrail: interrupted"


@pytest.mark.slow
def test_an_interrupt_that_another_thread_takes_is_heard() -> None:
    """A wait for stdin that no signal cuts short, as where it comes just before: main holds signals back, so the kernel
    gives them to the other thread."""
    script = """
import signal, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
from vitrail.cli.use.predict_inputs import StdinNames as Lines
try:
    for burst in Lines().bursts():
        print([found.path for found in burst], flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waits:
        assert waits.stdin is not None
        assert waits.stdout is not None
        try:
            waits.stdin.write(b"a.png\n")
            waits.stdin.flush()
            assert waits.stdout.readline() == b"['a.png']\n"
            waits.send_signal(signal.SIGINT)
            assert waits.wait(30) == 130
        finally:
            waits.kill()
