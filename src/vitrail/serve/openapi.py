"""The interface described: as OpenAPI 3.1, and as a page made of that, without a script and without another host."""

import html
import json
from typing import Any, Final

from vitrail import __version__
from vitrail.report.page import digest
from vitrail.serve.page import docs_style
from vitrail.serve.requests import FIELD, FORM, JSON
from vitrail.serve.served_model import Served

ERROR: Final = {"$ref": "#/components/schemas/Error"}
PROBLEMS: Final = {
    "400": "the body or a parameter is not sound",
    "401": "the token is missing or wrong",
    "403": "a page of a foreign origin asks",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the content type is not read, or an image is none",
    "429": "the queue is full; Retry-After says when to ask again",
    "503": "no answer in time, or the server stops or is not ready; Retry-After says when to ask again",
}
EXAMPLES: Final = {
    "/predict": f"-F {FIELD}=@photo.jpg",
    "/attention": f"-F {FIELD}=@photo.jpg",
    "/embed": f"-F {FIELD}=@first.jpg -F {FIELD}=@second.jpg",
}


def document(served: Served) -> dict[str, Any]:
    """OpenAPI 3.1 of what a server answers."""
    limits, task = served.about()["limits"], served.predictor.task
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vitrail",
            "version": __version__,
            "description": f"{served.name}: what is on an image, and where the network looks.",
        },
        "paths": {
            "/predict": asked(
                task.describe_predictions(multi_label=served.predictor.multi_label),
                "Predictions",
                limits,
                parameters=[*(OPTIONS[name] for name in served.options), SHOW],
            ),
            "/attention": asked("Where the network looks, for one image", "Attention", limits, parameters=[LAYER]),
            "/embed": asked("Features of each image", "Features", limits),
            "/model": told("What is served, and its limits"),
            "/health": told("Whether the process answers; needs no token"),
            "/ready": told("Whether requests are served", problems=("503",)),
            "/metrics": told("Counters in Prometheus' text format", kind="text/plain"),
            "/openapi.json": told("This description"),
            "/docs": told("This description as a page", kind="text/html"),
            "/": told("A page to try it; needs no token", kind="text/html"),
        },
        "components": {
            "schemas": {**SCHEMAS, "Predictions": predictions(task.prediction_schema())},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        **({"security": [{"token": []}]} if served.settings.token else {}),
    }


def asked(summary: str, schema: str, limits: dict[str, Any], parameters: list[Any] | None = None) -> dict[str, Any]:
    """A POST of images."""
    body = {
        FORM: {
            "schema": {
                "type": "object",
                "required": [FIELD],
                "properties": {FIELD: {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
        JSON: {"schema": {"$ref": "#/components/schemas/Images"}},
    }
    said = (
        f"At most {limits['max_images']} images, {limits['max_bytes']:,} bytes together and {limits['max_pixels']:,} "
        "pixels each: JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF, or HEIC where its extra is installed."
    )
    return {
        "post": {
            "summary": summary,
            "description": said
            if schema != "Attention"
            else said.replace(f"At most {limits['max_images']} images", "One image"),
            "parameters": parameters or [],
            "requestBody": {"required": True, "content": body},
            "responses": {
                "200": {
                    "description": "done",
                    "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
                },
                **{status: problem(status) for status in PROBLEMS},
            },
        }
    }


def told(summary: str, *, kind: str = JSON, problems: tuple[str, ...] = ()) -> dict[str, Any]:
    """A GET."""
    done = {"200": {"description": "done", "content": {kind: {}}}}
    return {"get": {"summary": summary, "responses": {**done, **{status: problem(status) for status in problems}}}}


def problem(status: str) -> dict[str, Any]:
    return {"description": PROBLEMS[status], "content": {JSON: {"schema": ERROR}}}


def listed(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def predictions(schema: dict[str, Any]) -> dict[str, Any]:
    """The answer of /predict: the name of each image with what its prediction holds."""
    one = {
        **schema,
        "required": ["name", *schema.get("required", [])],
        "properties": {"name": TEXT, **schema.get("properties", {}), "shown": SHOWN},
    }
    return record(model=TEXT, predictions=listed(one))


NUMBER: Final = {"type": "number"}
WHOLE: Final = {"type": "integer"}
TEXT: Final = {"type": "string"}
THRESHOLD: Final = {
    "name": "threshold",
    "in": "query",
    "description": "the probability from which a class is chosen; each class is scored by itself",
    "schema": {"type": "number", "minimum": 0, "maximum": 1},
}
TOPK: Final = {"name": "topk", "in": "query", "example": 3, "schema": {"type": "integer", "minimum": 1, "default": 5}}
OPTIONS: Final = {"topk": TOPK, "threshold": THRESHOLD}
SHOW: Final = {
    "name": "show",
    "in": "query",
    "description": "1 adds, for one image, what a page shows: text, bars and a drawing",
    "schema": {"type": "integer", "enum": [0, 1], "default": 0},
}
LAYER: Final = {
    "name": "layer",
    "in": "query",
    "description": "from 0; left out, there is rollout alone",
    "example": 0,
    "schema": {"type": "integer", "minimum": 0},
}
BYTES: Final = {"type": ["string", "null"], "contentEncoding": "base64"}
SHOWN: Final = {
    **record(
        text=TEXT,
        bars=listed(record(label=TEXT, share=NUMBER, chosen={"type": "boolean"}, colour=TEXT)),
        png={**BYTES, "description": "the prediction drawn over the image, where there is something to draw"},
    ),
    "description": "with show=1",
}
SCHEMAS: Final = {
    "Error": record(error=TEXT, reason=TEXT),
    "Images": record(images=listed({"type": "string", "contentEncoding": "base64"}, minItems=1)),
    "Features": record(model=TEXT, features=listed(listed(NUMBER))),
    "Attention": record(
        model=TEXT,
        grid={**listed(WHOLE), "description": "rows and columns of patches"},
        layers=WHOLE,
        heads=WHOLE,
        class_token={"type": "boolean"},
        crop={**listed(NUMBER), "description": "left, top, width, height of what the network saw of the image"},
        size={**listed(WHOLE), "description": "width and height of the upright image"},
        rollout={**listed(NUMBER), "description": "a number for each patch, row by row; the largest is 1"},
        layer={"type": ["integer", "null"]},
        maps={
            **BYTES,
            "description": "bytes [heads, T, N]: how each token (class token first, then patches) sees each patch; "
            "every row is scaled by its own maximum",
        },
        scale={"type": ["array", "null"], "items": NUMBER, "description": "those maxima, [heads * T]"},
    ),
}


def reference(described: dict[str, Any], address: str) -> tuple[str, str]:
    """The page of a description, and the policy to send with it. `address` is where this server is reached; the
    commands on the page can be pasted as they are."""
    header = "-H 'Authorization: Bearer TOKEN' " if "security" in described else ""
    parts = [
        section(verb, path, about, f"curl {header}{{}} '{address}{{}}'")
        for path, verbs in described["paths"].items()
        for verb, about in verbs.items()
    ]
    parts.append("<h2>Shapes</h2>")
    for name, schema in described["components"]["schemas"].items():
        parts.append(f"<h3>{name}</h3>{code(json.dumps(schema, indent=1))}")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest(docs_style())}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    info = described["info"]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>vitrail: HTTP interface</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<style>{docs_style()}</style></head><body><div class="glass" aria-hidden="true"></div>'
        f'<header class="top"><div><h1>{html.escape(info["title"])}</h1>'
        f'<p class="lead">{html.escape(info["description"])} The interface at <b>{html.escape(address)}</b>.</p></div>'
        '<nav aria-label="Server"><a href="/">Try it</a><a href="/openapi.json">openapi.json</a></nav></header>'
        f'<main><div class="docs">{"".join(parts)}</div></main>'
        f"<footer>vitrail {html.escape(info['version'])}</footer></body></html>"
    )
    return text, policy


def section(verb: str, path: str, about: dict[str, Any], command: str) -> str:
    rows = [
        f"<dt>{html.escape(each['name'])}</dt><dd>{html.escape(each.get('description', 'query'))}</dd>"
        for each in about.get("parameters", [])
    ]
    rows += [
        f"<dt>{status}</dt><dd>{html.escape(each['description'])}</dd>" for status, each in about["responses"].items()
    ]
    query = "&".join(f"{each['name']}={each['example']}" for each in about.get("parameters", []) if "example" in each)
    example = code(command.format(EXAMPLES[path], f"{path}?{query}".rstrip("?"))) if path in EXAMPLES else ""
    said = f"{about['summary']}. {about.get('description', '')}"
    return (
        f'<h2><span class="verb">{verb.upper()}</span> <code>{html.escape(path)}</code></h2>'
        f"<p>{html.escape(said)}</p>{example}<dl>{''.join(rows)}</dl>"
    )


def code(text: str) -> str:
    return f'<div class="code"><pre tabindex="0">{html.escape(text)}</pre></div>'
