"""Put the HTTP server over a fleet behind Ray Serve's proxies: `application`.

serve.run(application("path/to/model", settings={"replicas": 4}), route_prefix="/")

Invariants
----------
* There is one front, and its router chooses among the replicas: Serve's own routers, one in each proxy, would each know
  a part of what is in flight.
* A secret is never in what Serve keeps of an application, which every client of the cluster can read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from samebit.rollout.config import RolloutConfig
from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.serving import load, settle
from samebit.rollout.integrations.http.settings import PREFIX, SECRETS, ServeSettings, Setup

try:
    from ray import serve
except ModuleNotFoundError as error:
    raise ImportError(
        f"samebit.rollout.integrations.ray.serve needs Ray Serve: pip install 'samebit[ray-serve]' ({error})"
    ) from error

SPARE = 64
"""Requests that Serve lets through to the front beside those that it computes: probes, and those that it refuses."""

_PROXYS = ("host", "port", "ssl_certfile", "ssl_keyfile", "control_port")
_OURS = ("num_replicas", "autoscaling_config", "max_ongoing_requests", "max_queued_requests", "backpressure_config")


class FrontApp:
    """Runs the application of the front, in the process that Serve has started for it."""

    def __init__(self, setup: Setup) -> None:
        self.service = load(setup)
        settle()
        self._app = create_app(self.service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def application(
    model: str,
    *,
    config: RolloutConfig | None = None,
    settings: Mapping[str, Any] | None = None,
    **deployment: Any,
) -> serve.Application:
    """Return an application for `serve.run`: the endpoints of `samebit serve` over one worker, or over `replicas`.

    config: of the worker.
    settings: those of the server itself, by their names in `samebit serve`, but for those that belong to Serve's
    proxies. The bearer tokens come from the environment of the nodes (`SAMEBIT_SERVE_API_KEY`,
    `SAMEBIT_SERVE_CONTROL_TOKEN`), as it is at `ray start`.
    deployment: options of `serve.deployment`.

    Raises:
        ValueError: a setting or an option that can not be honoured here, by name.
    """
    given = dict(settings or {})
    _check(given, deployment)
    stand_in: dict[str, Any] = {"control_token": "read in the front"} if _by_token(given) else {}
    checked = ServeSettings(**given, **stand_in)
    inner = RolloutConfig() if config is None else config

    def build() -> ASGIApp:
        return FrontApp(Setup(model, ServeSettings(**given, **_secrets()), inner))

    @serve.ingress(build)
    class SamebitFront:
        def check_health(self) -> None:
            """Raise what keeps all requests from being answered; Serve starts another front then."""
            self.app.service.worker.check_usable()  # type: ignore[attr-defined]  # `app` is Serve's

    options = {
        "name": "samebit",
        "num_replicas": 1,
        "max_ongoing_requests": inner.max_num_seqs * checked.replicas + checked.max_waiting + SPARE,
        "max_queued_requests": SPARE,
        "graceful_shutdown_timeout_s": checked.shutdown_seconds,
        **_backpressure(),
        **deployment,
        "ray_actor_options": {**_cores(checked.replicas), **(deployment.get("ray_actor_options") or {})},
    }
    return serve.deployment(**options)(SamebitFront).bind()


def _check(settings: Mapping[str, Any], deployment: Mapping[str, Any]) -> None:
    """Refuse what Serve does itself, and what it would keep in the clear."""
    names, of_worker = ({one.name for one in fields(kind)} for kind in (ServeSettings, RolloutConfig))
    for name in settings:
        if name in of_worker:
            raise ValueError(f"{name} is the worker's: give it as config=RolloutConfig({name}=...)")
        if name not in names:
            raise ValueError(f"there is no setting {name!r}; there are {', '.join(sorted(names))}")
        if name in _PROXYS:
            raise ValueError(f"{name} is that of Serve's proxies: give it to serve.start(http_options=...)")
        if name in SECRETS:
            raise ValueError(
                f"{name} would be kept by Serve in the clear: set {PREFIX}{name.upper()} in the nodes' environment"
            )
    actor = deployment.get("ray_actor_options") or {}
    for name in (actor.get("runtime_env") or {}).get("env_vars") or {}:
        if name.startswith(PREFIX):
            raise ValueError(f"runtime_env has {name}, and Serve keeps that in the clear: set it on the nodes")
    if settings.get("control") == "loopback":
        raise ValueError("control='loopback' needs a listener of its own, which Serve has not: use control='token'")
    for name in _OURS:
        if name in deployment:
            raise ValueError(f"{name} is chosen here: there is one front, and max_waiting bounds what waits at it")


def _by_token(settings: Mapping[str, Any]) -> bool:
    return settings.get("control") == "token"


def _secrets() -> dict[str, Any]:
    """Return the bearer tokens of this process's environment."""
    given = {name: os.environ.get(f"{PREFIX}{name.upper()}") for name in SECRETS}
    return {name: value for name, value in given.items() if value is not None}


def _cores(replicas: int) -> dict[str, int]:
    """Let a front over replicas reserve no core, for all may be theirs; one that computes itself has Serve's one."""
    return {} if replicas == 1 else {"num_cpus": 0}


def _backpressure() -> dict[str, Any]:
    """Let Serve refuse as the front itself does, where its version can: 429 with a Retry-After."""
    try:
        from ray.serve.config import BackpressureConfig
    except ImportError:
        return {}
    return {"backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1)}
