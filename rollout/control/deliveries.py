"""Keep the deliveries that are not finished, by the id of their request.

Invariants
----------
* A request id is in use from the moment its delivery is made until that ends, or is dropped: a submission that is
  interrupted before it is queued leaves no id behind, since only a weak reference knows of it.
* Every delivery that was `started` ends: with its request, or with the error that is given for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from weakref import WeakValueDictionary

from samebit.rollout.control.delivery import Delivery
from samebit.rollout.errors import RequestIdInUseError
from samebit.rollout.requests.request import Request


class Deliveries:
    """Makes a delivery for each request, and ends it. num_made: the count so far, the next request's ordinal."""

    def __init__(self) -> None:
        self.num_made = 0
        self._numbers = count()
        self._started: dict[str, Delivery] = {}
        self._known: WeakValueDictionary[str, Delivery] = WeakValueDictionary()
        self._streams: set[Delivery] = set()

    def new_id(self) -> str:
        """Return an id that no request has."""
        return next(name for name in map("request-{}".format, self._numbers) if not self._in_use(name))

    def make(self, requests: list[Request]) -> list[Delivery]:
        """Return a delivery for each request. Raises `RequestIdInUseError`; then none is made."""
        self._check_ids(requests)
        made = [Delivery(request, self._streams) for request in requests]
        for delivery in made:
            self._known[delivery.request.request_id] = delivery
        self.num_made += len(made)
        return made

    def start(self, delivery: Delivery) -> None:
        """Keep a delivery whose request goes to the engine. Under the lock, as all that follows."""
        self._started[delivery.request.request_id] = delivery

    def finish(self, ended: Iterable[Request]) -> None:
        """Hand ended requests to their callers."""
        for request in ended:
            delivery = self._started.pop(request.request_id)
            self._streams.discard(delivery)
            delivery.finish(request.error)

    def notify_streams(self) -> None:
        """Let those who stream look for the tokens of a step. A request that has none has nothing for them: of its end
        they hear by `finish`."""
        for delivery in tuple(self._streams):
            if delivery.request.shared.progress.answered:
                delivery.notify()

    def fail_all(self, make_error: Callable[[], Exception]) -> None:
        """End every delivery with an error of its own."""
        for request_id in list(self._started):
            self._started.pop(request_id).finish(make_error())

    def _in_use(self, request_id: str) -> bool:
        known = self._known.get(request_id)
        return known is not None and not known.done

    def _check_ids(self, requests: list[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            if self._in_use(request.request_id) or request.request_id in seen:
                raise RequestIdInUseError(
                    f"request id {request.request_id!r} is in use by a request that has not finished; allowed: any "
                    "other non-empty string, or None for a new one"
                )
            seen.add(request.request_id)
