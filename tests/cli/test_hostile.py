"""Whatever stands on the command line: one line and 2, no traceback, no hang, no memory."""

import os
from pathlib import Path

import pytest

from tests.data.pictures import encoded, noise
from vitrail.cli.app import main
from vitrail.core.atomic_files import check_writable, read_text
from vitrail.core.errors import ConfigError, DataError

LONG = "x" * 300
WEIGHTS = "vitrail-cifar10"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for name in "ab":
        (folder / "set" / name).mkdir(parents=True)
        for i in range(2):
            (folder / "set" / name / f"{i}.png").write_bytes(encoded(noise(i)))
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
    return folder


LINES = [
    "predict W P --labels PIPE",
    "predict PIPE",
    "predict W P --labels /dev/zero",
    "predict W P --labels SET",
    f"predict W P --labels {LONG}",
    "predict W P --rename PIPE",
    "predict W P --batch 99999999999999999999999",
    "predict W P --topk 99999999999999999999999",
    "predict W P --image-size 1000000",
    "predict W P --image-size 0",
    "predict W P --patch 1000000",
    "predict W P --patch 0",
    f"predict {LONG} P",
    "serve W --port 0 --timeout nan",
    "serve W --port 0 --max-pixels 99999999999999999999999",
    "fit W SET --out /proc/x.safetensors",
    "fit W SET --out /proc/x/y.safetensors",
    f"fit W SET --out {LONG}.safetensors",
    f"fit W {LONG} --out y.safetensors",
    "fit W PIPE --out y.safetensors",
    "pretrain digits --out RUN --set model.depth=1000000",
    "pretrain digits --out RUN --set model.width=99999999",
    "pretrain digits --out RUN --set data.batch=99999999999999999999999",
    "pretrain digits --out /proc/x",
    f"pretrain digits --out {LONG}",
    "convert W /proc/x",
    f"convert W {LONG}",
    "export W --out /proc/x.onnx",
    "compare PIPE P",
    f"compare {LONG} P",
    f"inspect W --images {LONG}",
    f"data {LONG}",
    "data PIPE",
    f"report {LONG}",
    "models --classes 99999999999999999999999",
    "cost ViT-B/16 --image-size 1000000",
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:50])
def test_one_line_and_two(
    line: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "PIPE" in line and not hasattr(os, "mkfifo"):
        pytest.skip("there are no pipes with names here")
    monkeypatch.chdir(tmp_path)
    names = {
        "W": WEIGHTS,
        "P": str(here / "set" / "a" / "0.png"),
        "SET": str(here / "set"),
        "PIPE": str(here / "pipe"),
        "RUN": str(tmp_path / "run"),
    }
    assert main([names.get(word, word) for word in line.split()]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("vitrail: error")]
    assert len(errors) == 1
    assert not any(
        theirs in errors[0] for theirs in ("Errno", "Traceback", "unpack", "NoneType", "islice", "object at")
    )


def test_a_text_is_a_regular_file(here: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("\ufeffcat\n".encode())
    assert read_text(tmp_path / "a") == "cat\n"
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    for wrong in (here, tmp_path / "none", tmp_path / "b", Path("/dev/zero"), Path(LONG), Path("a\0b")):
        with pytest.raises(DataError):
            read_text(wrong)


def test_places_that_cannot_be_written(here: Path, tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "file")
    assert list(tmp_path.iterdir()) == []
    for wrong in (here, here / "set" / "a" / "0.png" / "x", tmp_path / LONG, Path("/proc/x/y")):
        with pytest.raises(ConfigError):
            check_writable(wrong)
