"""The page in a real Chromium, against a real server: images in, classes and attention out, by mouse and by keys."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import vitrail
from tests.models.tiny import RESNET, awake
from tests.serve.browser import COLUMNS, CONTRAST, NAMES, Browsed, content, expected, picture, served, upload
from vitrail import inspection
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import save
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit_config import ViTConfig

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install the system's package `chromium`"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'vitrail[test]'")

VIT = ViTConfig(width=32, depth=3, mlp_width=48, heads=2, image=(32, 32), patch=(8, 8), classes=6)
LABELS = ("cat", "dog & wolf", "<b>bird</b>", "ship", "frog", "truck")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = awake(VIT, torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=VIT.image, resize=36), labels=LABELS)
    path = tmp_path_factory.mktemp("browser") / "tiny.safetensors"
    save(model, path)
    return path


@pytest.fixture(scope="module")
def address(weights: Path) -> Iterator[str]:
    yield from served(weights)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


Open = Callable[..., Browsed]


@pytest.fixture
def opened(chromium: Any, address: str) -> Iterator[Open]:
    """Opens pages. Whatever a test does, no request may leave for another host, and the console stays silent."""
    all_of_them: list[Browsed] = []

    def opening(at: str = address, **options: Any) -> Browsed:
        context = chromium.new_context(**{"viewport": {"width": 1180, "height": 900}, **options})
        found = Browsed(context.new_page(), at)
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.goto(at)
        found.until("document.title !== 'vitrail' || !document.getElementById('gate').hidden")
        all_of_them.append(found)
        return found

    yield opening
    for one in all_of_them:
        elsewhere = [url for url in one.asked if not url.startswith((one.address, "blob:", "data:"))]
        assert not elsewhere
        # Chromium writes a line for every answer of 400 and more; anything else is ours, a breach of policy above all.
        assert [line for line in one.complaints if not line.startswith("Failed to load resource")] == []
        one.page.context.close()


def test_a_picture_is_answered_as_the_predictor_answers(opened: Open, weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "blocks.png"
    picture().save(path)
    browsed = opened()
    assert browsed.page.is_visible("#welcome")
    assert "tiny knows 6 classes" in browsed.text("#model")
    browsed.give(path)
    browsed.settled()
    wanted = vitrail.predictor(weights, device="cpu")(path)
    assert browsed.text("#answer-title") == wanted.top[0].label
    lines = browsed.text("#top").split("\n")
    assert lines[::2] == [answer.label for answer in wanted.top]
    for shown, answer in zip(lines[1::2], wanted.top, strict=True):
        assert float(shown.removesuffix(" %")) == pytest.approx(100 * answer.probability, abs=0.51)
    assert browsed.page.is_hidden("#welcome")
    assert wanted.top[0].label in browsed.page.inner_text("#said") + browsed.page.inner_text("#top")
    assert "ms" in browsed.text("#took")
    assert "curl -F image=@blocks.png" in browsed.text("#curl")
    assert f"'{browsed.address}/predict?topk=5'" in browsed.text("#curl")


SHOWN = """[...document.querySelectorAll('.samples button span')]
  .filter((one) => one.checkVisibility()).map((one) => one.textContent)"""


def test_the_classes_are_listed_and_can_be_searched(opened: Open) -> None:
    browsed = opened()
    assert browsed.page.inner_text("#class-names").split("\n") == list(LABELS)
    assert browsed.page.evaluate(SHOWN) == ["a sailing boat"]


@pytest.mark.parametrize(
    ("labels", "samples"),
    [
        (tuple(f"flower {at}" for at in range(30)), []),
        (tuple("0123456789"), ["a handwritten 2"]),
        (tuple(str(at) for at in range(30)), []),
    ],
)
def test_samples_suit_the_model(opened: Open, tmp_path: Path, labels: tuple[str, ...], samples: list[str]) -> None:
    model = awake(replace(VIT, classes=len(labels)), torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=VIT.image, resize=36), labels=labels)
    path = tmp_path / "other.safetensors"
    save(model, path)
    for address in served(path):
        browsed = opened(address)
        assert browsed.page.evaluate(SHOWN) == samples
        assert browsed.page.is_visible("#classes")
        if len(labels) == 30 and labels[0].startswith("flower"):
            browsed.page.click("#classes summary")
            browsed.page.fill("#class-part", "FLOWER 2")
            assert browsed.page.inner_text("#class-names").split("\n") == [one for one in labels if "flower 2" in one]


def test_attention_is_drawn_as_the_network_has_it(opened: Open, weights: Path) -> None:
    image = picture()
    browsed = opened()
    browsed.give(upload("blocks.png", content(image)))
    browsed.settled()
    model, ready = vitrail.load(weights), vitrail.predictor(weights, device="cpu").preprocessing(image)
    lit = inspection.rollout(model, ready[None])[0].double().numpy()
    dark = 240 * (1 - (lit - lit.min()) / (lit.max() - lit.min())) ** 1.6
    assert np.abs(browsed.light() - dark).max() <= 2
    seen = []
    for layer in range(VIT.depth):
        browsed.page.fill("#layer", str(layer + 1))
        browsed.settled()
        assert f"Layer {layer + 1}, mean of heads" in browsed.text("#readout")
        seen.append(browsed.light())
        assert np.abs(seen[-1] - expected(weights, image, layer, None, 0)).max() <= 4
    assert not np.array_equal(seen[0], seen[2])
    browsed.page.click("#tiles [data-head='1']")
    browsed.settled()
    assert np.abs(browsed.light() - expected(weights, image, 2, 1, 0)).max() <= 4
    layers = [url.partition("layer=")[2] for url in browsed.asked if "/attention" in url]
    assert layers == ["2", "0", "1"]  # each was fetched once: the last along with the rollout


def test_a_patch_that_is_clicked_shows_where_it_looks(opened: Open, weights: Path) -> None:
    image = picture(1)
    browsed = opened()
    browsed.give(upload("blocks.png", content(image)))
    browsed.settled()
    browsed.click_patch(1, 2)
    first = browsed.light()
    assert np.abs(first - expected(weights, image, 2, None, 1 + 1 * COLUMNS + 2)).max() <= 4
    assert "the patch in row 2, column 3" in browsed.text("#readout")
    browsed.click_patch(3, 0)
    assert np.abs(browsed.light() - expected(weights, image, 2, None, 1 + 3 * COLUMNS)).max() <= 4
    assert not np.array_equal(browsed.light(), first)
    browsed.page.check("input[name=who][value=token]", force=True)
    browsed.settled()
    assert np.abs(browsed.light() - expected(weights, image, 2, None, 0)).max() <= 4
    browsed.page.check("input[name=shown][value=map]", force=True)
    browsed.settled()
    assert browsed.light().min() == 255  # colours, opaque
    assert browsed.page.evaluate("getComputedStyle(document.getElementById('picture')).visibility") == "hidden"


def test_all_of_it_goes_by_keys_alone(opened: Open, weights: Path) -> None:
    browsed = opened()
    page = browsed.page

    def tab_to(selector: str, key: str = "Tab") -> None:
        for _ in range(40):
            if page.evaluate(f"document.activeElement.matches({selector!r})"):
                outlined = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outlined != "none" or "radio" in selector
                return
            page.keyboard.press(key)
        raise AssertionError(f"{selector} is not reached by Tab")

    tab_to(".samples button")
    page.keyboard.press("Enter")
    browsed.until("!document.getElementById('work').hidden")
    browsed.settled()
    tab_to("#grid")
    page.keyboard.press("ArrowRight")
    browsed.settled()
    first = browsed.light()
    assert "row 3, column 3" in browsed.text("#readout")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Home")
    browsed.settled()
    assert "row 2, column 1" in browsed.text("#readout")
    assert not np.array_equal(browsed.light(), first)
    active = page.get_attribute("#grid", "aria-activedescendant")
    cell = page.locator(f"#{active}")
    assert (cell.get_attribute("aria-colindex"), cell.get_attribute("aria-selected")) == ("1", "true")
    assert "row 2, column 1" in (cell.get_attribute("aria-label") or "")
    page.keyboard.press("-")
    browsed.settled()
    assert "Layer 2" in browsed.text("#readout")
    page.keyboard.press("h")
    browsed.settled()
    assert "head 1" in browsed.text("#readout")
    browsed.until("document.getElementById('said').textContent.includes('head 1')")
    tab_to("#tiles [role=radio]")
    page.keyboard.press("ArrowRight")
    browsed.settled()
    assert "head 2" in browsed.text("#readout")
    assert page.evaluate("document.activeElement.dataset.head") == "1"
    tab_to("#layer")
    page.keyboard.press("ArrowLeft")
    browsed.settled()
    assert "Layer 1" in browsed.text("#readout")
    tab_to("input[name=shown]")
    page.keyboard.press("ArrowRight")
    browsed.settled()
    assert browsed.light().min() == 255
    tab_to("#remove", "Shift+Tab")
    page.keyboard.press("Enter")
    browsed.until("!document.getElementById('welcome').hidden")
    assert page.evaluate("document.activeElement.matches('[data-choose]')")


def test_what_is_no_picture_is_refused_in_the_servers_words(opened: Open) -> None:
    browsed = opened()
    browsed.give(upload("notes.txt", b"no image at all", "text/plain"))
    browsed.until("!document.getElementById('failed').hidden")
    assert "notes.txt" in browsed.text("#reason")
    assert browsed.page.is_hidden("#look")
    browsed.give(upload("empty.png", b""))
    browsed.until("document.getElementById('reason').textContent.includes('empty')")
    browsed.give(upload("good.png", content(picture())))
    browsed.settled()
    assert browsed.page.is_hidden("#failed")
    assert browsed.page.locator(".thumb").count() == 3
    assert browsed.page.locator(".thumb.failed").count() == 2


def test_markup_in_names_stays_text(opened: Open, weights: Path) -> None:
    name = "<img src=x onerror=document.title='taken'>'\".png"
    browsed = opened()
    browsed.give(upload(name, content(picture(2))), upload("other.png", content(picture(3))))
    browsed.settled()
    assert browsed.text("#name") == name
    assert browsed.page.locator("main img").count() == 0
    assert browsed.page.locator("#answer b").count() == 0
    assert "<b>bird</b>" in browsed.text("#top")
    assert browsed.page.title() == "tiny · vitrail"


def test_pictures_are_turned_as_they_say(opened: Open) -> None:
    image = Image.new("RGB", (300, 200), "white")
    ImageDraw.Draw(image).rectangle((0, 0, 100, 200), fill="red")
    exif = Image.Exif()
    exif[0x112] = 6  # its left is up
    browsed = opened()
    browsed.give(upload("turned.jpg", content(image, "JPEG", quality=95, exif=exif), "image/jpeg"))
    browsed.settled()
    shown = browsed.pixels("picture")
    assert shown.shape == (300, 200, 4)
    assert shown[30, 100, 1] < 60
    assert shown[270, 100, 1] > 200


def test_the_light_lies_where_the_network_looked(opened: Open) -> None:
    browsed = opened()
    browsed.give(upload("wide.png", content(picture(size=(72, 36)))))
    browsed.settled()
    box, seen = (browsed.page.locator(at).bounding_box() for at in ("#pane", "#seen"))
    assert (seen["x"] - box["x"]) / box["width"] == pytest.approx((72 - 32) / 2 / 72, abs=0.01)
    assert seen["width"] / box["width"] == pytest.approx(32 / 72, abs=0.01)
    assert seen["height"] / box["height"] == pytest.approx(32 / 36, abs=0.01)


def test_several_pictures_are_gone_through(opened: Open, weights: Path) -> None:
    browsed = opened()
    images = [picture(seed) for seed in range(5)]
    browsed.give(*(upload(f"{at}.png", content(image)) for at, image in enumerate(images)))
    browsed.until("document.querySelectorAll('.thumb.done canvas').length === 5")
    wanted = vitrail.predictor(weights, device="cpu")(images)
    for at in (3, 1):
        browsed.page.locator(".thumb").nth(at).click()
        browsed.settled()
        assert browsed.text("#name") == f"{at}.png"
        assert browsed.text("#answer-title") == wanted[at].label
    browsed.page.keyboard.press("End")
    browsed.settled()
    assert browsed.text("#name") == "4.png"
    browsed.page.click("#clear")
    browsed.until("!document.getElementById('welcome').hidden")


def test_a_dropped_and_a_pasted_picture_are_taken(opened: Open) -> None:
    browsed = opened()
    give = """(kind) => new Promise((done) => {
        const canvas = document.createElement('canvas');
        canvas.width = canvas.height = 40;
        canvas.getContext('2d').fillRect(5, 5, 20, 20);
        canvas.toBlob((blob) => {
            const data = new DataTransfer();
            data.items.add(new File([blob], kind + '.png', { type: 'image/png' }));
            const made = { drop: () => new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }),
                           paste: () => new ClipboardEvent('paste', { clipboardData: data, bubbles: true }) };
            document.body.dispatchEvent(made[kind]());
            done();
        });
    })"""
    for kind in ("drop", "paste"):
        browsed.page.evaluate(give, kind)
        browsed.until(f"document.getElementById('name').textContent === '{kind}.png'")
        browsed.settled()
        assert browsed.text("#answer-title").strip()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_phone(opened: Open, width: int) -> None:
    browsed = opened(viewport={"width": width, "height": 700}, is_mobile=True, has_touch=True)
    measured = "[document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]"
    assert max(browsed.page.evaluate(measured)) == width
    long = "a-very-long-name-" * 9
    browsed.give(*(upload(f"{long}{at}.png", content(picture(at))) for at in range(9)))
    browsed.settled()
    for summary in browsed.page.locator("summary").all():
        summary.click()
    assert max(browsed.page.evaluate(measured)) == width
    small = browsed.page.evaluate(
        """[...document.querySelectorAll('button, summary, input[type=range]')].filter((one) => one.offsetParent)
        .map((one) => [one.textContent || one.id, one.getBoundingClientRect()])
        .filter(([, box]) => Math.min(box.width, box.height) < 24).map(([name]) => name)"""
    )
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names(opened: Open, scheme: str) -> None:
    browsed = opened(color_scheme=scheme, reduced_motion="reduce")
    poor, nameless = [], []
    for step in ("welcome", "failed", "work"):
        if step == "failed":
            browsed.give(upload("notes.txt", b"none", "text/plain"))
            browsed.until("!document.getElementById('failed').hidden")
        if step == "work":
            browsed.give(upload("one.png", content(picture())), upload("two.png", content(picture(1))))
            browsed.settled()
            for summary in browsed.page.locator("summary").all():
                summary.click()
        found = browsed.page.evaluate(CONTRAST)
        assert len(found) > 5
        poor += [(step, *each) for each in found if each[1] < 4.5]
        nameless += browsed.page.evaluate(NAMES)
    assert (poor, nameless) == ([], [])
    assert browsed.page.evaluate("getComputedStyle(document.querySelector('.rail i')).animationName") == "none"


def test_a_token_is_asked_for_and_kept_in_memory_alone(opened: Open, weights: Path) -> None:
    for address in served(weights, "--token", "open sesame"):
        browsed = opened(address)
        page = browsed.page
        assert page.is_visible("#gate")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        browsed.until("document.getElementById('token-why').textContent.includes('not the token')")
        browsed.until("!document.getElementById('gate').hidden")
        page.fill("#token", "open sesame")
        page.keyboard.press("Enter")
        browsed.until("document.title !== 'vitrail'")
        browsed.give(upload("one.png", content(picture())))
        browsed.settled()
        assert page.is_hidden("#gate")
        assert "open sesame" not in page.content()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert not any("sesame" in url for url in browsed.asked)


def test_a_server_that_is_full_or_gone_is_asked_again(opened: Open) -> None:
    browsed = opened()
    answers = iter([429, 0])

    def sometimes(route: Any) -> None:
        status = next(answers, 200)
        if status == 429:
            route.fulfill(
                status=429, headers={"Retry-After": "1"}, json={"error": "full", "reason": "The queue is full."}
            )
        elif status == 0:
            route.abort("connectionrefused")
        else:
            route.continue_()

    browsed.page.route("**/predict*", sometimes)
    browsed.give(upload("one.png", content(picture())))
    browsed.until("document.getElementById('took').textContent.startsWith('The queue is full. Trying again in 1 s.')")
    browsed.until("document.getElementById('notice').textContent.includes('does not answer')")
    browsed.settled()  # by itself, once /health answers
    browsed.until("document.querySelector('.rail i').style.width")
    assert browsed.page.is_hidden("#notice")
    assert browsed.page.is_hidden("#failed")


def test_a_network_without_attention_says_so(opened: Open, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = awake(replace(RESNET, image=(32, 32)), torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=(32, 32)), labels=LABELS[:5])
    save(model, tmp_path / "bit.safetensors")
    for address in served(tmp_path / "bit.safetensors"):
        browsed = opened(address)
        browsed.give(upload("one.png", content(picture())))
        browsed.settled()
        assert "no attention" in browsed.text("#readout")
        assert browsed.page.is_hidden("#controls")
        assert browsed.page.is_hidden("#seen")
        assert browsed.text("#answer-title") in LABELS
        assert not any("/attention" in url for url in browsed.asked)


def test_a_mask_is_drawn_over_its_picture(opened: Open, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = awake(replace(VIT, head="patches"), torch.float32)
    model.card = Card(preprocessing=Preprocessing(image=VIT.image), labels=LABELS, task="segmentation")
    save(model, tmp_path / "seg.safetensors")
    for address in served(tmp_path / "seg.safetensors"):
        browsed = opened(address)
        browsed.give(upload("one.png", content(picture())))
        browsed.settled()
        wide = browsed.until("document.querySelector('#drawing img')?.naturalWidth")
        assert (wide, browsed.page.evaluate("document.querySelector('#drawing img').naturalHeight")) == (60, 45)
        assert browsed.text("#answer-title").split(", ")[0] in LABELS
