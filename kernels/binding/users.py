"""List the objects that use one bound model, such as rollout workers, so that an update through one reaches all.

Invariant: nothing is kept alive, and a copy of the model begins without users.
"""

import itertools
import threading
from typing import Generic, NoReturn, TypeVar
from weakref import WeakValueDictionary

User = TypeVar("User")


class Users(Generic[User]):
    """Keeps the users of a model in the order in which they came, which is the order in which their locks are taken."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._users: WeakValueDictionary[int, User] = WeakValueDictionary()

    def __deepcopy__(self, memo: object) -> "Users[User]":
        return Users()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a bound model is not pickled: pickle or save its state_dict(), and call samebit.kernels.bind on the model "
            "that takes it; copy.deepcopy(model) copies a bound one"
        )

    def join(self, user: User) -> None:
        """Add a user, behind all others."""
        with self._mutex:
            self._users[next(self._numbers)] = user

    def leave(self, user: User) -> None:
        """Remove a user; nothing happens if it has left already."""
        with self._mutex:
            for number in [number for number, known in self._users.items() if known is user]:
                del self._users[number]

    def in_order(self) -> list[User]:
        """Return the users that are alive, in the order in which they joined."""
        with self._mutex:
            return [user for _, user in sorted(self._users.items(), key=lambda entry: entry[0])]
