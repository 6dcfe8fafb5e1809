"""Define the base class of everything that is closed, by `close` or by leaving its `with` block."""

from __future__ import annotations

from typing import TypeVar

Closed = TypeVar("Closed", bound="Closing")


class Closing:
    """Closes itself at the end of a `with` block."""

    def close(self) -> None:
        """Give back what is held. Closing twice does nothing more."""
        raise NotImplementedError

    def __enter__(self: Closed) -> Closed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
