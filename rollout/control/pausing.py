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
    check_pause_mode(mode)

    def stand_still(gate: Gate) -> None:
        with thread.drained_command(gate) if mode == "wait" else thread.command(gate):
            if mode == "abort":
                thread.abort_where(lambda _: True)
            thread.status.paused = True

    thread.shelter(stand_still)


def check_pause_mode(mode: object) -> None:
    """Raise `ValueError` unless this is a mode of `pause`."""
    if mode not in PAUSE_MODES:
        raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
