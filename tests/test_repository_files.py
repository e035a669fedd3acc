"""What stands at the door of the repository: there, true to the project, and with links that lead somewhere."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import vitrail
from tests.test_docs import anchors
from vitrail.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", ".github/PULL_REQUEST_TEMPLATE.md")
FORMS = ("bug", "feature", "numerics")


def loaded(path: Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="no YAML reader here")
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize("name", [*PAGES, "LICENSE", "README.md", "CITATION.cff", "docs/contributing.md"])
def test_it_is_there(name: str) -> None:
    assert len((ROOT / name).read_text("utf-8")) > 200


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(found), f"{name}: {target}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/contributing.md"])
def test_commands_and_files_that_are_named_are_there(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    for line in re.findall(r"`make ([a-z ]+)", text) + re.findall(r"^    make ([a-z ]+)", text, flags=re.MULTILINE):
        assert set(line.split()) <= set(targets), f"{name}: make {line}"
    for command in re.findall(r"\bvitrail ([a-z]+)\b", " ".join(re.findall(r"`[^`]+`", text))):
        assert command in COMMANDS, f"{name}: vitrail {command}"
    for path in re.findall(r"(?:python|pytest) ((?:bench|tests)/[\w/.]+)", text):
        assert (ROOT / path).exists(), f"{name}: {path}"


def test_layers_are_those_that_are_held() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in tools if contract["id"] == "house")
    told = re.search(r"^    (cli > .*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert told is not None
    held = [layer.replace("(", "").replace(")", "") for layer in layers]
    assert [" ".join(part.split()) for part in told[1].split(">")] == held


def test_citation() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == vitrail.__version__
    assert citation["license"] == "Apache-2.0"
    assert {"message", "title", "authors"} <= set(citation)
    paper = citation["references"][0]
    assert paper["title"].startswith("An Image is Worth 16x16 Words")
    assert len(paper["authors"]) == 12
    assert all({"family-names", "given-names"} == set(author) for author in paper["authors"])


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms(name: str) -> None:
    """As GitHub wants them: else it shows none, without a word."""
    form = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert fields
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    for field in fields:
        assert field["type"] in ("textarea", "dropdown", "input", "checkboxes")
        assert field["attributes"]["label"]
        assert field["type"] != "dropdown" or field["attributes"]["options"]


@pytest.mark.parametrize("name", ["bug", "numerics"])
def test_a_report_of_something_wrong_comes_with_doctors_word(name: str) -> None:
    form = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    field = next(part for part in form["body"] if part.get("id") == "doctor")
    assert field["attributes"]["label"] == "vitrail doctor --json"
    assert field["validations"]["required"]


def test_nobody_is_written_to() -> None:
    """Reports go through the repository; an address would have to be somebody's."""
    for path in [*(ROOT / name for name in PAGES), ROOT / "CITATION.cff", *(ROOT / ".github").rglob("*.yml")]:
        assert not re.search(r"[\w.]+@[\w-]+\.\w+", path.read_text("utf-8")), path.name
