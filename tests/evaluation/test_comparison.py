"""Results in one table, and what is said of those that must not be compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vitrail.core.errors import DataError, UnknownName
from vitrail.evaluation.compare import Comparison, ResultFile, compare_results, gather_results
from vitrail.evaluation.result import Measure, Result

TOP = Measure(name="top-1", value=0.7, low=0.6, high=0.8, count=100)


def made(name: str = "a.safetensors", *, data: str = "pets", kind: str = "evaluate", **changes: Any) -> Result:
    one = Result(
        kind=kind,
        weights={"name": name, "hash": f"hash of {name}"},
        data={"name": data, "split": "test", "pictures": 100, "fingerprint": f"print of {data}", "deduplicated": None},
        measures=(TOP,),
        config={"image": [224, 224], "preprocessing": {"mean": [0.5], "resize": 256}, "seed": 0},
        environment={"devices": ["cpu"]},
        made="2026-11-15T12:00:00+00:00",
    )
    return replace(one, **changes)


def table(*results: Result, measures: tuple[str, ...] = ()) -> Comparison:
    return compare_results([ResultFile(Path(f"{at}.json"), one) for at, one in enumerate(results)], measures)


def texts(found: Comparison) -> list[list[str]]:
    return [[row.name, *(found.text(row, column) for column in found.columns)] for row in found.rows]


def test_rows_are_weights_and_columns_measures_on_data() -> None:
    found = table(made("a"), made("b"), made("a", data="cars"))
    assert [found.title(column) for column in found.columns] == ["pets@test: top-1", "cars@test: top-1"]
    assert texts(found) == [["a", "70.00% (60.00–80.00)", "70.00% (60.00–80.00)"], ["b", "70.00% (60.00–80.00)", ""]]
    assert found.notes == ()
    assert [(name, len(part.rows)) for name, part in found.groups()] == [("pets@test", 2), ("cars@test", 1)]


def test_any_kind_of_result_has_its_place() -> None:
    speed = Measure(name="speed", value=1000.0, unit="img/s")
    cost = Result(kind="cost", weights={"name": "ViT-B/16"}, data={}, measures=(speed,), environment={})
    found = table(made("a"), made("a", kind="knn"), cost)
    assert [found.title(column) for column in found.columns] == [
        "pets@test: evaluate top-1",
        "pets@test: knn top-1",
        "speed",
    ]
    assert texts(found)[1] == ["ViT-B/16", "", "", "1,000.0"]


def test_other_pictures_under_one_name_are_said() -> None:
    other = made("b", data="pets")
    other = replace(other, data={**other.data, "fingerprint": "another", "pictures": 90})
    (note,) = table(made("a"), other).notes
    assert note == "pets@test: the images themselves differ: 100 (print of) for a; 90 (another) for b"


def test_another_way_of_preparing_is_said_but_normalisation_is_the_weights_own() -> None:
    config = {"image": [384, 384], "preprocessing": {"mean": [0.1], "resize": None}, "seed": 7}
    notes = table(made("a"), made("b", config=config)).notes
    assert notes == (
        "pets@test: image differs: 224x224 for a; 384x384 for b",
        "pets@test: preprocessing.resize differs: 256 for a; null for b",
    )


def test_what_the_weights_bring_along_and_what_was_tuned_is_no_difference() -> None:
    one = {"features": 192, "penalty": 0.1, "penalties": [0.1, 1.0], "shots": [1], "network": {"width": 192}}
    two = {"features": 768, "penalty": 1.0, "penalties": [0.1, 1.0], "shots": [5], "network": {"width": 768}}
    assert table(made("a", config=one), made("b", config=two)).notes == ()
    fixed = {**two, "penalties": []}
    assert (
        "penalty differs: not said for a; 1.0 for b" in table(made("a", config=one), made("b", config=fixed)).notes[1]
    )


def test_other_pictures_to_learn_from_are_said() -> None:
    results = [made("a", kind="knn"), made("b", kind="knn")]
    results = [
        replace(one, data={**one.data, "train": {"pictures": 10 + at, "fingerprint": f"{at}"}})
        for at, one in enumerate(results)
    ]
    assert table(*results).notes == ("pets@test: the training images differ: 10 (0) for a; 11 (1) for b",)


def test_of_many_settings_the_names_are_enough() -> None:
    notes = table(made("a", config=dict.fromkeys("uvwxyz", 1)), made("b", config=dict.fromkeys("uvwxyz", 2))).notes
    assert len(notes) == 4
    assert notes[-1] == "pets@test: more settings differ: x, y, z"


def test_ways_of_using_weights_are_told_by_as_few_settings_as_do() -> None:
    draws = made("a", kind="fewshot", config={"variant": "draws", "seeds": [0, 1], "penalty": 1024})
    sweep = made("a", kind="fewshot", config={"variant": "sweep", "penalties": [1, 2]})
    assert [row.name for row in table(draws, sweep).rows] == ["a, variant=draws", "a, variant=sweep"]


def test_copies_left_out_for_some_only_are_said() -> None:
    other = made("b")
    (note,) = table(made("a"), replace(other, data={**other.data, "deduplicated": True})).notes
    assert note == "pets@test: copies were excluded from some trainings only: not known for a; yes for b"


def test_speeds_of_other_machines_are_said_and_accuracies_are_not() -> None:
    fast = {"devices": ["H200"]}
    assert table(made("a"), made("b", environment=fast)).notes == ()
    speed = (Measure(name="speed", value=9.0, unit="img/s"),)
    (note,) = table(made("a", measures=speed), made("b", measures=speed, environment=fast)).notes
    assert note == "pets@test: the machine differs: 1 x cpu for a; 1 x H200 for b"


def test_weights_at_several_sizes_have_a_row_each() -> None:
    small = made("a", config={"image": [160, 160], "preprocessing": {"mean": [0.5], "resize": 183}, "seed": 0})
    found = table(made("a"), small, made("a", kind="knn"))
    assert [row.name for row in found.rows] == ["a, 224x224 px", "a, 160x160 px"]
    assert len(found.rows[0].cells) == 2
    assert len(found.rows[1].cells) == 1
    assert not any("image" in note for note in found.notes)  # the names of the rows say so
    both = table(made("a"), small, made("b")).notes
    assert any("image differs: 224x224 for a, 224x224 px, b; 160x160 for a, 160x160 px" in note for note in both)


def test_of_equal_results_the_newest_counts() -> None:
    newer = made("a", made="2026-12-01T00:00:00+00:00", measures=(replace(TOP, value=0.9, high=0.95),))
    for order in ((made("a"), newer), (newer, made("a"))):
        found = table(*order)
        assert texts(found) == [["a", "90.00% (60.00–95.00)"]]
        assert found.notes[0].endswith("and counts")
    others = replace(newer, data={**newer.data, "fingerprint": "another"})
    assert table(made("a"), others).notes[0].endswith("and counts; its images differ")


def test_names_have_as_much_as_tells_them_apart() -> None:
    found = table(made("runs/one/best.safetensors"), made("runs/two/best.safetensors"), made("other.npz"))
    assert [row.name for row in found.rows] == ["one/best.safetensors", "two/best.safetensors", "other.npz"]
    twins = [replace(made("a"), weights={"name": "a", "hash": hash_}) for hash_ in ("1" * 64, "2" * 64)]
    assert [row.name for row in table(*twins).rows] == ["a 11111111", "a 22222222"]


def test_measures_of_two_tasks_have_columns_of_their_own() -> None:
    loss = Measure(name="loss", value=0.5, unit="number")
    masks = made("a", measures=(Measure(name="mIoU", value=0.8), loss), config={"task": "segmentation"})
    found = table(masks, replace(masks, weights={"name": "c", "hash": "c"}), made("b", measures=(TOP, loss)))
    titles = [found.title(column, whole=False) for column in found.columns]
    assert titles == ["mIoU", "segmentation loss", "top-1", "classification loss"]
    assert texts(found)[2] == ["b", "", "", "70.00% (60.00–80.00)", "0.5000"]
    assert found.notes == ()


def test_results_of_which_no_two_numbers_are_alike_are_refused() -> None:
    masks = made("a", measures=(Measure(name="loss", value=0.5, unit="number"),), config={"task": "segmentation"})
    with pytest.raises(DataError, match="segmentation"):
        table(masks, made("b", measures=(Measure(name="loss", value=0.4, unit="number"),)))
    assert len(table(masks, replace(masks, weights={"name": "c"})).rows) == 2
    assert len(table(masks).rows) == 1


def test_some_measures_only() -> None:
    one = made("a", measures=(TOP, Measure(name="loss", value=1.0, unit="number")))
    assert [column.measure for column in table(one, measures=("loss",)).columns] == ["loss"]
    with pytest.raises(UnknownName):
        table(one, measures=("los",))


def test_folders_are_looked_through_and_bad_files_named(tmp_path: Path) -> None:
    made("a").write(tmp_path / "one.json")
    made("b").write(tmp_path / "deep" / "two.json")
    (tmp_path / "config.json").write_text("{}")
    found, skipped = gather_results([tmp_path, tmp_path / "one.json"])
    assert [one.result.weights["name"] for one in found] == ["b", "a"]
    assert len(skipped) == 1
    assert str(tmp_path / "config.json") in skipped[0]
    with pytest.raises(DataError):
        gather_results([tmp_path / "config.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        gather_results([tmp_path / "empty"])
