"""Contain what belongs to the user and is called while requests wait: it must not take them down.

Invariant: nothing that a callback or a handler of log records raises reaches the caller. It is shown on stderr, by the
handler of last resort that `logging` itself has: the user's own handlers may be what raised.
"""

from __future__ import annotations

import logging
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
