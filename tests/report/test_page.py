"""A page stands by itself, and a name is never markup."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from vitrail.report.page import Notes, Pair, Pairs, Shot, Table, printable, render_page, save_page, to_data_uri

WICKED = '<script>alert("1")</script>"\' onerror=x {{ 7 * 7 }} &amp;'


class Elements(HTMLParser):
    """What a browser would see: tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def everything(name: str) -> str:
    plate = Shot(caption=name, picture=to_data_uri(Image.new("RGB", (4, 3), (200, 10, 10))))
    sections = [
        Table(columns=["set", name], rows=[[name, "12"]], title=name),
        Pairs(
            title=name,
            pairs=[
                Pair(one=plate, other=Shot(caption=name, picture=""), kind="near", note=name),
                Pair(one=plate, other=plate, kind="exact"),
            ],
            sides=(name, name),
            more=name,
        ),
        Notes(title=name, lines=[name], more=name),
    ]
    return render_page(name, sections, lead=name)


def test_markup_in_names_is_shown_and_not_obeyed() -> None:
    plain, wicked = Elements(everything("plain")), Elements(everything(WICKED))
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in wicked.tags]
    assert "script" not in {tag for tag, _ in wicked.tags}
    assert {key for _, attrs in wicked.tags for key in attrs} == {key for _, attrs in plain.tags for key in attrs}
    assert sum(WICKED in text for text in wicked.text) >= 10
    assert [attrs["alt"] for tag, attrs in wicked.tags if tag == "img"] == [WICKED] * 3


def test_nothing_is_fetched_and_the_policy_says_so() -> None:
    elements = Elements(everything("a"))
    policy = next(a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    for tag, attrs in elements.tags:
        assert tag not in {"script", "link", "iframe", "object", "base", "form"}
        assert "style" not in attrs
        assert not {key for key in attrs if key.startswith("on")}
        assert (attrs.get("src") or "data:").startswith("data:")
        assert "href" not in attrs


def test_the_policy_lets_in_the_very_style_of_the_page() -> None:
    from hashlib import sha256

    text = everything("a")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert f"sha256-{base64.b64encode(sha256(style[1].encode()).digest()).decode()}" in text
    assert "prefers-color-scheme: dark" in style[1]
    assert "url(" not in style[1]


def test_names_that_are_no_text_still_make_a_page(tmp_path: Path) -> None:
    assert printable("caf\udce9\n\x1b[31m") == "caf\\udce9\\x0a\\x1b[31m"
    assert printable("Blässhuhn 鳥") == "Blässhuhn 鳥"
    save_page(tmp_path / "new" / "page.html", everything("caf\udce9\n"))
    assert "caf\\udce9\\x0a" in (tmp_path / "new" / "page.html").read_text("utf-8")


def test_pictures_are_made_small_and_tiny_ones_grow() -> None:
    def size(width: int, height: int) -> tuple[int, int]:
        content = base64.b64decode(
            to_data_uri(Image.new("RGB", (width, height))).removeprefix("data:image/jpeg;base64,")
        )
        return Image.open(io.BytesIO(content)).size

    assert size(1920, 960) == (192, 96)
    assert size(8, 8) == (192, 192)
    assert size(150, 100) == (150, 100)
    assert size(3000, 1) == (192, 1)


def test_data_uri_leaves_the_picture_as_it_was() -> None:
    picture = Image.new("RGB", (500, 400))
    to_data_uri(picture)
    assert picture.size == (500, 400)
