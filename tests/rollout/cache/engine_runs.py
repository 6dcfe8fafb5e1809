"""Do with an engine what tests of the cache share."""

from __future__ import annotations

from samebit.rollout.engine.engine import Engine
from samebit.rollout.requests.request import Request

from .cache_integrity import check_cache


def run(engine: Engine, *requests: Request) -> None:
    """Add these requests and step until nobody has work; the cache is in order before each step, and has its blocks
    back.
    """
    for request in requests:
        engine.add(request)
    for _ in range(500):
        check_cache(engine.cache)
        if not engine.has_work:
            break
        engine.step()
    assert engine.scheduler.num_unfinished == 0, "somebody waits for ever"
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
