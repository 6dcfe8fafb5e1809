"""Go through the rest of a stream of weights where an update fails: the trainer's other ranks are gathering already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samebit.rollout.guard import contained
from samebit.weight_sync import WeightStream


@contextmanager
def gone_through(source: object) -> Iterator[None]:
    """Run an update from this source; where it ends by an exception and the source is a `WeightStream`, exhaust it."""
    try:
        yield
    except BaseException:
        if isinstance(source, WeightStream):
            with contained("gathering the rest of the weights"):
                source.exhaust()
        raise
