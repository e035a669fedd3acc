"""Text on an image: every sign that is drawn is a letter, never a box."""

import pytest

from vitrail.report import contact_sheet as lettering
from vitrail.report.contact_sheet import find_font_name, fit_text, has_glyph, load_font, make_legible, measure_text

TEXTS = ["short", "a very long name " * 20, "日本語" * 50, "tab\tand\nline\udcff", "", "chats été", "Hunde 🐶", "Ωμέγα"]


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_drawn_fits_and_has_letters(text: str) -> None:
    cut = fit_text(text, 15, 200)
    assert measure_text(cut, 15) <= 200
    assert ("…" in cut) == (len(text) > 50)
    assert any(all(has_glyph(name, sign) for sign in cut) for name in ("", *lettering.OTHERS))


def test_plain_latin_is_set_in_the_same_font_everywhere() -> None:
    assert find_font_name("Plain text, 1,000 (50 %)") == ""
    assert load_font(15, "Plain") is load_font(15)


def test_a_system_without_fonts_draws_the_nearest_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lettering, "OTHERS", ())
    assert make_legible("chats été, Ñandú") == "chats ete, Nandu"
    assert make_legible("Hunde 🐶") == "Hunde ?"
