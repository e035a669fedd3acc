"""The package from outside: what importing it costs, what it offers, what it carries."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

import vitrail

ROOT = Path(__file__).parents[1]
TRITON_FILES = ("matching", *(f"{name}_kernels" for name in ("gelu", "norm", "attention", "float8", "math")))
KERNELS = tuple(f"vitrail.models.kernels.{name}" for name in TRITON_FILES)
HEAVY = ("torch", "torchvision", "numpy", "rich", "PIL")


def python(code: str, *flags: str) -> str:
    """What a fresh interpreter prints; it must not complain."""
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def loaded_by(code: str) -> set[str]:
    last = python(f"import sys\n{code}\nprint('\\nloaded', *sys.modules)").splitlines()[-1]
    return set(last.split()[1:])


@pytest.mark.parametrize(
    "code",
    [
        "import vitrail",
        "import vitrail; dir(vitrail), vitrail.VitrailError",
        "from vitrail.cli import main; main(['--help'])",
        "from vitrail.cli import main; main(['--version'])",
    ],
)
def test_quick_ways_in_leave_the_heavy_libraries_alone(code: str) -> None:
    loaded = loaded_by(code)
    assert "vitrail" in loaded
    assert not loaded.intersection(HEAVY)


@pytest.mark.parametrize(
    "code", ["list_models()", "ViTConfig", "ResNetConfig", "EoMTConfig", "create_config('ViT-B/16').macs"]
)
def test_names_and_configs_need_no_torch(code: str) -> None:
    assert "torch" not in loaded_by(f"import vitrail; vitrail.{code}")


def test_version_is_written_twice_and_equal() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert vitrail.__version__ == project["version"]
    assert f"## [{vitrail.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize("name", vitrail.__all__)
def test_public_face_is_there(name: str) -> None:
    assert getattr(vitrail, name).__name__ == {"predictor": "Predictor"}.get(name, name)
    assert name in dir(vitrail)


def test_public_face_has_one_table() -> None:
    assert vitrail.__all__ == sorted(vitrail._FACE)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = vitrail.nonsense


def modules() -> list[str]:
    found = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "src" / "vitrail").rglob("*.py"))
    ]
    assert "vitrail.cli.app" in found
    return found


@pytest.mark.slow
def test_every_module_imports_in_silence() -> None:
    """Also without Triton, which torch lacks on aarch64: only the kernels need it, and nothing imports
    them before they are used."""
    lines = ["import sys", "sys.modules['triton'] = None"]
    lines += [f"import {name}" for name in modules() if name not in KERNELS]
    lines += ["from vitrail.models.kernels import fused_ops"]
    lines += [f"print(fused_ops.TRITON, any(name in sys.modules for name in {KERNELS}))"]
    lines += ["print(vitrail.train.__module__)"]  # the function, not the package of that name
    assert python("\n".join(lines), "-W", "error") == "False False\nvitrail.api\n"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="torch has no Triton here")
def test_kernels_import_in_silence_with_triton() -> None:
    assert python(f"import {', '.join(KERNELS)}", "-W", "error") == ""


def test_sample_picture_and_type_marker_are_inside_the_package() -> None:
    package = resources.files("vitrail")
    assert package.joinpath("py.typed").is_file()
    picture = package.joinpath("assets", "window.png")
    assert len(picture.read_bytes()) < 120_000
    with picture.open("rb") as file, Image.open(file) as image:
        assert image.size == (512, 512)


@pytest.mark.slow
def test_a_run_and_an_embedding_do_without_what_posix_alone_has(tmp_path: Path) -> None:
    """As on Windows, as far as that can be had elsewhere: those modules and functions are gone, locks are msvcrt's."""
    said = python(f"""
import os, signal, sys, types
from pathlib import Path
import torch, torchvision, multiprocessing.synchronize
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
for module, names in (
    (os, "fork register_at_fork sched_getaffinity sysconf sysconf_names O_DIRECTORY posix_fadvise killpg geteuid"),
    (signal, "pthread_sigmask SIGUSR1 SIGKILL SIGHUP"),
):
    for name in names.split():
        delattr(module, name)
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=lambda *args: None)
from vitrail.cli import main
from vitrail.serve import metrics
torch.set_num_threads(1)
out = {str(tmp_path)!r}
words = "pretrain digits --set steps=2 --set schedule.warmup=1 --set batch=8 --set data.part=0.02 --out".split()
print("status", main([*words, out + "/run"]))
print("status", main(["embed", out + "/run", "digits@test", out + "/e.npz", "--device", "cpu", "--workers", "0"]))
print("status", main(["report", out + "/run"]))
metrics.STATM = metrics.DESCRIPTORS = Path(out + "/none")
print("metrics", metrics.process_gauges())
""")
    assert [line for line in said.splitlines() if line.startswith("status")] == ["status 0"] * 3
    assert said.endswith("metrics {}\n")


@pytest.mark.slow
def test_parts_are_there_when_named_and_train_is_the_function_whatever_is_imported() -> None:
    said = python("""
import vitrail
print(vitrail.inspection.rollout.__name__)
import vitrail.train.config
from vitrail.train.loop import train
from vitrail import train as public
import vitrail.train.run_folder.files
print(vitrail.train is public, public is not train, callable(vitrail.train), vitrail.train.__module__)
""")
    assert said == "rollout\nTrue True True vitrail.api\n"
    assert "inspection" in dir(vitrail)


@pytest.mark.slow
def test_types_hold_in_an_editor(tmp_path: Path) -> None:
    """A type checker knows what each public name takes and gives."""
    checker = shutil.which("basedpyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if checker is None:
        pytest.skip("basedpyright is not installed here")
    (tmp_path / "use.py").write_text("""
from pathlib import Path
from typing import assert_type

import torch

import vitrail

model = vitrail.load("ViT-B/16:augreg_in21k", classes=3)
assert_type(model.features(torch.zeros(1, 3, 224, 224)), torch.Tensor)
run = vitrail.train("digits", out="runs/first", steps=2, settings={"optim.lr": 1e-3})
assert_type(run, vitrail.Trained)
assert_type(run.folder, Path)
assert_type(vitrail.finetune(run.folder, "photos", epochs=3).accuracy, float | None)
vitrail.finetune(run.folder, "scenes", decoder="pmt")
score = vitrail.evaluate(run.model, Path("photos"), windows="full")
assert_type(score, vitrail.Evaluation)
assert_type(score.top1, float | None)
vitrail.save(vitrail.fit("vitrail-cifar10", "photos").model, "w.safetensors")
assert_type(vitrail.Predictor("w.safetensors")("a.jpg").label, str)
panoptic: vitrail.Predictor[vitrail.PredictedSegments] = vitrail.Predictor("w.safetensors")
assert_type(panoptic("a.jpg").segments[0].score, float)
assert_type(vitrail.create_config("ViT-B/16", image_size=384).macs, int)
assert_type(vitrail.create_model(vitrail.ViTConfig(width=8, depth=1, mlp_width=8, heads=1)).training, bool)
found = vitrail.extract_features("vitrail-cifar10", "photos@train")
assert_type(found, vitrail.Features)
assert_type(vitrail.find_nearest(found.features, found.features, k=5).index, torch.Tensor)
vitrail.evaluate("w.safetensors", "photos", windows="half")  # pyright: ignore[reportArgumentType]
vitrail.train(3)  # pyright: ignore[reportArgumentType]
vitrail.evaluate("w.safetensors", "photos", nonsense=1)  # pyright: ignore[reportCallIssue]
""")
    strict = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
    settings = json.dumps({**strict, "extraPaths": [str(ROOT / "src")]})
    (tmp_path / "pyrightconfig.json").write_text(settings)
    words = [checker, "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
