"""The server's pages: one to try the model, and the HTTP interface as OpenAPI 3.1 and as a page without scripts.

There is no build step: the files in page/ are joined unchanged. The style starts with that of the reports. Each page
is sent with a policy that allows its own style and script by their hashes, and nothing else.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any, Final

from vitrail import __version__
from vitrail.report.page import hash_base64, read_template
from vitrail.serve.requests import FIELD
from vitrail.serve.served_model import ServedModel

SCRIPTS: Final = (
    *("api.js", "attention_maps.js", "images.js", "sample_images.js"),
    *("viewer.js", "segments.js", "main.js", "input.js"),
)
ONE_IMAGE: Final = f"-F {FIELD}=@photo.jpg"
TWO_IMAGES: Final = f"-F {FIELD}=@first.jpg -F {FIELD}=@second.jpg"
EXAMPLES: Final = {"/predict": ONE_IMAGE, "/attention": ONE_IMAGE, "/embed": TWO_IMAGES}
FORMATS: Final = "JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF, or HEIC where its extra is installed"


@lru_cache(maxsize=1)
def render_page() -> str:
    """The whole document, the same for every model: it asks the server about the model."""
    return read_asset("index.html").replace("{style}", page_style()).replace("{script}", page_script())


@lru_cache(maxsize=1)
def content_policy() -> str:
    """The Content-Security-Policy of the page: its own style and script, images already in the browser, requests to
    its own server."""
    own = f"script-src 'sha256-{hash_base64(page_script())}'; style-src 'sha256-{hash_base64(page_style())}'"
    none = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; trusted-types 'none'"
    used = "img-src blob: data:; connect-src 'self'; require-trusted-types-for 'script'"
    return f"default-src 'none'; {own}; {used}; {none}"


@lru_cache(maxsize=1)
def page_style() -> str:
    return "\n".join([read_template("page.css"), read_asset("page.css")])


@lru_cache(maxsize=1)
def page_script() -> str:
    return "\n".join(map(read_asset, SCRIPTS))


def read_asset(name: str) -> str:
    return resources.files("vitrail.serve").joinpath("page", name).read_text("utf-8")


def describe_interface(served: ServedModel) -> dict[str, Any]:
    """The server's OpenAPI 3.1 description: page/openapi.json with the model, its task and its limits filled in."""
    document: dict[str, Any] = json.loads(read_asset("openapi.json"))
    limits, predictor = served.describe()["limits"], served.predictor
    paths, about = document["paths"], f"{served.name}: predicts what is in an image, and shows where the model looks."
    document["info"] |= {"version": __version__, "description": about}
    for path in EXAMPLES:
        count = "One image" if path == "/attention" else f"At most {limits['max_images']} images"
        size = f"{limits['max_bytes']:,} bytes together and {limits['max_pixels']:,} pixels each"
        paths[path]["post"]["description"] = f"{count}, {size}: {FORMATS}."
    predict = paths["/predict"]["post"]
    predict["summary"] = predictor.task.describe_predictions(multi_label=predictor.multi_label)
    predict["parameters"] = [each for each in predict["parameters"] if each["name"] in (*served.options, "show")]
    prediction = dict(predictor.task.prediction_schema())
    named, shown = {"name": {"type": "string"}}, {"shown": {"$ref": "#/components/schemas/Shown"}}
    prediction["properties"] = {**named, **prediction.get("properties", {}), **shown}
    prediction["required"] = ["name", *prediction.get("required", [])]
    document["components"]["schemas"]["Predictions"]["properties"]["predictions"]["items"] = prediction
    if served.settings.token:
        document["security"] = [{"token": []}]
    return document


def render_docs(document: dict[str, Any], address: str) -> tuple[str, str]:
    """Renders a description as a page; also returns its policy. Commands on it use `address`, so they can be pasted
    unchanged."""
    from jinja2 import Environment

    style = "\n".join([page_style(), read_asset("docs.css")])
    header = "-H 'Authorization: Bearer TOKEN' " if "security" in document else ""
    operations = list[tuple[str, str, dict[str, Any], str]]()
    for path, verbs in document["paths"].items():
        for verb, about in verbs.items():
            options = [f"{each['name']}={each['example']}" for each in about.get("parameters", []) if "example" in each]
            url = f"{address}{path}?{'&'.join(options)}".rstrip("?")
            command = f"curl {header}{EXAMPLES[path]} '{url}'" if path in EXAMPLES else ""
            operations.append((verb, path, about, command))
    schemas = [(name, json.dumps(each, indent=1)) for name, each in document["components"]["schemas"].items()]
    facts = {"info": document["info"], "responses": document["components"]["responses"], "schemas": schemas}
    template = Environment(autoescape=True).from_string(read_asset("docs.html"))
    text = template.render(style=style, address=address, operations=operations, **facts)
    policy = f"default-src 'none'; style-src 'sha256-{hash_base64(style)}'; base-uri 'none'; form-action 'none'; "
    return text, policy + "frame-ancestors 'none'"
