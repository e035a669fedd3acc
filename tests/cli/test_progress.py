"""Every wait shows a sign of life: bars on a terminal, plain lines elsewhere; an interrupt says what there is."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tests.models.tiny import VIT, awake
from vitrail.checkpoint.weights import save
from vitrail.cli import progress
from vitrail.cli.app import main
from vitrail.cli.progress import PATIENCE_S, PLAIN_S, Bars, Lines, bars, on_interrupt, waiting
from vitrail.cli.train.display import TrainingPanel
from vitrail.core.console import escape_streams
from vitrail.data.preprocessing import Preprocessing
from vitrail.export import output as draft
from vitrail.models.vit import ViT


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_short_wait_shows_nothing_and_a_long_one_every_move() -> None:
    clock = Clock()
    shown = Bars(bytes_=False, console=Console(width=80, file=io.StringIO()), clock=clock)

    def seen() -> str:
        with shown.progress.console.capture() as capture:
            shown.progress.console.print(shown.progress.get_renderable())
        return capture.get()

    shown.advance("features", 10, 1000)
    assert seen().strip() == ""
    clock.now = PATIENCE_S + 0.1
    for done in (20, 30, 1000):
        shown.advance("features", done, 1000)
        assert f"{done:,}/1,000" in seen()
    shown.advance("reading", 0, None)
    assert "reading" in seen()
    shown.remove("features")
    assert "features" not in seen()


def test_plain_lines_come_now_and_then() -> None:
    clock, lines = Clock(), list[str]()
    shown = Lines(lines.append, clock)
    for second in range(int(3 * PLAIN_S) + 1):
        clock.now = float(second)
        shown.advance("features", second, 100)
    assert lines == [f"features: {int(n * PLAIN_S)} of 100" for n in (1, 2, 3)]


def test_a_wait_in_a_wait_shares_its_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with waiting("outer"):
        (display,) = progress._shown  # pyright: ignore[reportPrivateUsage]
        assert isinstance(display, Bars)
        with bars() as advance:
            advance("inner", 1, 2)
            assert set(display.tasks) == {"outer", "inner"}
        assert set(display.tasks) == {"outer"}
    assert not progress._shown  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(KeyboardInterrupt), on_interrupt("nothing is lost"), waiting("outer"):
        raise KeyboardInterrupt
    assert not progress._shown  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def images(tmp_path: Path) -> str:
    draw = np.random.default_rng(0)
    for at in range(24):
        folder = tmp_path / "images" / "ab"[at % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / f"{at:02d}.png")
    return str(tmp_path / "images")


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "w.safetensors"
    labels = tuple("abcde")[: VIT.classes]
    save(awake(VIT), path, preprocessing=Preprocessing(image=VIT.image), labels=labels)
    return str(path)


@pytest.mark.parametrize(
    "command",
    [
        "fit {weights} {images} --out {out}.safetensors --no-cache",
        "embed {weights} {images} {out}.parquet",
        "evaluate {weights} --data {images} --out {out}.json --page {out}.html",
        "knn {weights} --data {images} --held-out 0.5 --out {out}.json --no-cache",
        "predict {weights} {images} --json",
    ],
)
def test_an_interrupt_at_a_batch_says_what_there_is_and_leaves_no_half_file(
    command: str,
    weights: str,
    images: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    words = command.format(weights=weights, images=images, out=tmp_path / "out").split()
    words += ["--workers", "0"]
    monkeypatch.setattr(ViT, "represent", interrupted)
    assert main(words) == 130
    told = capsys.readouterr().err
    assert "stopped;" in told
    assert "Traceback" not in told
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", told)
    assert not [path for path in tmp_path.glob("out*") if path.suffix in (".safetensors", ".json", ".html", ".parquet")]


def test_evaluate_keeps_the_sizes_that_it_has_scored(
    weights: str, images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ViT.represent

    def late(self: ViT, images: object) -> object:
        if images.shape[-1] > VIT.image[1]:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return plain(self, images)  # type: ignore[arg-type]

    monkeypatch.setattr(ViT, "represent", late)
    sizes = [str(VIT.image[1]), str(2 * VIT.image[1])]
    words = [
        "evaluate",
        weights,
        "--data",
        images,
        "--workers",
        "0",
        "--by-number",
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert main([*words, "--image-size", *sizes]) == 130
    assert f"--image-size {sizes[1]}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("out*")] == [f"out-{sizes[0]}.json"]


def test_an_interrupted_pack_resumes(
    images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(Lines):
        def advance(self, what: str, done: int, total: int | None) -> None:
            if what == "packing" and done == 20:
                raise KeyboardInterrupt

    out = tmp_path / "packed"
    words = ["data", "pack", images, str(out), "--workers", "1", "--shard-size", "12kB"]
    with monkeypatch.context() as patch:
        patch.setattr(progress, "Lines", Interrupting)
        assert main(words) == 130
    assert "stopped;" in capsys.readouterr().err
    assert main(words) == 0
    assert "already written" in capsys.readouterr().out


def test_an_interrupted_export_leaves_what_was_there(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")
    monkeypatch.setattr(draft, "put_in_place", interrupted)
    assert main(["export", weights, "--to", "timm", "--out", str(out)]) == 130
    assert "stopped;" in capsys.readouterr().err
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "w.safetensors"]


@pytest.mark.parametrize("made", [lambda: Bars(bytes_=False).progress, lambda: TrainingPanel().live])
def test_a_live_display_is_drawn_and_not_written_out_under_guarded_streams(
    made: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with escape_streams(), made() as display:
        display.refresh()
        sys.stderr.write("a name with \x1b[2J in it\n")
        display.refresh()
    written = terminal.getvalue()
    assert "\x1b[?25l" in written  # the display's own
    assert "\\x" not in written
    assert "\x1b[2J" not in written  # the name's
