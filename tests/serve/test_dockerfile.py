"""The Dockerfile keeps the rules that hadolint checks, and names only what is there; no engine is needed to know."""

import json
import re
import shlex
from pathlib import Path

from vitrail.cli.app import command_parser

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text("utf-8")


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its words, on one line, without comments."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def those(name: str) -> list[str]:
    return [words for kind, words in instructions() if kind == name]


def test_base_images_are_tagged_and_stages_named() -> None:  # DL3006, DL3007
    for words in those("FROM"):
        image = words.split()[0]
        assert re.fullmatch(r"python:3\.1[123]-slim", image), image
    assert those("FROM")[0].endswith(" AS build")


def test_it_does_not_run_as_root() -> None:  # DL3002
    assert those("USER")[-1] == "10001:10001"
    kinds = [kind for kind, _ in instructions()]
    last = len(kinds) - 1 - kinds[::-1].index("FROM")
    assert kinds.index("USER", last) < kinds.index("ENTRYPOINT")
    assert not [words for kind, words in instructions()[kinds.index("USER", last) :] if kind in ("RUN", "COPY")]


def test_pip_keeps_no_cache_and_takes_tested_versions() -> None:  # DL3042, DL3013
    for command in those("RUN"):
        for part in command.split("&&"):
            if "pip install" in part:
                assert "--no-cache-dir" in part
                assert "-c constraints.txt" in part
        assert "sudo" not in command  # DL3004
        assert "apt-get" not in command  # nothing is needed from there: DL3008, DL3009, DL3015


def test_forms_and_places() -> None:  # DL3020, DL3025, DL3000, DL3045
    assert not those("ADD")
    assert not those("MAINTAINER")
    for words in those("ENTRYPOINT") + [health.partition("CMD ")[2] for health in those("HEALTHCHECK")]:
        assert words.startswith("[")
    assert all(words.startswith("/") for words in those("WORKDIR"))
    assert len(those("ENTRYPOINT")) == len(those("HEALTHCHECK")) == 1  # DL4004, DL3012
    assert not those("CMD")
    assert those("EXPOSE") == ["8000"]  # DL3011
    assert not re.search(r"\b(curl|wget)\b", TEXT)  # DL4001: nothing is fetched but by pip


def test_no_secret_is_baked_in() -> None:
    for words in those("ENV") + those("ARG"):
        assert not re.search(r"token|secret|password", words, re.IGNORECASE)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in ignored
    for words in those("COPY"):
        if not words.startswith("--from="):
            for source in words.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


def test_the_command_takes_these_options() -> None:
    parser = command_parser("serve")
    words = json.loads(those("ENTRYPOINT")[0])
    assert words[:2] == ["vitrail", "serve"]
    assert parser.parse_args(words[2:]).host == "0.0.0.0"
    assert "VITRAIL_TOKEN" in TEXT  # said where it is started
    assert shlex.split(those("STOPSIGNAL")[0]) == ["SIGTERM"]


def test_lines_are_of_a_length() -> None:
    for line in TEXT.splitlines():
        assert len(line) <= 130
        assert line == line.rstrip()
