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


def described(error: BaseException) -> str:
    """Return the class and the text of an error; the class alone where its own text fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of an error, and of those that it came from, which holds nothing of where they were raised and says
    it: in notes, shown since Python 3.11. It never raises: who calls it is ending something that must end.
    """
    try:
        return _copied(error, set())
    except Exception:
        return RuntimeError(described(error))


def _copied(error: BaseException, seen: set[int]) -> BaseException:
    """Copy an error and the chain behind it, which may be a circle; ``seen``: the identities of those copied before."""
    seen.add(id(error))
    kept = _alike(error)
    if error.__traceback__ is not None:
        where = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        vars(kept)["__notes__"] = [*vars(error).get("__notes__", ()), f"It was raised at:\n{where}"]
    cause, context = error.__cause__, None if error.__suppress_context__ else error.__context__
    if cause is not None and id(cause) not in seen:
        kept.__cause__ = _copied(cause, seen)
    elif context is not None and id(context) not in seen:
        kept.__context__ = _copied(context, seen)
    return kept


def _alike(error: BaseException) -> BaseException:
    """Return an error of the same class and text; of another class where that can not be copied, or would hold others,
    whose frames it would keep."""
    parts = (*error.args, *vars(error).values())
    inside = [one for part in parts for one in (part if isinstance(part, list | tuple) else (part,))]
    if not any(isinstance(one, BaseException) for one in inside):
        try:
            kept = copy.copy(error)
        except Exception:  # its class asks for other arguments than it has kept
            kept = error
        if kept is not error and (type(kept), str(kept)) == (type(error), str(error)):
            return kept
    return RuntimeError(described(error))
