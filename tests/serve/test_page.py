"""The server's page as a document: one file, nothing from elsewhere, and a policy that lets in what it holds."""

import re
from html.parser import HTMLParser

import pytest

from vitrail.report.page import hash_base64
from vitrail.serve.pages import SCRIPTS, content_policy, read_asset, render_page

NAMED_ELSEWHERE = re.compile(
    r"""(?:https?:)?//[a-z0-9-]+\.[a-z]|@import|\burl\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write"""
)


class Document(HTMLParser):
    """What a browser would make of the text, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}
        self.labelled: set[str] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, {**found, "in label": "yes" if "label" in self.open else None}))
        if tag not in ("input", "meta", "link", "path", "circle", "br"):
            self.open.append(tag)
        if tag == "label" and found.get("for"):
            self.labelled.add(str(found["for"]))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inside:
            self.inside[self.open[-1]].append(data)


@pytest.fixture(scope="module")
def document() -> Document:
    return Document(render_page())


def test_the_policy_names_exactly_the_style_and_script_that_are_in_the_document(document: Document) -> None:
    for kind in ("style", "script"):
        assert len(document.inside[kind]) == 1
        assert f"{kind}-src 'sha256-{hash_base64(document.inside[kind][0])}';" in content_policy()
    assert "unsafe" not in content_policy()
    assert content_policy().startswith("default-src 'none'; ")


def test_nothing_is_joined_twice_or_left_out() -> None:
    text = render_page()
    for name in ("page.css", *SCRIPTS):
        assert text.count(read_asset(name)) == 1
    assert "{style}" not in text
    assert "{script}" not in text


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup(document: Document) -> None:
    script = document.inside["script"][0].replace("http://www.w3.org/2000/svg", "")
    assert not NAMED_ELSEWHERE.findall(script)
    assert not NAMED_ELSEWHERE.findall(document.inside["style"][0])
    for tag, attributes in document.tags:
        source = attributes.get("src") or attributes.get("href") or ""
        assert source.startswith(("data:", "/", "#")) or not source, (tag, source)
        assert not source.startswith("//")
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag


def test_all_that_takes_input_has_a_name(document: Document) -> None:
    inputs = [attributes for tag, attributes in document.tags if tag in ("input", "select", "textarea")]
    assert len(inputs) > 8
    for attributes in inputs:
        named = attributes.get("aria-label") or attributes["in label"] or attributes.get("id") in document.labelled
        assert named, attributes


def test_it_has_landmarks_one_heading_and_a_place_that_speaks(document: Document) -> None:
    tags = [tag for tag, _ in document.tags]
    assert [tags.count(name) for name in ("header", "nav", "main", "footer", "h1")] == [1, 1, 1, 1, 1]
    assert ("html", "en") in {(tag, attributes.get("lang")) for tag, attributes in document.tags}
    assert {attributes.get("role") for _, attributes in document.tags} >= {"status", "alert", "grid", "radiogroup"}
    named = {attributes["id"] for _, attributes in document.tags if attributes.get("id")}
    for _, attributes in document.tags:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((attributes.get(name) or "").split()) <= named


def test_ids_are_given_once_and_the_script_asks_for_those_there_are(document: Document) -> None:
    ids = [attributes["id"] for _, attributes in document.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r"""\$\("([\w-]+)"\)""", document.inside["script"][0]))
    assert asked
    assert asked <= set(ids)


def test_it_is_small() -> None:
    assert len(render_page().encode()) < 90_000
