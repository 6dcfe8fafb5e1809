"""Collect the numbers of a worker: one flat dict for programs, one line now and then for people.

Invariant: counters only grow, and add up across workers. Sizes (`blocks_*`, `draft_blocks_*`, `running`,
`waiting`) are those of the moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from samebit.rollout.cache.checkpoints.pool import CheckpointPool
from samebit.rollout.drafts.drafter import Drafter
from samebit.rollout.engine.engine import Engine
from samebit.rollout.guard import contained

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
_IN_USE = ("running", "waiting", "blocks_cached", "blocks_evictable", "states_used")


def worker_stats(engine: Engine, num_unstarted: int = 0) -> dict[str, float]:
    """Return counters and sizes; `num_unstarted` samples have not reached the engine."""
    scheduler, cache = engine.scheduler, engine.cache
    counters = cache.counters
    return {
        **engine.counters.named(),
        "forward_seconds": engine.runner.forward_seconds,
        "sampler_seconds": engine.runner.sampler_seconds,
        "images_computed": engine.runner.image_counters.computed,
        "images_found": engine.runner.image_counters.found,
        "running": len(scheduler.running),
        "waiting": scheduler.num_unfinished - len(scheduler.running) + num_unstarted,
        "preemptions": scheduler.preemptions,
        "prefill_tokens_skipped": counters.tokens_skipped,
        "prefix_queries": counters.queries,
        "prefix_hits": counters.hits,
        "prefix_lost_to_eviction": counters.lost_to_eviction,
        "prefix_evictions": counters.evictions,
        "leader_waits": counters.leader_waits,
        "blocks_total": cache.pool.num_blocks,
        "blocks_free": cache.pool.num_free,
        "blocks_cached": cache.num_hittable,
        "blocks_evictable": cache.pool.num_kept,
        "weight_version": engine.weight_version,
        **_checkpoint_stats(cache.checkpoints),
        **_draft_stats(scheduler.drafter),
    }


def _draft_stats(drafter: Drafter | None) -> dict[str, float]:
    """Return the numbers of a draft model's blocks: 0 without one."""
    total, free = (0, 0) if drafter is None or drafter.model is None else drafter.model.num_blocks
    return {"draft_blocks_total": total, "draft_blocks_free": free}


def _checkpoint_stats(checkpoints: CheckpointPool) -> dict[str, float]:
    """Return the numbers of the checkpoint pool: all 0 without recurrent layers or without prefix caching."""
    counters = checkpoints.counters
    return {
        "states_used": len(checkpoints),
        "states_total": checkpoints.num_checkpoints,
        "state_restores": counters.restores,
        "state_forks": counters.forks,
        "state_holds": counters.holds,
        "state_tokens_replayed": counters.replayed_tokens,
        "state_misses_no_checkpoint": counters.misses_no_checkpoint,
        "state_misses_evicted": counters.misses_evicted,
        "state_misses_diverged": counters.misses_diverged,
    }


def at_rest(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a worker that is gone: what it has counted stays, and nothing of it is in use."""
    idle = {name: 0.0 for name in _IN_USE if name in stats}
    free = {f"{of}blocks_free": stats[f"{of}blocks_total"] for of in ("", "draft_") if f"{of}blocks_total" in stats}
    return {**stats, **idle, **free}


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
        with contained("logging the statistics"):
            logger.info("%s", _line(stats, {name: stats[name] - last[name] for name in stats}, seconds))


def _line(now: dict[str, float], grown: dict[str, float], seconds: float) -> str:
    """Write what has `grown` in these seconds, and what is now; tokens computed and skipped also from the start."""
    parts = [
        "{running:.0f} running, {waiting:.0f} waiting".format_map(now),
        f"{grown['output_tokens'] / seconds:.0f} tokens/s out",
    ]
    if grown["first_tokens"]:
        parts.append(f"first tokens after {1e3 * grown['first_token_seconds'] / grown['first_tokens']:.0f} ms")
    parts += [
        "prompt tokens computed {prefill_tokens_computed:.0f}, skipped {prefill_tokens_skipped:.0f}".format_map(grown)
        + " (in all {prefill_tokens_computed:.0f}, {prefill_tokens_skipped:.0f})".format_map(now),
        "prefix hits {prefix_hits:.0f} of {prefix_queries:.0f}, lost to eviction {prefix_lost_to_eviction:.0f}, "
        "waits behind a leader {leader_waits:.0f}".format_map(grown),
        "blocks free {blocks_free:.0f} of {blocks_total:.0f}, cached {blocks_cached:.0f}, "
        "evictable {blocks_evictable:.0f}".format_map(now),
        "evictions {prefix_evictions:.0f}, preemptions {preemptions:.0f}".format_map(grown),
    ]
    if now["states_total"]:
        parts.append(
            "states {states_used:.0f} of {states_total:.0f}".format_map(now)
            + ", restores {state_restores:.0f}, forks {state_forks:.0f}, holds {state_holds:.0f}, "
            "tokens replayed {state_tokens_replayed:.0f}, missed: evicted {state_misses_evicted:.0f}, "
            "diverged {state_misses_diverged:.0f}, none {state_misses_no_checkpoint:.0f}".format_map(grown)
        )
    return "; ".join(parts)
