"""What the server answers: the same as the predictor, in the shapes that are promised, and errors that help."""

import base64
import html
import io
import json
import re
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.tiny import RESNET
from tests.serve.in_process_server import LABELS, NETWORK, Inside, inside, picture, predictor
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.layer_taps import iterate_layers
from vitrail.inspection.rollout import rollout
from vitrail.serve.pages import page_style

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


@pytest.fixture(scope="module")
def here() -> Generator[Inside]:
    with inside(max_pixels=100_000, max_bytes=200_000) as running:
        yield running


def body(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def problem(response: httpx.Response, status: int) -> str:
    told = body(response, status)
    assert set(told) == {"error", "reason"}
    assert told["error"]
    assert told["reason"]
    return f"{told['error']}: {told['reason']}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_the_predictors(here: Inside, kind: str) -> None:
    data = picture(1, kind)
    told = body(here.post(data=data, params={"topk": 3}))
    assert told["model"] == "tiny"
    (prediction,) = told["predictions"]
    assert prediction["name"] == "a.png"
    right = here.predictor(data, topk=3)
    assert [answer["label"] for answer in prediction["top"]] == [answer.label for answer in right.top]
    assert [answer["index"] for answer in prediction["top"]] == [answer.index for answer in right.top]
    for got, wanted in zip(prediction["top"], right.top, strict=True):
        assert got["probability"] == pytest.approx(wanted.probability, abs=1e-6)


def test_many_pictures_come_back_in_order_under_their_names(here: Inside) -> None:
    datas = [picture(seed) for seed in range(9)]
    files = [("image", (f"{at}.png", data)) for at, data in enumerate(datas)]
    told = body(here.client.post("/predict", files=files))["predictions"]
    assert [each["name"] for each in told] == [f"{at}.png" for at in range(9)]
    for each, right in zip(told, here.predictor(datas), strict=True):
        assert [answer["index"] for answer in each["top"]] == [answer.index for answer in right.top]
        assert len(each["top"]) == 5


def test_json_and_form_say_the_same(here: Inside) -> None:
    text = base64.b64encode(picture(2)).decode()
    sent = {"images": [text, f"data:image/png;base64,{text}"]}
    first, second = body(here.client.post("/predict", json=sent))["predictions"]
    assert (first["name"], second["name"]) == ("image 1", "image 2")
    by_form = body(here.post(data=picture(2)))["predictions"][0]["top"]
    pairs = [*zip(first["top"], second["top"], strict=True), *zip(first["top"], by_form, strict=True)]
    for one, other in pairs:  # rows of one batch may differ in the last bit
        assert one["index"] == other["index"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-6)


def test_names_are_told_back_as_data(here: Inside) -> None:
    name = '<script>alert("x")</script>/../../etc/passwd'
    response = here.client.post("/predict", files=[("image", (name, picture()))])
    assert body(response)["predictions"][0]["name"].endswith("/etc/passwd")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"


def test_features_are_the_predictors(here: Inside) -> None:
    told = body(here.post("/embed", picture(4)))
    torch.testing.assert_close(torch.tensor(told["features"]), here.predictor.features([picture(4)]))


def test_attention_is_what_inspection_sees(here: Inside) -> None:
    data = picture(5)
    told = body(here.post("/attention", data, params={"layer": 1}))
    network = here.predictor.network
    images = here.predictor.normalise(here.predictor.prepare(data)[None])
    assert told["grid"] == [2, 4]
    assert (told["layers"], told["heads"], told["class_token"], told["layer"]) == (2, 2, True, 1)
    assert told["size"] == [20, 14]
    assert told["crop"] == [0, 0, 20, 14]
    lit = rollout(network, images).flatten()
    torch.testing.assert_close(torch.tensor(told["rollout"]), lit / lit.max(), atol=1e-5, rtol=0)
    # Class token, then patches; the two registers between them are left out, among rows and among columns.
    seen = list(iterate_layers(network, images))[1].attention[0][:, [0, *range(3, 11)], 3:]
    maps = np.frombuffer(base64.b64decode(told["maps"]), np.uint8).reshape(2, 9, 8)
    scale = np.array(told["scale"]).reshape(2, 9, 1)
    np.testing.assert_allclose(maps / 255 * scale, seen.numpy(), atol=1 / 255)
    assert (maps.max(-1) == 255).all()
    np.testing.assert_allclose(scale[..., 0], seen.amax(-1).numpy(), rtol=1e-4)


def test_rollout_alone(here: Inside) -> None:
    told = body(here.post("/attention"))
    assert told["layer"] is told["maps"] is told["scale"] is None
    assert max(told["rollout"]) == 1


def test_the_crop_is_told_in_pixels_of_the_upright_picture() -> None:
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (40, 80)).save(turned, "JPEG", exif=exif)
    preparation = Preprocessing(image=(8, 12), resize=16)
    with inside(given=predictor(NETWORK, preparation)) as here:
        told = body(here.post("/attention", turned.getvalue()))
    assert told["size"] == [80, 40]
    assert told["crop"] == [25, 10, 30, 20]  # 40 px become 16, of which the middle 12 x 8 are seen


def test_a_resnet_says_that_it_has_no_attention() -> None:
    with inside(RESNET) as here:
        assert "no attention" in problem(here.post("/attention"), 409)
        assert body(here.client.get("/model"))["attention"] is False
        assert len(body(here.post())["predictions"]) == 1


def test_a_network_without_head_embeds_only() -> None:
    with inside(replace(NETWORK, classes=0, head="none")) as here:
        assert "/embed" in problem(here.post(), 409)
        assert len(body(here.post("/embed"))["features"][0]) == 16


def test_attention_beyond_the_limit_is_refused() -> None:
    with inside(attention_bytes=140) as here:
        assert "omit `layer`" in problem(here.post("/attention", params={"layer": 0}), 409)
        assert body(here.post("/attention"))["rollout"]
    with inside(attention_bytes=10) as here:
        assert "attention too large" in problem(here.post("/attention"), 409)


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("/predict", "topk=0", "at least 1"),
        ("/predict", "topk=many", "not an integer"),
        ("/predict", "topk=99999999999999999999", "not an integer"),
        ("/predict", "top_k=3", "'top_k'; this request takes topk"),
        ("/embed", "topk=3", "takes no parameters"),
        ("/attention", "layer=2", "layers 0 to 1"),
        ("/attention", "layer=-1", "layers 0 to 1"),
        ("/attention", "layer=x", "not an integer"),
    ],
)
def test_parameters_are_checked(here: Inside, path: str, query: str, words: str) -> None:
    assert words in problem(here.post(f"{path}?{query}"), 400)


def test_more_than_all_classes_are_all_classes(here: Inside) -> None:
    assert len(body(here.post(params={"topk": 500}))["predictions"][0]["top"]) == len(LABELS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty file"),
        (b"\0" * 50, "all of its 50 bytes are zero"),
        (b"<html>hello</html>", "not an image: starts with '<html>"),
        (picture()[:200], "a.png: "),
        (picture(kind="JPEG", size=(400, 300)), "more than the limit of 100,000"),
    ],
)
def test_what_is_no_picture_is_415_with_the_reason(here: Inside, data: bytes, words: str) -> None:
    assert words in problem(here.post(data=data), 415)


def test_one_bad_picture_is_named_and_frees_the_places_of_the_others(here: Inside) -> None:
    files = [("image", (f"{at}.png", picture() if at != 3 else b"no")) for at in range(6)]
    assert "3.png" in problem(here.client.post("/predict", files=files), 415)
    assert len(here.service.queue) == 0


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/predict/",
        "//predict",
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page/index.html",
        "/static/../app.py",
        "/index.html",
        "/predict%00",
        "/C:\\windows\\win.ini",
        "/file:///etc/passwd",
    ],
)
def test_nothing_else_is_there(here: Inside, path: str) -> None:
    for method in ("GET", "POST"):
        problem(
            here.client.request(method, httpx.URL(f"http://127.0.0.1:{here.port}").copy_with(raw_path=path.encode())),
            404,
        )


def test_methods(here: Inside) -> None:
    response = here.client.get("/predict")
    assert "use POST" in problem(response, 405)
    assert response.headers["allow"] == "POST, OPTIONS"
    assert "use GET" in problem(here.client.post("/health"), 405)
    assert "use POST" in problem(here.client.delete("/predict"), 405)
    response = here.client.options("/model")
    assert (response.status_code, response.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    response = here.client.head("/health")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0


def test_model_says_what_a_client_needs(here: Inside) -> None:
    told = body(here.client.get("/model"))
    assert told["labels"] == list(LABELS)
    assert (told["name"], told["network"], told["image_size"]) == ("tiny", "ViT", [8, 12])
    assert (told["attention"], told["layers"], told["heads"], told["grid"]) == (True, 2, 2, [2, 4])
    assert told["limits"]["max_bytes"] == 200_000
    assert "/" not in json.dumps(told)  # no path of this machine


def test_metrics_count(here: Inside) -> None:
    def read() -> dict[str, float]:
        response = here.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r'[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [-+.e\d]+', line) for line in lines), lines
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = read()
    here.post()
    here.post(data=b"no")
    here.client.get("/some/thing")
    after = read()

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more('vitrail_requests_total{route="/predict",status="200"}') == 1
    assert more('vitrail_requests_total{route="/predict",status="415"}') == 1
    assert more('vitrail_requests_total{route="other",status="404"}') == 1
    assert more('vitrail_request_seconds_bucket{route="/predict",le="+Inf"}') == 2
    assert more('vitrail_pictures_total{for="predict"}') == 1
    assert more("vitrail_batch_pictures_count") == 1
    assert after["vitrail_ready"] == 1
    assert after["vitrail_queue_pictures"] == after["vitrail_body_bytes"] == 0
    assert after["process_resident_memory_bytes"] > 1e7
    assert not any("/some/thing" in name for name in after)


def test_the_description_covers_every_route(here: Inside) -> None:
    told = body(here.client.get("/openapi.json"))
    assert told["openapi"].startswith("3.1")
    for path, verbs in told["paths"].items():
        for verb in verbs:
            response = here.client.request(verb.upper(), path)
            assert response.status_code not in (404, 405), path
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(told)))
    assert named <= set(told["components"]["schemas"])
    shown = body(here.post("/attention", params={"layer": 0}))
    assert set(told["components"]["schemas"]["Attention"]["properties"]) == set(shown)


def test_pages_bring_everything_along(here: Inside) -> None:
    for path in ("/docs", "/"):
        response = here.client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", response.text)
    assert "/predict" in here.client.get("/docs").text


def commands(text: str) -> list[str]:
    return [html.unescape(one) for one in re.findall(r"curl [^<]*", text)]


def test_the_docs_have_the_real_address_in_their_commands_and_look_like_the_page(here: Inside) -> None:
    text = here.client.get("/docs").text
    found = commands(text)
    assert len(found) == 3
    assert all(f"'http://127.0.0.1:{here.port}/" in one for one in found)
    assert page_style() in text
    text = here.client.get("/docs", headers={"host": f"localhost:{here.port}"}).text
    assert all(f"'http://localhost:{here.port}/" in one for one in commands(text))


def test_the_docs_repeat_no_name_that_is_none_and_say_where_the_token_goes() -> None:
    with inside(hosts=(), token="s3cret") as open_to_all:
        for name in ("a'b;echo", "<i>", "x" * 300):
            headers = {"host": name, "authorization": "Bearer s3cret"}
            text = open_to_all.client.get("/docs", headers=headers).text
            assert name not in text
            assert all(f"'http://127.0.0.1:{open_to_all.port}/" in one for one in commands(text))
        assert all("-H 'Authorization: Bearer TOKEN'" in one for one in commands(text))
        assert "s3cret" not in text
