"""A result as a file: it comes back as it went, and what is none is named."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.test_accuracy import pictures
from tests.models.tiny import VIT
from vitrail.checkpoint.weights import build_fresh, load, save
from vitrail.core.errors import ConfigError, DataError
from vitrail.data.splits import Selection
from vitrail.evaluation.frozen.features import hash_network
from vitrail.evaluation.result import (
    Measure,
    Result,
    check_deduplication,
    describe_data,
    describe_weights,
    format_interval,
    format_value,
)


def result() -> Result:
    torch.manual_seed(0)
    return Result(
        kind="evaluate",
        weights=describe_weights("tiny.safetensors", build_fresh(VIT)),
        data=describe_data("set", "test", pictures(), deduplicated=None),
        measures=(Measure(name="top-1", value=0.701, low=0.6719, high=0.72856, count=1000),),
        config={"image": [6, 12]},
    )


def test_it_comes_back_as_it_went(tmp_path: Path) -> None:
    one, path = result(), tmp_path / "some" / "result.json"
    one.write(path)
    again = Result.read(path)
    assert again == one
    assert {"vitrail", "torch", "python", "git", "devices"} <= set(again.environment)
    assert again.weights["hash"] == hash_network(fresh_again())
    assert again.data["fingerprint"] == pictures().fingerprint


def fresh_again() -> torch.nn.Module:
    torch.manual_seed(0)
    return build_fresh(VIT)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "it has no 'format'"),
        ("[1]", "is not a vitrail result"),
        ("no JSON", "is not a vitrail result"),
        ('{"format": "vitrail result 99"}', "another format"),
        ('{"format": "vitrail result 1", "measures": [{"name": "x"}]}', "is not a vitrail result"),
        ('{"format": "vitrail result 1", "measures": [{"name": "x", "value": 1, "unit": "cm"}]}', "unknown unit 'cm'"),
        (
            '{"format": "vitrail result 1", "kind": "a", "weights": {}, "data": null, "measures": []}',
            "data is not a table",
        ),
        (
            '{"format": "vitrail result 1", "kind": "a", "weights": [], "data": {}, "measures": []}',
            "weights is not a table",
        ),
        ('{"format": "vitrail result 1", "kind": 3, "weights": {}, "data": {}, "measures": []}', "kind is not a text"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_none_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(DataError, match=why) as caught:
        Result.read(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError):
        Result.read(tmp_path / "nothing.json")


def test_a_measure_is_a_number() -> None:
    with pytest.raises(DataError):
        Measure(name="loss", value=float("nan"))
    with pytest.raises(ConfigError, match="unit"):
        Measure(name="loss", value=1.0, unit="cm")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measure", "value", "span"),
    [
        (Measure(name="top-1", value=0.701, low=0.6719, high=0.72856), "70.10%", "67.19–72.86"),
        (Measure(name="loss", value=1.29804, unit="number"), "1.2980", ""),
        (Measure(name="speed", value=1234.56, unit="img/s"), "1,234.6", ""),
        (Measure(name="memory", value=3 * 2**20, unit="bytes"), "3.0 MiB", ""),
        (Measure(name="parameters", value=5717416, unit="count"), "5,717,416", ""),
    ],
)
def test_numbers_as_they_are_shown(measure: Measure, value: str, span: str) -> None:
    assert (format_value(measure), format_interval(measure)) == (value, span)


def test_the_hash_is_of_the_numbers_and_not_of_the_file(tmp_path: Path) -> None:
    network = fresh_again()
    save(network, tmp_path / "a.safetensors", provenance={"seed": 1})
    save(network, tmp_path / "b.safetensors", labels=list("abcde"))
    assert hash_network(load(tmp_path / "a.safetensors")) == hash_network(load(tmp_path / "b.safetensors"))
    with torch.no_grad():
        next(network.parameters()).flatten()[0] += 1e-6
    assert hash_network(network) != hash_network(load(tmp_path / "a.safetensors"))


def selection(**rule: object) -> Selection:
    return Selection(source="train", rule=dict(rule), indices=np.array([3]), drop=True)


def test_copies_are_known_to_be_left_out_by_a_selection_against_these_pictures() -> None:
    source = pictures()
    against = selection(name="dedup", against={"set@test": source.fingerprint}, method={"exact": True})
    assert check_deduplication(source, against, {}) is True
    facts = describe_data("set", "test", source, deduplicated=True, selection=against)
    assert (facts["deduplicated"], facts["deduplicated_by"]) == (True, against.hash)
    with pytest.raises(DataError):
        check_deduplication(source, selection(name="dedup", against={"other@test": "0"}), {})
    with pytest.raises(DataError):
        check_deduplication(source, selection(name="dev"), {})


@pytest.mark.parametrize(("told", "known"), [({}, None), ({"deduplicated": False}, False), ({"deduplicated": 1}, None)])
def test_else_the_weights_say_so_or_nobody_knows(told: dict[str, object], known: bool | None) -> None:
    assert check_deduplication(pictures(), None, told) is known


def test_weights_tell_what_was_left_out_of_all_their_trainings() -> None:
    source = pictures()
    ours = {"deduplicated": {"selection": "0", "against": {"set@test": source.fingerprint}}}
    others = {"deduplicated": {"selection": "0", "against": {"other@test": "0"}}}
    assert check_deduplication(source, None, ours) is True
    assert check_deduplication(source, None, others) is None
    assert check_deduplication(source, None, {**ours, "from": ours}) is True
    assert check_deduplication(source, None, {**ours, "from": {"weights": "public"}}) is None
    assert check_deduplication(source, None, {**ours, "from": {"deduplicated": False}}) is False


@pytest.mark.slow
def test_results_are_read_without_torch(tmp_path: Path) -> None:
    """`vitrail compare` should not take seconds."""
    result().write(tmp_path / "result.json")
    code = (
        "import sys; from pathlib import Path; "
        "from vitrail.cli.evaluate.study import run_compare; from vitrail.cli.options.evaluate import CompareOptions; "
        "run_compare(CompareOptions(results=(Path(sys.argv[1]),))); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "70.10%" in done.stdout
    assert json.loads((tmp_path / "result.json").read_text())["kind"] == "evaluate"
