"""Let a worker stand still, and decide what becomes of the requests it has.

Invariant: when `pause` returns no step runs, and none will until the pause ends; requests that come meanwhile are kept.
"""

from __future__ import annotations

from samebit.rollout.control.generation_thread import GenerationThread
from samebit.rollout.control.shelter import Gate

PAUSE_MODES = ("keep", "wait", "abort")
"""Names what a pause does to requests: keep them as they are, let those that have begun finish, or end them all."""


def pause(thread: GenerationThread, mode: str) -> None:
    """Stop stepping in this mode.

    Raises:
        ValueError: an unknown mode.
        WorkerStateError: the worker can not finish its requests ("wait"), since it is paused or asleep.
    """
    if mode not in PAUSE_MODES:
        raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    if mode == "wait":
        thread.shelter(lambda gate: _pause_drained(thread, gate))
    else:
        thread.run(lambda _: _pause_now(thread, abort=mode == "abort"))


def _pause_now(thread: GenerationThread, *, abort: bool) -> None:
    if abort:
        thread.abort_where(lambda _: True)
    thread.status.paused = True


def _pause_drained(thread: GenerationThread, gate: Gate) -> None:
    with thread.drained_command(gate):
        thread.status.paused = True
