"""The numbers of a worker: one flat dict for programs, one line now and then for people.

Invariant: counters only grow, and add up across workers. Sizes (`blocks_*`, `running`, `waiting`) are those
of the moment.
"""

from __future__ import annotations

import logging
import time

from samebit.rollout.cache.states import StateCache
from samebit.rollout.engine import Engine

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0


def worker_stats(engine: Engine, num_unstarted: int = 0) -> dict[str, float]:
    """Counters and sizes; `num_unstarted` requests have not reached the engine."""
    scheduler, cache = engine.scheduler, engine.cache
    index, leaders, counters = cache.index, cache.leaders, cache.counters
    return {
        **vars(engine.counters),
        "forward_seconds": engine.runner.forward_seconds,
        "sampler_seconds": engine.runner.sampler_seconds,
        "running": len(scheduler.running),
        "waiting": scheduler.num_unfinished - len(scheduler.running) + num_unstarted,
        "preemptions": scheduler.preemptions,
        "prefill_tokens_skipped": counters.tokens_skipped,
        "prefix_queries": counters.queries,
        "prefix_hits": counters.hits,
        "prefix_lost_to_eviction": counters.lost_to_eviction,
        "prefix_evictions": 0 if index is None else index.evictions,
        "leader_waits": 0 if leaders is None else leaders.waits,
        "blocks_total": cache.pool.num_blocks,
        "blocks_free": cache.pool.num_free,
        "blocks_cached": 0 if index is None else len(index),
        "blocks_evictable": cache.pool.num_kept,
        "weight_version": engine.weight_version,
        **(_state_stats(cache.states) if cache.states is not None else {}),
    }


def _state_stats(states: StateCache) -> dict[str, float]:
    """Of a model with Mamba layers."""
    counters = states.counters
    return {
        "states_used": len(states),
        "states_total": states.num_checkpoints,
        "state_restores": counters.restores,
        "state_forks": counters.forks,
        "state_holds": counters.holds,
        "state_tokens_replayed": counters.replayed_tokens,
        "state_misses_no_checkpoint": counters.misses_no_checkpoint,
        "state_misses_evicted": counters.misses_evicted,
        "state_misses_diverged": counters.misses_diverged,
    }


class StatsLog:
    """Logs a line at most every `LOG_SECONDS`, while there are steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._due = time.monotonic() + LOG_SECONDS
        self._last = worker_stats(engine)

    def after_step(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        seconds = now - self._due + LOG_SECONDS
        self._due = now + LOG_SECONDS
        stats, last = worker_stats(self._engine), self._last
        self._last = stats
        grown = {name: stats[name] - last[name] for name in stats}
        logger.info(
            "%d running, %d waiting; %.0f tokens/s out; prompt tokens computed %d, skipped %d; "
            "prefix hits %d of %d; blocks free %d of %d, %d cached; evictions %d, preemptions %d",
            stats["running"],
            stats["waiting"],
            grown["output_tokens"] / seconds,
            grown["prefill_tokens_computed"],
            grown["prefill_tokens_skipped"],
            grown["prefix_hits"],
            grown["prefix_queries"],
            stats["blocks_free"],
            stats["blocks_total"],
            stats["blocks_cached"],
            grown["prefix_evictions"],
            grown["preemptions"],
        )
