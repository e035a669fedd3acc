"""The routes: parameters of each request, and the form of each answer."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from vitrail.serve.http_errors import RequestError, to_json, unavailable
from vitrail.serve.middleware import ErrorMiddleware
from vitrail.serve.pages import content_policy, describe_interface, render_docs, render_page
from vitrail.serve.served_model import check_attention
from vitrail.serve.service import Service

TOPK: Final = 5
HOST: Final = re.compile(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def make_application(service: Service) -> ErrorMiddleware:
    """The ASGI application of a service, for uvicorn or a test."""
    routes = Routes(service)
    endpoints = {
        "/": Endpoint(routes.page, "GET"),
        "/predict": Endpoint(routes.predict, "POST"),
        "/attention": Endpoint(routes.attention, "POST"),
        "/embed": Endpoint(routes.embed, "POST"),
        "/model": Endpoint(routes.model, "GET"),
        "/health": Endpoint(routes.health, "GET"),
        "/ready": Endpoint(routes.ready, "GET"),
        "/metrics": Endpoint(routes.metrics, "GET"),
        "/openapi.json": Endpoint(routes.openapi, "GET"),
        "/docs": Endpoint(routes.docs, "GET"),
    }
    router = Router(
        [Route(path, endpoint) for path, endpoint in endpoints.items()], redirect_slashes=False, default=raise_not_found
    )
    return ErrorMiddleware(router, service.settings, service.metrics, frozenset(endpoints), lambda: service.draining)


class Endpoint:
    """A handler for one method; others get 405."""

    def __init__(self, handler: Handler, method: str) -> None:
        self.handler, self.method = handler, method
        self.allowed = ", ".join([method, *(["HEAD"] if method == "GET" else []), "OPTIONS"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method == "OPTIONS":
            response = Response(status_code=204, headers={"Allow": self.allowed})
        elif request.method in self.allowed.split(", "):
            response = await self.handler(request)
        else:
            reason = f"{request.method[:20]!r} is not supported here; use {self.method}"
            raise RequestError(405, "method not allowed", reason, headers={"Allow": self.allowed})
        await response(scope, receive, send)


async def raise_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise RequestError(404, "not found", "unknown path; /docs lists all paths")


def json_response(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


def html_response(text: str, policy: str) -> Response:
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


class Routes:
    """Handlers of one service."""

    def __init__(self, service: Service) -> None:
        self.service, self.served = service, service.served

    async def predict(self, request: Request) -> Response:
        check_parameters(request.query_params, *self.served.options, "show")
        options = self._read_options(request.query_params)
        if not self.served.predictor.labels:
            reason = "this model has no head, so it predicts no classes; /embed returns its features"
            raise RequestError(409, "no classes", reason)
        show = bool(read_integer(request.query_params, "show", 0, 0, 1))
        uploads, _, predicted = await self.service.handle(
            request, "predict", max_images=1 if show else None, options=options, show=show
        )
        predictions = [{"name": upload.name, **data} for upload, (data, _) in zip(uploads, predicted, strict=True)]
        if show:
            (upload,), ((_, prediction),) = uploads, predicted
            predictions[0]["shown"] = await self.service.draw(lambda: self.served.show(prediction, upload.data))
        return json_response({"model": self.served.name, "predictions": predictions})

    def _read_options(self, query: QueryParams) -> dict[str, Any]:
        """The prediction options of the task."""
        options = dict[str, Any]()
        if "topk" in self.served.options:
            options["topk"] = read_integer(query, "topk", TOPK, 1)
        if "threshold" in self.served.options:
            options["threshold"] = read_threshold(query, self.served.predictor.threshold)
        return options

    async def embed(self, request: Request) -> Response:
        check_parameters(request.query_params)
        _, _, rows = await self.service.handle(request, "embed")
        return json_response({"model": self.served.name, "features": [row.tolist() for row in rows]})

    async def attention(self, request: Request) -> Response:
        query = request.query_params
        check_parameters(query, "layer")
        layer = read_integer(query, "layer", 0) if "layer" in query else None
        check_attention(self.served.predictor.network, layer, self.service.settings.attention_bytes)
        _, (image,), (answer,) = await self.service.handle(request, "attention", max_images=1, layer=layer)
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
            "vitrail_ready": ("Whether requests are served.", float(not service.why_not_ready)),
            "vitrail_queue_pictures": ("Images that wait or are being prepared.", float(len(service.queue))),
            "vitrail_queue_limit": ("Capacity of the queue.", float(service.queue.capacity)),
            "vitrail_body_bytes": ("Bytes of request bodies in memory.", float(service.budget.held)),
            "vitrail_decode_bytes": ("Bytes reserved for decoding.", float(service.served.memory.held)),
            "vitrail_worker_restarts_total": ("Restarts of the model thread.", service.supervisor.restarts),
        }
        model = {"name": about["name"], "network": about["network"], "device": about["device"]}
        return Response(service.metrics.to_text(gauges, model), media_type=PROMETHEUS)


def server_address(request: Request) -> str:
    """The address of this server, by the host name of the request, or else by where it listens."""
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
    """The probability from which a class of a multi-label model is predicted."""
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
