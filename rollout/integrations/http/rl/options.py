"""Take the options of a command from its query, as vLLM has them, or from a body, as some of its clients send them.

Invariant: none is ignored. One that the query and the body name is the same in both.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.openai.requests import Strict

Mode = Literal["abort", "wait", "keep"]
Level = Annotated[int, Field(ge=0, le=2)]
Tags = Annotated[list[Literal["weights", "kv_cache"]], Field(fail_fast=True)]
WakeTags = Annotated[list[Literal["weights", "kv_cache", "scheduling"]], Field(fail_fast=True)]


class Nothing(Strict):
    """Has no option."""


class Pause(Strict):
    """Says what becomes of requests during a pause, and of the cache, which stays where requests are kept."""

    mode: Mode = "abort"
    clear_cache: bool = True
    wait_for_inflight_requests: bool = False


class Sleep(Strict):
    """Says what sleeps, and how deep."""

    level: Level = 1
    tags: Tags | None = None


class WakeUp(Strict):
    """Says what wakes up. The tag "scheduling" is no memory: by itself it ends a pause where nothing sleeps."""

    tags: WakeTags | None = None


class ResetPrefixCache(Strict):
    """Says what is forgotten beside the cache."""

    reset_running_requests: bool = False
    reset_external: bool = False


T = TypeVar("T", bound=Strict)


def options(kind: type[T], body: T | None, **query: object) -> T:
    """Return what the query and the body say together; what neither does is the default. query: None where it does not.

    Raises:
        ApiError: they contradict each other.
    """
    inner = {} if body is None else body.model_dump(exclude_unset=True)
    outer = {name: value for name, value in query.items() if value is not None}
    for name, value in outer.items():
        if name in inner and inner[name] != value:
            raise ApiError(400, f"{name} is {value!r} in the query and {inner[name]!r} in the body", param=name)
    return kind(**(inner | outer))
