"""Text on an image: every sign that is drawn is a letter, never a box."""

import pytest

from vitrail.report import contact_sheet as lettering
from vitrail.report.contact_sheet import fitted, font, has, legible, length, named

TEXTS = ["short", "a very long name " * 20, "日本語" * 50, "tab\tand\nline\udcff", "", "chats été", "Hunde 🐶", "Ωμέγα"]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_drawn_fits_and_has_letters(text: str) -> None:
    cut = fitted(text, 15, 200)
    assert length(cut, 15) <= 200
    assert ("…" in cut) == (len(text) > 50)
    assert any(all(has(name, sign) for sign in cut) for name in ("", *lettering.OTHERS))


def test_plain_latin_is_set_in_the_same_font_everywhere() -> None:
    assert named("Plain text, 1,000 (50 %)") == ""
    assert font(15, "Plain") is font(15)


def test_a_system_without_fonts_draws_the_nearest_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lettering, "OTHERS", ())
    assert legible("chats été, Ñandú") == "chats ete, Nandu"
    assert legible("Hunde 🐶") == "Hunde ?"
