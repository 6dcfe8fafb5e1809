"""Nobody is let in without the right token, at the right listener, under whatever path the application is mounted."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.rl.routes import CONTROL_PATHS

from .served import Served
from .test_streams import beside

POST = {
    "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "server": ("front", 80),
    "query_string": b"", "headers": [],
}  # fmt: skip


async def empty() -> dict[str, Any]:
    return {"type": "http.request", "body": b""}


@pytest.mark.parametrize("mount", ["", "/llm", "/health"])
@pytest.mark.parametrize("api_key", [None, "public"])
def test_tokens_are_asked_for_wherever_the_application_is_mounted(
    served: Served, mount: str, api_key: str | None
) -> None:
    """Tokens are asked for wherever the application is mounted, as behind Ray Serve, whose `route_prefix` stays in the
    path.
    """
    service = beside(served, control="token", control_token="secret", api_key=api_key)

    async def check() -> None:
        inside = httpx.ASGITransport(create_app(service), root_path=mount)
        async with httpx.AsyncClient(transport=inside, base_url="http://front") as client:

            async def status(method: str, path: str, token: str = "none") -> int:
                headers = {"Authorization": f"Bearer {token}"}
                return (await client.request(method, mount + path, headers=headers)).status_code

            for path in sorted(CONTROL_PATHS):
                for token in ("none", "public"):
                    found = {await status(method, path, token) for method in ("GET", "POST")}
                    assert 401 in found <= {401, 405}, path
            assert await status("GET", "/is_paused", "secret") == 200
            assert await status("GET", "/v1/models") == (200 if api_key is None else 401)
            assert await status("GET", "/v1/models", "public") == 200
            for path in ("/liveness", "/health", "/readiness", "/metrics"):
                assert await status("GET", path) == 200

    asyncio.run(check())


@pytest.mark.parametrize("server", [("10.0.0.5", 8001), ("::1", 8001), ("127.0.0.1", 8000), ("socket", None), None])
def test_only_the_address_of_the_control_listener_has_control(served: Served, server: tuple[str, int] | None) -> None:
    """Only the address of the control listener has control: two listeners may have one port, at two addresses."""
    app = create_app(beside(served, control="loopback"), ("127.0.0.1", 8001))

    def asked(server: tuple[str, int] | None) -> int:
        taken: list[dict[str, Any]] = []

        async def take(message: dict[str, Any]) -> None:
            taken.append(message)

        scope = {**POST, "server": server, "path": "/resume", "headers": [(b"host", b"localhost:8001")]}
        asyncio.run(app(scope, empty, take))
        return int(taken[0]["status"])

    assert asked(("127.0.0.1", 8001)) == 200
    assert asked(server) == 404


def test_a_control_token_is_asked_for_before_a_body_is_read(served: Served) -> None:
    service, taken = beside(served, control="token", control_token="secret"), []

    async def take(message: dict[str, Any]) -> None:
        taken.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body is read")

    scope = {**POST, "path": "/pause", "headers": [(b"content-type", b"application/json")]}
    asyncio.run(create_app(service)(scope, receive, take))
    assert taken[0]["status"] == 401
