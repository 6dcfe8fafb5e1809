"""Hold the secret that block digests are keyed with: `DigestKey`. Workers that share it name equal blocks alike.

Invariant: the secret goes nowhere by accident. It is in no repr and no message, and is pickled only inside of
`handed_over()`, which a fleet opens around the call that starts a replica.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

KEY_BYTES = 16
_HANDED_OVER: ContextVar[bool] = ContextVar("digest key handed over", default=False)


class DigestKey:
    """Holds 16 secret bytes: new ones, or those given.

    Raises:
        ValueError: they are not bytes, or not 16 of them; the error does not show them.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and (not isinstance(secret, bytes) or len(secret) != KEY_BYTES):
            found = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
            raise ValueError(f"a digest key has {KEY_BYTES} bytes, got {found}")
        self._secret = os.urandom(KEY_BYTES) if secret is None else secret

    def reveal(self) -> bytes:
        """Return the secret, to key a hash with."""
        return self._secret

    def __repr__(self) -> str:
        return "DigestKey(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DigestKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(DigestKey)

    def __copy__(self) -> DigestKey:
        return self

    def __deepcopy__(self, memo: object) -> DigestKey:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if not _HANDED_OVER.get():
            raise TypeError("a digest key is secret: it is not pickled, except to start a replica of its fleet")
        return DigestKey, (self._secret,)


@contextmanager
def handed_over() -> Iterator[None]:
    """Let keys be pickled inside of the block, in this thread or task."""
    token = _HANDED_OVER.set(True)
    try:
        yield
    finally:
        _HANDED_OVER.reset(token)
