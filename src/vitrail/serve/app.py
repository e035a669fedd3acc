"""The routes of the server: the parameters of each request, and the form of each response."""

import re
from functools import partial
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vitrail.serve.batch_queue import QueuedImage
from vitrail.serve.http_errors import RequestError, to_json, unavailable
from vitrail.serve.middleware import ErrorMiddleware
from vitrail.serve.pages import content_policy, describe_interface, render_docs, render_page
from vitrail.serve.served_model import check_attention
from vitrail.serve.service import Service

TOPK: Final = 5
HOST: Final = re.compile(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


def make_application(service: Service) -> ErrorMiddleware:
    """The ASGI application of a service, for uvicorn or a test."""
    routes = Routes(service)
    endpoints = {
        "/": ("GET", routes.page),
        "/predict": ("POST", routes.predict),
        "/attention": ("POST", routes.attention),
        "/embed": ("POST", routes.embed),
        "/model": ("GET", routes.model),
        "/health": ("GET", routes.health),
        "/ready": ("GET", routes.ready),
        "/metrics": ("GET", routes.metrics),
        "/openapi.json": ("GET", routes.openapi),
        "/docs": ("GET", routes.docs),
    }

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in endpoints:
            raise RequestError(404, "not found", "unknown path; /docs lists all paths")
        (method, handler), request = endpoints[scope["path"]], Request(scope, receive)
        allowed = ", ".join([method, *(["HEAD"] if method == "GET" else []), "OPTIONS"])
        if request.method not in allowed.split(", "):
            reason = f"{request.method[:20]!r} is not supported here; use {method}"
            raise RequestError(405, "method not allowed", reason, headers={"Allow": allowed})
        preflight = Response(status_code=204, headers={"Allow": allowed})
        response = preflight if request.method == "OPTIONS" else await handler(request)
        await response(scope, receive, send)

    return ErrorMiddleware(answer, service, frozenset(endpoints))


def json_response(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


def html_response(text: str, policy: str) -> Response:
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


class Routes:
    """Handlers of one service."""

    def __init__(self, service: Service) -> None:
        self.service, self.served = service, service.served

    async def predict(self, request: Request) -> Response:
        query, options = request.query_params, dict[str, Any]()
        check_parameters(query, *self.served.options, "show")
        if "topk" in self.served.options:
            options["topk"] = read_integer(query, "topk", TOPK, 1)
        if "threshold" in self.served.options:
            options["threshold"] = read_threshold(query, self.served.predictor.threshold)
        if not self.served.predictor.labels:
            raise RequestError(409, "no classes", "this model has no head; /embed returns its features")
        show = bool(read_integer(query, "show", 0, 0, 1))
        make = partial(QueuedImage, "predict", options=options, show=show)
        uploads, _, predicted = await self.service.handle(request, make, max_images=1 if show else None)
        predictions = [{"name": upload.name, **data} for upload, (data, _) in zip(uploads, predicted, strict=True)]
        if show:
            (upload,), ((_, prediction),) = uploads, predicted
            run = self.service.loop.run_in_executor
            predictions[0]["shown"] = await run(self.service.drawers, self.served.show, prediction, upload.data)
        return json_response({"model": self.served.name, "predictions": predictions})

    async def embed(self, request: Request) -> Response:
        check_parameters(request.query_params)
        if reason := self.served.features_obstacle:
            raise RequestError(409, "no features", reason)
        _, _, rows = await self.service.handle(request, partial(QueuedImage, "embed"))
        return json_response({"model": self.served.name, "features": [row.tolist() for row in rows]})

    async def attention(self, request: Request) -> Response:
        query = request.query_params
        check_parameters(query, "layer")
        layer = read_integer(query, "layer", 0) if "layer" in query else None
        check_attention(self.served.predictor.network, layer, self.service.settings.attention_bytes)
        make = partial(QueuedImage, "attention", layer=layer)
        _, (image,), (answer,) = await self.service.handle(request, make, max_images=1)
        facts = {"crop": [round(side, 3) for side in image.facts.crop], "size": list(image.facts.size)}
        return json_response({"model": self.served.name, **answer, **facts})

    async def page(self, request: Request) -> Response:
        return html_response(render_page(), content_policy())

    async def docs(self, request: Request) -> Response:
        return html_response(*render_docs(describe_interface(self.served), server_address(request)))

    async def openapi(self, request: Request) -> Response:
        return json_response(describe_interface(self.served))

    async def model(self, request: Request) -> Response:
        return json_response(self.served.describe())

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if reason := self.service.why_not_ready:
            raise unavailable("not ready", reason)
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        service, about = self.service, self.served.describe()
        gauges = {
            "vitrail_ready": ("Whether requests are served.", not service.why_not_ready),
            "vitrail_queue_pictures": ("Images that wait or are being prepared.", len(service.queue)),
            "vitrail_queue_limit": ("Capacity of the queue.", service.queue.capacity),
            "vitrail_body_bytes": ("Bytes of request bodies in memory.", service.budget.held),
            "vitrail_decode_bytes": ("Bytes reserved for decoding.", service.served.memory.held),
            "vitrail_worker_restarts_total": ("Restarts of the model thread.", service.supervisor.restarts),
        }
        model = {key: about[key] for key in ("name", "network", "device")}
        return Response(service.metrics.to_text(gauges, model), media_type=PROMETHEUS)


def server_address(request: Request) -> str:
    """The address of this server: the host name of the request, or else the address it listens on."""
    host = request.headers.get("host", "")
    if not HOST.fullmatch(host):
        name, port = request.scope.get("server") or ("127.0.0.1", 8000)
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{request.url.scheme}://{host}"


def read_integer(query: QueryParams, name: str, default: int, low: int | None = None, high: int | None = None) -> int:
    text = query.get(name, str(default))
    try:
        value = int(text) if len(text) < 10 else int("")
    except ValueError:
        raise RequestError(400, "bad parameter", f"{name}={text[:40]!r} is not an integer") from None
    if (low is not None and value < low) or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(400, "bad parameter", f"{name}={value} must be {rule}")
    return value


def read_threshold(query: QueryParams, default: float) -> float:
    """Reads the probability from which a class of a multi-label model is predicted."""
    text = query.get("threshold", str(default))
    try:
        value = float(text[:40])
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise RequestError(400, "bad parameter", f"threshold={text[:40]!r} must be between 0 and 1")
    return value


def check_parameters(query: QueryParams, *names: str) -> None:
    for name in query:
        if name not in names:
            allowed = " and ".join(names) or "no parameters"
            raise RequestError(400, "unknown parameter", f"{name[:40]!r}; this request takes {allowed}")
