"""Lists of images: CSV and JSON lines."""

import json
from pathlib import Path

import pytest
from PIL import Image

from vitrail.core.errors import BadLabels, DataError, SourceNotFound
from vitrail.data.readers import manifest
from vitrail.data.readers.folder import FileDataset


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for i in range(4):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(tmp_path / f"{i}.png")
    return tmp_path


def listed(here: Path, text: str, name: str = "list.csv") -> dict[str, FileDataset]:
    (here / name).write_text(text, "utf-8")
    return manifest.read(here / name)  # type: ignore[return-value]


def rows(source: FileDataset) -> list[tuple[str, tuple[str, ...]]]:
    return [(source.name(i), tuple(source.classes[k] for k in source.labels[i])) for i in range(len(source))]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_csv_by_any_separator(separator: str, newline: str, here: Path) -> None:
    lines = [("Path", " label ", "note"), ("0.png", "dog", ""), ("1.png", "cat", "x"), ("2.png", "dog", "y")]
    text = "\ufeff" + newline.join(separator.join(line) for line in lines) + newline + newline
    source = listed(here, text)["train"]
    assert source.classes == ("cat", "dog")
    assert rows(source) == [("0.png", ("dog",)), ("1.png", ("cat",)), ("2.png", ("dog",))]
    assert source.open_image(1).rgb().getpixel((0, 0)) == (1, 0, 0)


def test_quotes_hold_separators_and_line_breaks(here: Path) -> None:
    (here / "a, b.png").write_bytes((here / "0.png").read_bytes())
    source = listed(here, 'path,label\n"a, b.png","a ""big""\ndog"\n1.png,cat\n')["train"]
    assert rows(source)[0] == ("a, b.png", ('a "big"\ndog',))


@pytest.mark.parametrize("mark", ["|", ";", " | "])
def test_several_labels(mark: str, here: Path) -> None:
    source = listed(here, f"path,labels\n0.png,b{mark}a\n1.png,\n2.png,a\n")["train"]
    assert source.labels.multiple
    assert rows(source) == [("0.png", ("b", "a")), ("1.png", ()), ("2.png", ("a",))]


def test_json_lines(here: Path) -> None:
    lines = [
        {"path": "0.png", "labels": ["cat", "indoors"]},
        {"path": "1.png", "labels": []},
        {"file_name": "2.png", "label": "dog", "split": "validation"},
        {"path": "3.png", "label": None, "split": "extra"},
    ]
    splits = listed(here, "\n".join(json.dumps(line) for line in lines), "list.jsonl")
    assert list(splits) == ["train", "val", "extra"]
    assert rows(splits["train"]) == [("0.png", ("cat", "indoors")), ("1.png", ())]
    assert rows(splits["val"]) == [("2.png", ("dog",))]
    assert splits["train"].classes == splits["val"].classes == ("cat", "dog", "indoors")
    assert splits["extra"].classes == ()


def test_whole_numbers_are_class_numbers(here: Path) -> None:
    source = listed(here, "path,label\n0.png,10\n1.png,2\n")["train"]
    assert source.classes == tuple(str(i) for i in range(11))
    assert source.labels.values.tolist() == [10, 2]


def test_classes_beside_the_list_fix_the_order(here: Path) -> None:
    (here / "classes.txt").write_text("zebra\nant\nbee\n")
    by_name = listed(here, "path,label\n0.png,ant\n1.png,zebra\n")["train"]
    by_number = listed(here, "path,label\n0.png,1\n1.png,0\n")["train"]
    for source in (by_name, by_number):
        assert source.classes == ("zebra", "ant", "bee")
        assert source.labels.values.tolist() == [1, 0]


def test_split_without_labels_beside_one_with(here: Path) -> None:
    splits = listed(here, "path,label,split\n0.png,cat,train\n1.png,,test\n2.png,dog,Train\n")
    assert splits["train"].labels.values.tolist() == [0, 1]
    assert splits["test"].classes == ()
    assert splits["test"].labels[0] == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "columns"),
        ("0.png,cat\n", "0.png,cat"),
        ("path,label,labels\n", "label or labels"),
        ("path,label\n", "no images"),
        ("path,label\n0.png,cat\n1.png\n", "line 3"),
        ("path,label\n0.png,cat\n\n,dog\n", "line 4"),
        ("path,label\n0.png,cat\n1.png,\n", "line 3"),
        ("path,label\n0.png,3\n1.png,-1\n", "line 3"),
        ("path,label\n0.png,10583\n1.png,7\n", "only 2 different labels"),
        ("path,label\nhttps://example.org/0.png,3\n", "line 2"),
        ('path,label\n0.png,"cat\n', "not a table"),
    ],
)
def test_bad_list_is_refused_with_its_line(text: str, words: str, here: Path) -> None:
    with pytest.raises(DataError) as refusal:
        listed(here, text)
    assert words in str(refusal.value)
    assert "list.csv" in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2"),
        ("[" * 100_000, "line 2"),
        ("[1]", "line 2"),
        ('{"label": 1}', "line 2"),
        ('{"path": 3}', "line 2"),
        ('{"path": "1.png", "label": 1.5}', "1.5"),
        ('{"path": "1.png", "label": true}', "True"),
        ('{"path": "1.png", "labels": "cat"}', "line 2"),
        ('{"path": "1.png", "label": 1, "split": 2}', "line 2"),
    ],
)
def test_bad_json_line_is_refused_with_its_number(line: str, words: str, here: Path) -> None:
    with pytest.raises(DataError) as refusal:
        listed(here, '{"path": "0.png", "label": 0}\n' + line + "\n", "list.jsonl")
    assert words in str(refusal.value)


def test_label_outside_the_given_classes(here: Path) -> None:
    (here / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(BadLabels):
        listed(here, "path,label\n0.png,1\n1.png,2\n")
    with pytest.raises(BadLabels):
        listed(here, "path,label\n0.png,wasp\n1.png,ant\n")


def test_missing_files_are_met_when_read_unless_all_are(here: Path) -> None:
    source = listed(here, "path,label\ngone.png,a\n1.png,b\n")["train"]
    with pytest.raises(DataError):
        source.open_image(0)
    with pytest.raises(SourceNotFound):
        listed(here, "path,label\nelsewhere/0.png,a\nelsewhere/1.png,b\n")


def test_names_that_are_not_utf8_survive(here: Path) -> None:
    (here / "list.csv").write_bytes(b"path,label\n\xff.png,caf\xe9\n0.png,a\n")
    source = manifest.read(here / "list.csv")["train"]
    assert source.name(0) == "\udcff.png"
    assert len(source.fingerprint) == 64
