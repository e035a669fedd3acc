"""A damaged checkpoint is noticed, named, and passed over for the one before it; never in silence."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.checkpoint.store.states import collected, no_message, same, saved_once, state
from vitrail.checkpoint.files.safetensors import write_sealed
from vitrail.checkpoint.store.layout import MANIFEST, read_manifest, write_manifest
from vitrail.checkpoint.store.reader import describe_shard, latest, open_saved, verify
from vitrail.core.errors import CorruptWeights, WeightsError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 100, 200 and 300, the last one by two processes."""
    for step, world in ((100, 1), (200, 1), (300, 2)):
        saved_once(tmp_path, step, world=world)
    return tmp_path


def newest(run: Path) -> Path:
    return run / "00000300"


def shard(run: Path) -> Path:
    return newest(run) / "shard-00001-of-00002.safetensors"


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut short": (lambda run: cut(shard(run), 1), "shard-00001-of-00002.safetensors: has "),
    "shard empty": (lambda run: shard(run).write_bytes(b""), "shard-00001-of-00002.safetensors: has 0 bytes"),
    "shard longer": (lambda run: shard(run).write_bytes(shard(run).read_bytes() + b"\0"), "bytes instead of"),
    "shard missing": (lambda run: shard(run).unlink(), "shard-00001-of-00002.safetensors: is missing"),
    "shard of zeros": (lambda run: shard(run).write_bytes(bytes(shard(run).stat().st_size)), "shard-00001-of-00002"),
    "shard is a folder": (lambda run: (shard(run).unlink(), shard(run).mkdir()), "cannot be read (Is a directory)"),
    "list cut short": (lambda run: cut(newest(run) / MANIFEST, 1), "checkpoint.json: is cut short"),
    "list empty": (lambda run: (newest(run) / MANIFEST).write_bytes(b""), "checkpoint.json: is cut short"),
    "list missing": (lambda run: (newest(run) / MANIFEST).unlink(), "checkpoint.json: is missing"),
    "folder empty": (lambda run: (shutil.rmtree(newest(run)), newest(run).mkdir()), "checkpoint.json: is missing"),
    "folder is a file": (
        lambda run: (shutil.rmtree(newest(run)), newest(run).touch()),
        "checkpoint.json: cannot be read",
    ),
    "shard of another step": (
        lambda run: shutil.copy(run / "00000200" / "shard-00000-of-00001.safetensors", shard(run)),
        "shard-00001-of-00002.safetensors: has ",
    ),
    "folder of another step": (
        lambda run: (shutil.rmtree(newest(run)), shutil.copytree(run / "00000200", newest(run))),
        "holds step 200",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_used_and_it_is_said(damage: str, run: Path) -> None:
    harm, cause = DAMAGE[damage]
    harm(run)
    said, tell = collected()
    saved = latest(run, tell)
    assert saved is not None
    assert saved.step == 200
    assert same(saved, state(200))
    assert len(said) == 1
    assert said[0].startswith("checkpoint of step 300 is damaged: ")
    assert cause in said[0]
    assert said[0].endswith("; the one before it, step 200, is used")
    assert str(run) in said[0]
    assert "\n" not in said[0]


def test_two_bad_ones(run: Path) -> None:
    shard(run).unlink()
    (run / "00000200" / MANIFEST).unlink()
    said, tell = collected()
    saved = latest(run, tell)
    assert saved is not None
    assert saved.step == 100
    assert ["step 300" in said[0], "step 200" in said[1], len(said)] == [True, True, 2]
    assert all(line.endswith("the one before it, step 100, is used") for line in said)


def test_no_good_one_is_an_error_and_not_a_fresh_start(run: Path) -> None:
    for step in (100, 200, 300):
        (run / f"{step:08}" / MANIFEST).unlink()
    with pytest.raises(CorruptWeights, match=r"no checkpoint is intact .*00000300.*00000200.*00000100"):
        latest(run, no_message)


def test_before_a_step(run: Path) -> None:
    for before, step in ((301, 300), (300, 200), (101, 100)):
        saved = latest(run, no_message, before=before)
        assert saved is not None
        assert saved.step == step
    assert latest(run, no_message, before=100) is None


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(count: int, run: Path) -> None:
    """Places spread evenly over all files of a checkpoint, a bit each, and more of them over its short list."""
    whole, dice = newest(run), random.Random(0)
    files = sorted(whole.iterdir())
    sizes = [path.stat().st_size for path in files]
    spread = [int((n + dice.random()) * sum(sizes) / count) for n in range(count)]
    flips = []
    for place in spread:
        file, at = 0, place
        while at >= sizes[file]:
            file, at = file + 1, at - sizes[file]
        flips.append((files[file], at))
    flips += [(whole / MANIFEST, at) for at in range(0, (whole / MANIFEST).stat().st_size, 1 if count > 200 else 11)]
    for path, at in flips:
        good = path.read_bytes()
        bad = bytearray(good)
        bad[at] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CorruptWeights, match=path.name):
            verify(open_saved(whole))
        path.write_bytes(good)
    verify(open_saved(whole))


def test_a_bad_one_takes_the_same_way_for_all_processes(run: Path) -> None:
    """Only the process that checks the damaged part sees it; all of them end with the same checkpoint."""
    content = bytearray(shard(run).read_bytes())
    content[-1] ^= 1
    shard(run).write_bytes(content)
    answers = [[open_saved_fault(run, part) for part in range(3)]]
    assert sum(fault is not None for fault in answers[0]) == 1
    spoken = iter(["300", next(fault for fault in answers[0] if fault), "200", None])
    for_part_zero, tell = collected()
    saved = latest(run, tell, part=0, parts=3, agree=lambda said: next(spoken))
    assert saved is not None
    assert saved.step == 200
    assert len(for_part_zero) == 1


def open_saved_fault(run: Path, part: int) -> str | None:
    try:
        verify(open_saved(newest(run)), part, 3)
    except CorruptWeights as error:
        return str(error)
    return None


def test_a_format_of_the_future_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back to an older one would throw the newer away."""
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.checkpoint.store.layout.FORMAT", 2)
        manifest = read_raw(newest(run))
        write_manifest(newest(run) / MANIFEST, step=300, world=2, shards=manifest, facts="{}")
    with pytest.raises(WeightsError, match="has format 2, and this vitrail reads 1; upgrade vitrail"):
        latest(run, no_message)


def read_raw(folder: Path) -> list[object]:
    return [describe_shard(path) for path in sorted(folder.glob("*.safetensors"))]


def rewritten(run: Path, tensors: dict[str, Tensor], pieces: dict[str, object]) -> None:
    """The second shard made again, with the checksums of everything made right again."""
    write_sealed(shard(run), tensors, {"step": 300, "rank": 1, "world": 2, "pieces": pieces})
    facts = read_manifest(newest(run) / MANIFEST).facts
    write_manifest(
        newest(run) / MANIFEST, step=300, world=2, shards=read_raw(newest(run)), facts=str(facts).replace("'", '"')
    )


def test_shards_that_do_not_make_a_whole(run: Path) -> None:
    tensors = state(300)
    rewritten(run, {"seen": tensors["seen"]}, {"seen": {"shape": [2], "start": 0}})
    with pytest.raises(CorruptWeights, match=r"row 31 of tensor 'model/blocks.0.bias' is in none of its shards"):
        open_saved(newest(run))
    rewritten(run, {"seen": tensors["seen"]}, {"seen": {"shape": [3], "start": 0}})
    with pytest.raises(CorruptWeights, match="in another shard"):
        open_saved(newest(run))
