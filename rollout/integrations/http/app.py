"""Build the application: which endpoints there are, behind which doors.

Invariant: the control endpoints are nowhere by default. With "loopback" they are on a listener of their own, which also
answers all else, since the clients of RL frameworks know one address; with "token" they ask for the control token.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from samebit.rollout.integrations.http import errors
from samebit.rollout.integrations.http.errors import ApiError, JsonAnswer
from samebit.rollout.integrations.http.metrics.worker import WorkerCollector
from samebit.rollout.integrations.http.middleware import OPEN_PATHS, Bearer, BodyLimit, LoopbackOnly, guarded_route
from samebit.rollout.integrations.http.openai.routes import routes as openai_routes
from samebit.rollout.integrations.http.rl.routes import CONTROL_PATHS, control_routes, generate_routes
from samebit.rollout.integrations.http.service import Service


@dataclass(frozen=True)
class Doors:
    """Serves both listeners of the process: `public` for everyone, `loopback` for what comes to `control`: an address,
    since the other listener may have the same port at another one."""

    public: ASGIApp
    loopback: ASGIApp | None
    control: tuple[str, int] | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = scope["type"] == "http" and tuple(scope.get("server") or ()) == self.control
        app = self.loopback if inner and self.loopback is not None else self.public
        await app(scope, receive, send)


def create_app(service: Service, control: tuple[str, int] | None = None) -> Doors:
    """Return the application of a service. control: host and port of the listener of --control loopback."""
    service.metrics.registry.register(WorkerCollector(service))
    loopback: ASGIApp | None = None
    if service.settings.control == "loopback":
        loopback = LoopbackOnly(_limited(_endpoints(service, control_routes(service)), service))
    return Doors(_guarded(_public(service), service), loopback, control)


def _public(service: Service) -> FastAPI:
    """Return the endpoints of the public address, those of control only behind the token."""
    token = service.settings.control_token
    if service.settings.control == "token" and token is not None:
        return _endpoints(service, control_routes(service, guarded_route(token)))
    return _endpoints(service)


def _guarded(app: ASGIApp, service: Service) -> ASGIApp:
    """Ask for the API key; the endpoints of control ask for a token of their own, or answer that they are closed."""
    app, key = _limited(app, service), service.settings.api_key
    return app if key is None else Bearer(app, key, OPEN_PATHS | CONTROL_PATHS)


def _limited(app: ASGIApp, service: Service) -> ASGIApp:
    inner = app if service.tracing is None else service.tracing.around(app)
    return BodyLimit(inner, service.settings.max_body_bytes, service.settings.max_body_values)


def _endpoints(service: Service, control: APIRouter | None = None) -> FastAPI:
    app = FastAPI(
        title="samebit", description="Rollouts whose log-probabilities are bit for bit the trainer's", docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    errors.install(app)
    app.router.dependencies.append(Depends(known_query))
    app.include_router(openai_routes(service))
    app.include_router(generate_routes(service))
    if control is not None:
        app.include_router(control)
    _add_probes(app, service)
    if control is None:
        _name_the_closed_doors(app)
    return app


def known_query(request: Request) -> None:
    """Refuse query parameters that the endpoint does not name."""
    known = {one.alias for one in request.scope["route"].dependant.query_params}
    unknown = sorted(request.query_params.keys() - known)
    if unknown:
        allowed = f"there are {', '.join(sorted(known))}" if known else "there are none"
        raise ApiError(400, f"there is no query parameter {unknown[0]!r} here; {allowed}", param=unknown[0])


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Answer 200 while the worker can be used, 503 with its trouble otherwise."""
        service.worker.check_usable()
        return JsonAnswer({"status": "ok"})

    @app.get("/liveness")
    async def liveness() -> Response:
        """Answer 200 while the process serves."""
        return JsonAnswer({"status": "alive"})

    @app.get("/readiness")
    async def readiness() -> Response:
        """Answer 200 while a request would be taken now, 503 with the reason otherwise."""
        trouble = service.trouble()
        if trouble is not None:
            raise ApiError(503, trouble, code="unavailable", headers={"Retry-After": "1"})
        return JsonAnswer({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Give the numbers to Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _name_the_closed_doors(app: FastAPI) -> None:
    async def closed(_: Request) -> Response:
        raise ApiError(404, "control endpoints are not offered here: see --control", code="control_off")

    for path in sorted(CONTROL_PATHS):
        app.add_route(path, closed, methods=["GET", "POST"], include_in_schema=False)  # whatever its query is
