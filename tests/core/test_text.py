import pytest

from vitrail.core.text import format_bytes, format_clock, format_duration, join_words, plural_of, pluralise


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1500, "1.5 kB"),
        (999_960, "1.0 MB"),
        (20_300_000, "20.3 MB"),
        (2e12, "2,000.0 GB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_times() -> None:
    assert [format_duration(s) for s in (0.4, 45, 119.6, 7199, 36_000)] == [
        "0 s",
        "45 s",
        "2.0 min",
        "120.0 min",
        "10.0 h",
    ]
    assert [format_clock(s) for s in (3, 123, 3723, float("nan"), 1e9)] == ["0:03", "2:03", "1:02:03", "?", "?"]


def test_lists() -> None:
    assert [join_words("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert join_words("abc", last="or") == "a, b or c"
    assert join_words("abc", limit=2) == "a, b and 1 more"
    assert join_words("abc", limit=3) == "a, b and c"
    assert [pluralise(1, "image"), pluralise(3000, "image"), pluralise(2, "is", "are")] == [
        "1 image",
        "3,000 images",
        "2 are",
    ]


@pytest.mark.parametrize(
    ("noun", "plural"),
    [
        ("cat", "cats"),
        ("wine glass", "wine glasses"),
        ("bus", "buses"),
        ("couch", "couches"),
        ("person", "people"),
        ("sky", "skies"),
        ("toy", "toys"),
        ("skis", "skis"),
        ("class 3", "class 3"),
        ("", ""),
    ],
)
def test_plurals_of_class_names(noun: str, plural: str) -> None:
    assert plural_of(noun) == plural
