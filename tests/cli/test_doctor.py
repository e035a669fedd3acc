"""`vitrail doctor` tells what is there, and goes on telling when what it looks at is broken."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.cli import doctor, doctor_facts
from vitrail.cli.app import main
from vitrail.cli.doctor import Finding, find_problems, matching_torchvision
from vitrail.cli.doctor_facts import EXTRAS, NEEDED, STAGES, VARIABLES, anonymise, has_kernels, is_older

ROOT = Path(__file__).parents[2]
SOUND = {
    "numpy": {},
    "pillow": {"lacks": []},
    "safetensors": {},
    "rich": {},
    "jinja2": {},
    "torch": {"version": "2.10.0", "cuda": None, "hip": None, "threads": 2, "instructions": "DEFAULT"},
    "devices": {"seen": [], "mps": False},
    "torchvision": {"version": "0.25.0"},
    "weights": {"found": {"vitrail-cifar10": {"bytes": 7_000_000, "tensors": 91}}},
}


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine on which all is well, whatever this one is like. What a test changes in it is what doctor finds."""
    probe = {name: dict(facts) for name, facts in SOUND.items()}
    monkeypatch.setattr(doctor_facts, "run_probe", lambda: probe)
    monkeypatch.setattr(doctor_facts, "query_driver", lambda: None)
    monkeypatch.setattr(doctor_facts, "free_shared_memory", lambda: 8 << 30)
    monkeypatch.setattr(
        doctor_facts, "find_runs_folder", lambda: {"folder": "/somewhere/runs", "writable": True, "free": 90 << 30}
    )
    monkeypatch.setattr(doctor_facts, "installed_version", lambda name: "99.0" if name != "vitrail" else None)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for name in VARIABLES:
        if name != "VITRAIL_CACHE":
            monkeypatch.delenv(name, raising=False)
    return probe


def told(capsys: pytest.CaptureFixture[str], status: int) -> list[str]:
    assert main(["doctor"]) == status
    return capsys.readouterr().out.splitlines()


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(ROOT / "src")]))
    return subprocess.run(
        [sys.executable, "-m", "vitrail", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )


def test_tables_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def parted(lines: list[str]) -> dict[str, str]:
        return {name: version for name, _, version in (line.partition(">=") for line in lines)}

    assert parted(project["dependencies"]) == NEEDED
    optional = {name: parted(lines) for name, lines in project["optional-dependencies"].items()}
    assert {name: dict(wanted) for name, (_, wanted) in EXTRAS.items()} == {
        name: wanted for name, wanted in optional.items() if name not in ("all", "test")
    }
    assert project["requires-python"] == ">=3.11,<3.14"


def test_every_variable_that_is_read_is_known() -> None:
    text = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"VITRAIL_[A-Z]+", text))
    assert read == {name for name in VARIABLES if name.startswith("VITRAIL_")}


@pytest.mark.slow
def test_here_it_finds_what_is_installed() -> None:
    done = run({"VITRAIL_TOKEN": "s3cret", "HF_TOKEN": "hf_s3cret"}, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    facts = json.loads(done.stdout)
    assert facts["usable"]
    assert facts["vitrail"]["version"] == vitrail.__version__
    import torch

    assert facts["libraries"]["torch"]["version"] == torch.__version__
    assert set(facts["libraries"]) == set(NEEDED)
    assert facts["weights"]["found"]["vitrail-cifar10"]["tensors"] > 10
    assert facts["processor"]["usable"] >= 1
    assert facts["environment"]["VITRAIL_TOKEN"] == facts["environment"]["HF_TOKEN"] == "(set)"
    assert "s3cret" not in done.stdout


def test_the_command_itself_needs_no_library() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'rich', 'PIL', 'jinja2']))\n"
    code += "from vitrail.cli.app import command_parser; command_parser('doctor')\n"
    code += "import vitrail.cli.doctor, vitrail.cli.doctor_facts"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        pytest.param(
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "ImportError: libcudart.so.12",
            marks=pytest.mark.slow,
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended the interpreter by SIGILL"),
        pytest.param(
            "import sys; sys.exit('no torch today')", "ended the interpreter with status 1", marks=pytest.mark.slow
        ),
    ],
)
def test_a_broken_torch_is_told_without_a_traceback(tmp_path: Path, broken: str, said: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    done = run({"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert said in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Broken: ")
    assert "First: pip install --force-reinstall 'torch>=2.10'" in done.stdout.splitlines()[-1]


def test_all_is_well(sound: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, 0)
    assert lines[-1] == "Everything is fine."
    assert any(line.split() == ["torch", "2.10.0"] for line in lines)
    assert not any("fault" in line or "note:" in line for line in lines)


def test_a_missing_extra_is_no_fault_but_named_with_its_command(
    sound: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"starlette": None, "vitrail": "0.1.0", "onnx": "1.2"}
    monkeypatch.setattr(doctor_facts, "installed_version", lambda name: versions.get(name, "99.0"))
    lines = told(capsys, 0)
    assert any("missing: starlette; for vitrail serve: pip install 'vitrail[serve]'" in line for line in lines)
    assert any("too old: onnx 1.2" in line and "'vitrail[export]'" in line for line in lines)
    assert lines[-1] == "Everything is fine. Optional and not installed: export, serve"


@pytest.mark.parametrize(
    ("name", "facts", "what"),
    [
        ("torchvision", {"version": "0.24.0", "error": "RuntimeError: operator does not exist"}, "does not match"),
        ("torch", {"version": "2.4.0"}, "torch 2.4.0 is too old"),
        ("pillow", {"lacks": ["JPEG"]}, "this Pillow reads no JPEG"),
        ("weights", {"error": "CorruptWeights: vitrail-cifar10.safetensors is damaged"}, "is damaged"),
        ("rich", {"error": "ModuleNotFoundError: No module named 'rich'"}, "rich 99.0 cannot be used"),
    ],
)
def test_faults(name: str, facts: dict[str, Any], what: str, sound: dict[str, Any], capsys) -> None:
    sound[name] = facts
    lines = told(capsys, 1)
    assert any(what in line for line in lines)
    assert lines[-1].startswith("Broken: ")


def test_a_library_that_is_not_there_is_to_be_installed(sound, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    sound["jinja2"] = {"error": "ModuleNotFoundError: No module named 'jinja2'"}
    monkeypatch.setattr(
        doctor_facts, "installed_version", lambda name: None if name in ("jinja2", "vitrail") else "99.0"
    )
    lines = told(capsys, 1)
    assert lines[-1] == "Broken: 1 fault. First: pip install 'jinja2>=3.1'"


def test_versions_that_do_not_belong_together_are_a_note(sound: dict[str, Any], capsys) -> None:
    sound["torchvision"]["version"] = "0.26.1"
    lines = told(capsys, 0)
    assert lines[-1] == "Usable. Worth a look: torchvision 0.26.1 does not match torch 2.10.0, which needs 0.25"


def test_another_build_of_torchvision_is_a_note(sound: dict[str, Any], capsys) -> None:
    sound["torch"]["version"], sound["torchvision"]["version"] = "2.10.0+cu128", "0.25.0+cpu"
    assert told(capsys, 0)[-1].endswith("torch is built for cu128 and torchvision for cpu")


def test_a_gpu_that_torch_does_not_see(sound: dict[str, Any], capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "A GPU", "memory": 1 << 34, "driver": "500.1"}
    monkeypatch.setattr(doctor_facts, "query_driver", lambda: [gpu])
    assert told(capsys, 0)[-1].endswith("A GPU is present, but this torch is built for CPUs")
    sound["torch"]["cuda"] = "12.8"
    assert told(capsys, 0)[-1].endswith("A GPU is present with driver 500.1, but torch cannot use it")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert told(capsys, 0)[-1].endswith("A GPU is hidden by CUDA_VISIBLE_DEVICES=7")
    seen = {"name": "A GPU", "memory": 1 << 34, "capability": "9.0", "kernels": True}
    sound["devices"] = {"seen": [seen], "mps": False}
    lines = told(capsys, 0)
    assert lines[-1] == "Everything is fine."
    assert any("A GPU, 17.2 GB, capability 9.0 (driver 500.1, torch's CUDA 12.8)" in line for line in lines)


def test_it_says_which_kernels_run(sound, capsys) -> None:
    seen = {"name": "A GPU", "memory": 1 << 34, "capability": "9.0", "kernels": True, "float8": True}
    assert not any(line.lstrip().startswith("kernels ") for line in told(capsys, 0))
    for triton, float8, wanted in ((None, True, "only"), ("3.6.0", False, "cannot"), ("3.6.0", True, "fp8 can be")):
        sound["devices"] = {"seen": [seen | {"float8": float8}], "triton": triton, "mps": False}
        (line,) = (line for line in told(capsys, 0) if line.lstrip().startswith("kernels "))
        assert wanted in line


def test_what_is_untested_is_a_note(sound, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("not been tested" in line for line in told(capsys, 0))
    sound["devices"] = {"seen": [], "mps": True}
    monkeypatch.setattr("platform.platform", lambda: "Windows-11-10.0.22631")
    lines = "\n".join(told(capsys, 0))
    assert "not been tested on Windows" in lines
    assert "not been tested on Apple's GPUs" in lines


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_to(sound, capsys, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "closed"))
    assert "cannot be written to" in told(capsys, 0)[-1]


def test_a_cache_whose_place_is_a_file(sound, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "taken" / "cache"))
    assert "cannot be written to" in told(capsys, 0)[-1]


def test_the_cache_is_weighed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))
    (tmp_path / "weights" / "deep").mkdir(parents=True)
    (tmp_path / "weights" / "deep" / "a").write_bytes(bytes(1000))
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "b").write_bytes(bytes(30))
    found = doctor_facts.measure_caches()
    assert found["bytes"] == {"weights": 1000, "features": 30}
    assert found["counted"]
    assert found["writable"]


@pytest.mark.parametrize(
    ("place", "facts", "what"),
    [
        ("runs", {"folder": "/x/runs", "writable": True, "free": 1 << 30}, "/x/runs has 1.1 GB left"),
        ("runs", {"folder": "/x/runs", "writable": False, "free": 1 << 40}, "/x/runs cannot be written to"),
        ("shared_memory", 64 << 20, "/dev/shm, through which loader processes pass images, has 67 MB left"),
    ],
)
def test_little_room_is_a_note(place, facts, what, sound, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_facts, {"runs": "find_runs_folder", "shared_memory": "free_shared_memory"}[place], lambda: facts
    )
    assert what in told(capsys, 0)[-1]


def test_a_misspelt_variable_is_noticed(sound, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CASHE", "/elsewhere")
    lines = told(capsys, 0)
    assert lines[-1] == "Usable. Worth a look: VITRAIL_CASHE has no effect"
    assert any("rename it to VITRAIL_CACHE" in line for line in lines)


def test_threads_beyond_the_cores_are_a_note_and_one_thread_is_not(sound, capsys, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert told(capsys, 0)[-1] == "Everything is fine."
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert "asks for more threads" in told(capsys, 0)[-1]


def test_json_says_the_same(sound: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    sound["torchvision"]["version"] = "0.26.1"
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["usable"]
    assert [finding["fault"] for finding in facts["findings"]] == [False]
    assert facts["findings"][0]["remedy"] == "pip install 'torch==2.10.0' 'torchvision==0.25.*'"


def test_faults_come_first(sound: dict[str, Any]) -> None:
    sound["torchvision"]["version"] = "0.26.1"
    sound["weights"] = {"error": "gone"}
    found = find_problems(doctor.collect_facts())
    assert [finding.fault for finding in found] == [True, False]
    assert isinstance(found[0], Finding)


def test_the_home_folder_and_secrets_stay_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("VITRAIL_HUB", "https://ada:pass@mirror.example/hub")
    facts = {"a": ["/home/ada/x", "in /home/ada: no", "/home/adam/x", "/srv/home/ada/x"], "b": 3}
    assert anonymise(facts) == {"a": ["~/x", "in ~: no", "/home/adam/x", "/srv/home/ada/x"], "b": 3}
    assert doctor_facts.read_variables()["VITRAIL_HUB"] == "https://mirror.example/hub"


def test_small_rules() -> None:
    assert [matching_torchvision(torch) for torch in ("2.0.1", "2.10.0+cu128", "3.0")] == ["0.15", "0.25", None]
    assert is_older("2.9.1", "2.10")
    assert not is_older("2.10.0+cpu", "2.10")
    assert not is_older("2.11.0a0+git12", "2.10")
    assert has_kernels(8, 6, ["sm_80"])
    assert not has_kernels(12, 0, ["sm_80", "sm_90a"])
    assert has_kernels(12, 0, ["sm_80", "compute_90"])
    assert not has_kernels(7, 0, ["sm_80", "compute_80"])
    assert set(NEEDED) <= set(STAGES)
