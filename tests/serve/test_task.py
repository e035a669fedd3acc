"""A server of another task: it knows no more of it than the task says."""

import base64
import io
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.predict.colour_task import NAMES, colour_network, colour_task
from tests.serve.in_process_server import Inside, inside, picture
from vitrail.predict.predictor import Predictor


@pytest.fixture(scope="module")
def here() -> Generator[Inside]:
    with colour_task(), inside(given=Predictor(colour_network(), device="cpu"), max_pixels=1_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def classifier() -> Generator[Inside]:
    with inside() as running:
        yield running


def predictions(here: Inside, data: bytes, **query: Any) -> list[dict[str, Any]]:
    response = here.post(data=data, params=query)
    assert response.status_code == 200, response.text
    return response.json()["predictions"]


def test_an_answer_is_the_prediction_as_data(here: Inside) -> None:
    data = picture(1, size=(31, 17))
    (told,) = predictions(here, data)
    expected: Any = here.predictor(data)
    assert told.keys() == {"name", "colour", "size"}
    assert told["size"] == [17, 31]
    for name, share in zip(NAMES, expected.shares, strict=True):
        assert told["colour"][name] == pytest.approx(share, abs=1e-6)


def test_many_images_keep_their_own_views(here: Inside) -> None:
    files = [("image", (f"{at}.png", picture(at, size=(20 + at, 30 - at)))) for at in range(9)]
    told = here.client.post("/predict", files=files).json()["predictions"]
    assert [each["size"] for each in told] == [[30 - at, 20 + at] for at in range(9)]


def test_the_model_says_what_it_is_for(here: Inside, classifier: Inside) -> None:
    about = here.client.get("/model").json()
    assert (about["task"], about["options"], about["labels"]) == ("colour", [], list(NAMES))
    about = classifier.client.get("/model").json()
    assert (about["task"], about["options"]) == ("classification", ["topk"])


@pytest.mark.parametrize("query", ["topk=3", "threshold=0.5", "show=2", "show=x"])
def test_what_the_task_does_not_take_is_refused(here: Inside, query: str) -> None:
    response = here.post(f"/predict?{query}")
    assert response.status_code == 400
    assert set(response.json()) == {"error", "reason"}


def test_a_page_gets_text_and_a_drawing(here: Inside) -> None:
    data = picture(2, size=(1600, 40))
    (told,) = predictions(here, data, show=1)
    expected: Any = here.predictor(data)
    assert told["shown"]["text"] == str(expected)
    assert told["shown"]["bars"] == []
    drawing = np.asarray(Image.open(io.BytesIO(base64.b64decode(told["shown"]["png"]))))
    assert drawing.shape == (35, 1400, 3)
    assert np.abs(drawing.mean((0, 1)) - (np.array(expected.rgb) + 127.5) / 2).max() < 8
    two = [("image", ("a.png", data)), ("image", ("b.png", data))]
    assert here.client.post("/predict?show=1", files=two).status_code == 400


def test_a_classifier_has_bars_and_nothing_to_draw(classifier: Inside) -> None:
    data = picture(3)
    (told,) = predictions(classifier, data, show=1, topk=2)
    assert told["shown"]["png"] is None
    assert [bar["label"] for bar in told["shown"]["bars"]] == [answer["label"] for answer in told["top"]]
    assert [bar["chosen"] for bar in told["shown"]["bars"]] == [True, False]
    assert "shown" not in predictions(classifier, data)[0]


def test_the_interface_is_described(here: Inside, classifier: Inside) -> None:
    for running, names, keys in ((here, ["show"], ["name"]), (classifier, ["topk", "show"], ["name", "top"])):
        described = running.client.get("/openapi.json").json()
        asked = described["paths"]["/predict"]["post"]
        assert [each["name"] for each in asked["parameters"]] == names
        one = described["components"]["schemas"]["Predictions"]["properties"]["predictions"]["items"]
        assert one["required"] == keys
    page = here.client.get("/docs").text
    assert "topk" not in page
    assert "/predict&#39;" in page
