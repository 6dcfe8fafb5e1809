"""Notes where grammars are compiled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from samebit.rollout.structured_outputs import grammars


def note_compiling(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, of each grammar from now on, whether an event loop stands still for it."""
    in_loops: list[bool] = []
    compiled = grammars._compiled

    def noted(*given: Any) -> Any:
        in_loops.append(asyncio._get_running_loop() is not None)
        return compiled(*given)

    monkeypatch.setattr(grammars, "_compiled", noted)
    return in_loops
