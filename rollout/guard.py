"""Contain what belongs to the user and is called while requests wait, and make of an error one that may be kept.

Invariants
----------
* Nothing that a callback or a handler of log records raises reaches the caller. It is shown on stderr, by the
  handler of last resort that `logging` itself has: the user's own handlers may be what raised.
* What is kept of an error holds no frame: the frames of its traceback hold all that ran there, pages, activations and
  weights, and those of the callers that it reached.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_stderr = logging.Handler()


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Run the block; what it raises is shown and ends here. An interrupt is not the block's."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, "%s raised", (what,), None)
        _stderr.handleError(record)


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error that holds nothing of where it came from, and says it: in a note, shown since Python
    3.11."""
    try:
        kept = copy.copy(error)
    except Exception:  # its class asks for other arguments than it has kept
        kept = error
    if kept is error or (type(kept), str(kept)) != (type(error), str(error)):
        kept = RuntimeError(f"{type(error).__name__}: {error}")
    if error.__traceback__ is not None:
        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        vars(kept)["__notes__"] = [*vars(error).get("__notes__", ()), f"It was raised at:\n{where}"]
    if error.__cause__ is not None and error.__cause__ is not error:
        kept.__cause__ = without_frames(error.__cause__)
    return kept
