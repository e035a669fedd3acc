"""The routes: what is asked for, and the shape of each answer."""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from vitrail.serve import page
from vitrail.serve import served_model as attention
from vitrail.serve.http_errors import Refused, encoded, unavailable
from vitrail.serve.middleware import Guard
from vitrail.serve.openapi import document, reference
from vitrail.serve.service import Service

TOPK: Final = 5
HOST: Final = re.compile(r"[A-Za-z0-9.-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
PATHS: Final = {
    "/": "GET",
    "/predict": "POST",
    "/attention": "POST",
    "/embed": "POST",
    "/model": "GET",
    "/health": "GET",
    "/ready": "GET",
    "/metrics": "GET",
    "/openapi.json": "GET",
    "/docs": "GET",
}


def application(service: Service) -> Guard:
    """The ASGI application of a service, for uvicorn or a test."""
    routes = Routes(service)
    handlers: dict[str, Handler] = {
        "/": routes.page,
        "/predict": routes.predict,
        "/attention": routes.attention,
        "/embed": routes.embed,
        "/model": routes.model,
        "/health": routes.health,
        "/ready": routes.ready,
        "/metrics": routes.metrics,
        "/openapi.json": routes.openapi,
        "/docs": routes.docs,
    }
    inner = Router(
        [Route(path, Endpoint(handlers[path], method)) for path, method in PATHS.items()],
        redirect_slashes=False,
        default=not_found,
    )
    return Guard(inner, service.settings, service.metrics, frozenset(PATHS), lambda: service.draining)


class Endpoint:
    """A handler for one method, and what is said to others."""

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
            reason = f"{request.method[:20]!r} is not answered here; use {self.method}"
            raise Refused(405, "method not allowed", reason, headers={"Allow": self.allowed})
        await response(scope, receive, send)


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise Refused(404, "not found", "there is no such address; /docs lists those that there are")


def answered(content: Any, status: int = 200) -> Response:
    return Response(encoded(content), status, media_type="application/json")


class Routes:
    """Handlers of one service."""

    def __init__(self, service: Service) -> None:
        self.service, self.served = service, service.served

    async def predict(self, request: Request) -> Response:
        known(request.query_params, *self.served.options, "show")
        options = self._options(request.query_params)
        if not self.served.predictor.labels:
            raise Refused(409, "no classes", "this network has no head, so it names nothing; /embed gives its features")
        show = whole(request.query_params, "show", 0)
        if show not in (0, 1):
            raise Refused(400, "bad parameter", f"show={show} has to be 0 or 1")
        found, _, predicted = await self.service.put_through(
            request, "predict", most=1 if show else None, options=options, show=bool(show)
        )
        told = [{"name": upload.name, **data} for upload, (data, _) in zip(found, predicted, strict=True)]
        if show:
            (upload,), ((_, prediction),) = found, predicted
            told[0]["shown"] = await self.service.draw(lambda: self.served.show(prediction, upload.data))
        return answered({"model": self.served.name, "predictions": told})

    def _options(self, query: QueryParams) -> dict[str, Any]:
        """Of those that the task takes."""
        options = dict[str, Any]()
        if "topk" in self.served.options:
            options["topk"] = whole(query, "topk", TOPK)
            if options["topk"] < 1:
                raise Refused(400, "bad parameter", f"topk={options['topk']} has to be at least 1")
        if "threshold" in self.served.options:
            options["threshold"] = share(query, self.served.predictor.threshold)
        return options

    async def embed(self, request: Request) -> Response:
        known(request.query_params)
        _, _, rows = await self.service.put_through(request, "embed")
        return answered({"model": self.served.name, "features": [row.tolist() for row in rows]})

    async def attention(self, request: Request) -> Response:
        known(request.query_params, "layer")
        layer = None
        if "layer" in request.query_params:
            layer = whole(request.query_params, "layer", 0)
        attention.check(self.served.predictor.network, layer, self.service.settings.attention_bytes)
        _, (ticket,), (looked,) = await self.service.put_through(request, "attention", most=1, layer=layer)
        about = {"crop": [round(side, 3) for side in ticket.facts.crop], "size": list(ticket.facts.size)}
        return answered({"model": self.served.name, **looked, **about})

    async def page(self, request: Request) -> Response:
        return html(page.page(), page.policy())

    async def docs(self, request: Request) -> Response:
        return html(*reference(document(self.served), address_of(request)))

    async def openapi(self, request: Request) -> Response:
        return answered(document(self.served))

    async def model(self, request: Request) -> Response:
        return answered(self.served.about())

    async def health(self, request: Request) -> Response:
        return answered({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if why := self.service.why_not_ready:
            raise unavailable("not ready", why)
        return answered({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        service, about = self.service, self.served.about()
        gauges = {
            "vitrail_ready": ("Whether requests are served.", float(not service.why_not_ready)),
            "vitrail_queue_pictures": ("Images that wait or are prepared.", float(len(service.line))),
            "vitrail_queue_limit": ("Places in the queue.", float(service.line.room)),
            "vitrail_body_bytes": ("Bytes of bodies in memory.", float(service.budget.held)),
            "vitrail_decode_bytes": ("Bytes set aside for images being decoded.", float(service.served.room.held)),
            "vitrail_worker_restarts_total": ("Times that the network's thread was replaced.", service.watch.restarts),
        }
        model = {"name": about["name"], "network": about["network"], "device": about["device"]}
        return Response(service.metrics.text(gauges, model), media_type=PROMETHEUS)


def address_of(request: Request) -> str:
    """How this server is reached: by the name that the request has for it, or else where it listens."""
    host = request.headers.get("host", "")
    if not HOST.fullmatch(host):
        name, port = request.scope.get("server") or ("127.0.0.1", 8000)
        host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    return f"{request.url.scheme}://{host}"


def html(text: str, policy: str) -> Response:
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})


def whole(query: QueryParams, name: str, default: int) -> int:
    """A whole number of the query."""
    text = query.get(name, str(default))
    try:
        return int(text) if len(text) < 10 else int("")
    except ValueError:
        raise Refused(400, "bad parameter", f"{name}={text[:40]!r} is not a whole number") from None


def share(query: QueryParams, default: float) -> float:
    """The threshold of the query, from which a class of a multi-label network is chosen."""
    text = query.get("threshold", str(default))
    try:
        value = float(text[:40])
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refused(400, "bad parameter", f"threshold={text[:40]!r} has to be between 0 and 1")
    return value


def known(query: QueryParams, *names: str) -> None:
    for name in query:
        if name not in names:
            which = " and ".join(names) or "no parameters"
            raise Refused(400, "unknown parameter", f"{name[:40]!r}; this request takes {which}")
