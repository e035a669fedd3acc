"""The examples do what their first lines say: scripts by an interpreter, notebooks by a kernel, in an empty folder.

python -m tests.test_examples      # runs the notebooks and keeps what they show in their files
"""

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
QUICK = ("draw_photos.py",)
SAYS = {
    "compare_networks.py": r"trained on CIFAR-10 +\d+% of 120 .*CKA \d\.\d\d   trained on CIFAR-10 / fresh weights",
    "draw_photos.py": r"photos: 120 images to learn from, 80 to test, 8 classes",
    "fit_in_seconds.py": r"9\d\.\d% of 100 test images right.*colours.safetensors says \[\{'label': 'pink'",
    "predict_and_look.py": r"^ +9\d\.\d%  ship\n.*looked.png: the brightest patch is in row \d, column \d of 8x8",
    "swap_head_and_resize.py": r"by load the same: True.*all zero: True; so every logit is 0",
    "train_from_python.py": r"^done at step 67; loss 2\.\d\d at first, [01]\.\d\d at last",
}
NOTEBOOKS_SAY = {
    "01_a_picture_is_64_words.ipynb": r"as the network does it: True.*as inspection has it: True.* 9\d\.\d%  ship",
    "02_where_does_it_look.ipynb": r"says ship\nmean by layer: \[\d",
    "03_your_own_classes.ipynb": r"fine-tuned, 100 steps: [89]\d\.\d% of 80.*runs/photos: \d+ wrong of 80",
    "04_what_the_queries_see.ipynb": r"closed form: mIoU 7\d\.\d%.*200 steps: mIoU [78]\d\.\d%.*answers: True\n\d of 8",
}
LEAVES = {
    "draw_photos.py": ("photos/train/red", "photos/test/blue"),
    "fit_in_seconds.py": ("colours.safetensors",),
    "predict_and_look.py": ("looked.png",),
    "train_from_python.py": ("runs/from-python/report.html", "runs/from-python/last.safetensors"),
}


def lanes(files: list[Path]) -> list[Any]:
    """Each file by its name, in the slow lane but for a few."""
    return [pytest.param(file, id=file.name, marks=() if file.name in QUICK else (pytest.mark.slow,)) for file in files]


def test_there_are_five_scripts_and_four_notebooks() -> None:
    assert len(SCRIPTS) >= 5
    assert set(SAYS) == {script.name for script in SCRIPTS}
    assert set(NOTEBOOKS_SAY) == {notebook.name for notebook in NOTEBOOKS}
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_short_and_says_how_to_run_it(script: Path) -> None:
    text = script.read_text("utf-8")
    assert len(text.splitlines()) < 60
    described = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{script.name}" in described


@pytest.mark.parametrize("script", lanes(SCRIPTS))
def test_a_script_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[script.name], done.stdout, flags=re.DOTALL | re.MULTILINE), done.stdout
    for left in LEAVES.get(script.name, ()):
        assert (tmp_path / left).exists(), left


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_a_notebook_is_short_and_shows_what_it_does(notebook: Path) -> None:
    """As it was run last, from top to bottom, to a figure at the end; small, and without a path of any machine."""
    text = notebook.read_text("utf-8")
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert len(cells) <= 16
    assert len(text) < 400_000
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert any("image/png" in output.get("data", {}) for output in code[-1]["outputs"])
    said = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert re.search(NOTEBOOKS_SAY[notebook.name], said, flags=re.DOTALL), said
    assert not re.search(r"/(home|root|tmp|work|Users)/", said)


@pytest.mark.parametrize("notebook", lanes(NOTEBOOKS))
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    for library in ("nbclient", "nbformat", "ipykernel"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install 'vitrail[test]'")
    # In a process of its own: clients of kernels leave sockets behind, which are warnings here and so errors.
    command = [sys.executable, str(Path(__file__)), str(notebook), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "False" not in said  # every comparison by hand holds
    assert re.search(NOTEBOOKS_SAY[notebook.name], said, flags=re.DOTALL), said


def executed(notebook: Path, folder: Path) -> Any:
    """The notebook with what its cells show, run one after the other by a kernel of this interpreter."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class Ours(KernelSpecManager):
        """This interpreter, whatever kernels a machine has registered."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])

    read = nbformat.read(notebook, as_version=4)
    manager = AsyncKernelManager(kernel_spec_manager=Ours(), kernel_name="python3")
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(read, km=manager, timeout=280, resources=resources, record_timing=False)
    client.execute()
    return read


def printed(read: Any) -> str:
    outputs = [output for cell in read.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def keep_outputs() -> None:
    """Runs every notebook in a folder of its own and writes it back with what it showed."""
    import nbformat

    os.environ.update({**environment(), "MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            read = executed(notebook, Path(folder))
        read.metadata = {"kernelspec": read.metadata["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(read, notebook)


def test_ship_is_what_its_script_draws() -> None:
    """Up to the rounding of another Pillow."""
    drawn = np.asarray(runpy.run_path(str(ROOT / "docs" / "figures" / "ship.py"))["ship"](), np.int16)
    assert (EXAMPLES / "ship.png").read_bytes() == (ROOT / "src/vitrail/assets/ship.png").read_bytes()
    kept = np.asarray(Image.open(EXAMPLES / "ship.png").convert("RGB"), np.int16)
    assert drawn.shape == kept.shape
    assert np.abs(drawn - kept).mean() < 1


def environment() -> dict[str, str]:
    """That of this process, with the package to be found and without a network."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "MPLBACKEND": "agg",
        "VITRAIL_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.stdout.write(printed(executed(Path(sys.argv[1]), Path(sys.argv[2]))))
    else:
        keep_outputs()
