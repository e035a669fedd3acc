"""Whom the server answers: by name, by origin, by token; and what every answer carries."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.serve.in_process_server import Inside, inside
from vitrail.core.errors import ConfigError
from vitrail.serve.settings import ServeSettings, allowed_hosts, strip_port

DEMO = "https://demo.example"
TOKEN = "s3cret-token"


@pytest.fixture(scope="module")
def plain() -> Generator[Inside]:
    with inside() as here:
        yield here


@pytest.fixture(scope="module")
def closed() -> Generator[Inside]:
    with inside(token=TOKEN, origins=(DEMO,)) as here:
        yield here


def status(here: Inside, path: str = "/predict", **headers: str) -> int:
    method = "POST" if path in ("/predict", "/attention", "/embed") else "GET"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if method == "POST":
        return here.post(path, headers=names).status_code
    return here.client.get(path, headers=names).status_code


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST", "127.0.0.1", "[::1]:{port}"])
def test_its_own_names_are_answered(plain: Inside, host: str) -> None:
    assert status(plain, Host=host.format(port=plain.port)) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "localhost.", "0"]
)
def test_a_name_that_was_made_to_point_here_is_not(plain: Inside, host: str) -> None:
    for path in ("/predict", "/", "/health", "/model"):
        assert status(plain, path, Host=host.format(port=plain.port)) == 421


def test_a_server_for_others_may_be_called_anything() -> None:
    with inside(hosts=()) as here:
        assert status(here, Host="photos.example") == 200
        assert status(here, Host="photos.example", Origin="http://photos.example") == 200
        assert status(here, Host="photos.example", Origin="http://evil.example") == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://[", "x" * 3000])
def test_foreign_pages_may_not_ask(plain: Inside, origin: str) -> None:
    assert status(plain, Origin=origin) == 403


def test_its_own_page_may(plain: Inside) -> None:
    assert status(plain, Origin=f"http://127.0.0.1:{plain.port}") == 200
    assert status(plain, Sec_Fetch_Site="same-origin") == 200
    assert status(plain, Sec_Fetch_Site="cross-site") == 403
    assert "access-control-allow-origin" not in plain.post(headers={"Origin": f"http://127.0.0.1:{plain.port}"}).headers


def test_a_preflight_of_a_foreign_page_is_refused(plain: Inside) -> None:
    asked = {"Origin": DEMO, "Access-Control-Request-Method": "POST"}
    response = plain.client.options("/predict", headers=asked)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


def test_a_listed_origin_may_ask_and_read(closed: Inside) -> None:
    asked = {"Origin": DEMO, "Access-Control-Request-Method": "POST"}
    response = closed.client.options("/predict", headers=asked)  # a browser asks without the token
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == DEMO
    assert "Authorization" in response.headers["access-control-allow-headers"]
    response = closed.post(headers={"Origin": DEMO, "Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == DEMO
    assert response.headers["vary"] == "Origin"
    assert status(closed, Origin=f"{DEMO}.evil.example", Authorization=f"Bearer {TOKEN}") == 403
    assert status(closed, Host="demo.example", Authorization=f"Bearer {TOKEN}") == 200


@pytest.mark.parametrize(
    "path", ["/predict", "/attention", "/embed", "/model", "/ready", "/metrics", "/docs", "/openapi.json", "/nope"]
)
def test_the_token_is_asked_for(closed: Inside, path: str) -> None:
    right = 404 if path == "/nope" else 200
    assert status(closed, path, Authorization=f"Bearer {TOKEN}") == right
    assert status(closed, path, Authorization=f"bearer  {TOKEN}") == right
    for wrong in ("Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN):
        assert status(closed, path, Authorization=wrong) == 401
    response = closed.client.get("/model")
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")


def test_page_and_health_need_none(closed: Inside) -> None:
    assert status(closed, "/") == 200
    assert status(closed, "/health") == 200


def test_every_answer_carries_the_same_guard(plain: Inside) -> None:
    wire = plain.connect()
    with wire:
        wire.sendall(b"nonsense\r\n\r\n")
        raw = wire.recv(65536).lower()
    assert raw.startswith(b"http/1.1 400")
    answers: list[Any] = [
        plain.post().headers,
        plain.client.get("/").headers,
        plain.client.get("/nope").headers,
        plain.client.get("/model", headers={"Host": "evil.example"}).headers,
        dict(line.split(": ", 1) for line in raw.decode().split("\r\n\r\n")[0].split("\r\n")[1:]),
    ]
    for headers in answers:
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-frame-options"].lower() == "deny"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_settings_are_checked() -> None:
    for wrong in (
        {"queue": 0},
        {"batch": 0},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"wait_ms": -1},
        {"token": ""},
    ):
        with pytest.raises(ConfigError):
            ServeSettings(**wrong)
    for origin in ("demo.example", "https://demo.example/", "https://demo.example/path", "ftp://x", "*"):
        with pytest.raises(ConfigError, match="scheme and host"):
            ServeSettings(origins=(origin,))


def test_hosts() -> None:
    assert strip_port("127.0.0.1:8000") == "127.0.0.1"
    assert strip_port("[::1]:8000") == "[::1]"
    assert allowed_hosts("::1", loopback=True, origins=())[-1] == "[::1]"
    assert allowed_hosts("127.0.0.2", loopback=True, origins=("https://a.example:8443",))[-2:] == (
        "127.0.0.2",
        "a.example",
    )
    assert allowed_hosts("0.0.0.0", loopback=False, origins=()) == ()
