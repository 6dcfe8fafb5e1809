"""Let a worker sleep and wake: memory is given back and taken again, under the worker's lock.

Invariants
----------
* What sleeps already stays as it is; so does what is awake.
* Weights that were freed without a copy are incomplete when they wake; so are those whose copy was damaged.
* The weights of a shared module never sleep: the parameters are the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterable

from samebit.kernels.layout.memory_pool import return_free_memory
from samebit.rollout.control.worker_status import TAGS, WorkerStatus
from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import WorkerStateError
from samebit.weight_sync import VerificationError
from samebit.weight_sync.sleeping import SleepingWeights


def check_tags(tags: str | Iterable[str]) -> tuple[str, ...]:
    """Return the tags that are named, or raise ValueError."""
    named = tuple(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else (tags,)
    unknown = [tag for tag in named if tag not in TAGS]
    if unknown or not named:
        raise ValueError(f"tags must be of {', '.join(TAGS)}, got {tags!r}")
    return named


def check_sleep(tags: str | Iterable[str], level: int, *, shared: bool) -> tuple[str, ...]:
    """Return the tags that are named, or raise for what can not sleep in this way."""
    named = check_tags(tags)
    if isinstance(level, bool) or level not in (1, 2):
        raise ValueError(f"level must be 1 (keep a copy of the weights) or 2 (discard them), got {level!r}")
    if level == 2 and "weights" not in named:
        raise ValueError(f"level=2 discards the weights, but the tags are {', '.join(named)}")
    if "weights" in named and shared:
        raise WorkerStateError(
            'sleep("weights") would free the trainer\'s own parameters; on a shared module use sleep("kv_cache")'
        )
    return named


class Sleep:
    """Puts the memory of one worker to sleep and wakes it. Every call is under the worker's lock."""

    def __init__(self, engine: Engine, weights: SleepingWeights, status: WorkerStatus) -> None:
        self._engine = engine
        self._weights = weights
        self._status = status

    def fall_asleep(self, tags: tuple[str, ...], *, keep_copy: bool) -> None:
        """Free what `tags` name; `keep_copy` writes the weights to a file before."""
        if "weights" in tags:
            self._free_weights(keep_copy=keep_copy)
        self._engine.clear_prefix_cache()
        if "kv_cache" in tags and "kv_cache" not in self._status.sleeping:
            self._engine.preempt_all()
            self._release_cache()
        return_free_memory()

    def get_up(self, tags: tuple[str, ...]) -> None:
        """Allocate what `tags` name again.

        Raises:
            VerificationError: the copy of the weights was damaged meanwhile.
        """
        if "weights" in tags and "weights" in self._status.sleeping:
            self._restore_weights()
        if "kv_cache" in tags and "kv_cache" in self._status.sleeping:
            self._engine.runner.allocate_cache(self._engine.cache.pool.num_blocks)
            self._status.set_asleep("kv_cache", False)

    def release_all(self) -> None:
        """Free what a worker that is closed still has of its own."""
        self._weights.drop_copy()
        if "kv_cache" not in self._status.sleeping:
            self._release_cache()

    def _release_cache(self) -> None:
        """Free pages and states, those of a draft model too."""
        self._engine.runner.release_cache()
        self._engine.scheduler.release_drafts()
        self._status.set_asleep("kv_cache", True)

    def _free_weights(self, *, keep_copy: bool) -> None:
        if "weights" not in self._status.sleeping:
            self._weights.free(keep_copy=keep_copy and self._status.incomplete is None)
            self._status.set_asleep("weights", True)
        elif not keep_copy:
            self._weights.drop_copy()
        elif not self._weights.has_copy and self._status.incomplete is None:
            raise WorkerStateError("sleep(level=1) can not keep the weights: they were discarded before")

    def _restore_weights(self) -> None:
        try:
            if not self._weights.restore() and self._status.incomplete is None:
                self._status.set_incomplete("they were discarded by sleep(level=2)")
        except VerificationError as error:
            self._status.set_incomplete(str(error), error)
            self._status.set_asleep("weights", False)
            raise
        self._status.set_asleep("weights", False)
