"""What an update did, and how it fails once it has begun."""

from __future__ import annotations

from dataclasses import dataclass


class SyncBrokenError(RuntimeError):
    """An update broke off: the peer went away, took too long, or sent something that is not what it announced."""


class VerificationError(RuntimeError):
    """The weights that were read back are not those that were written."""


@dataclass(frozen=True)
class SyncReport:
    """What an update did.

    bytes: of the tensors whose bits changed; changed: their names; casts: the sender's and the receiver's;
    sent_bytes: what travelled over a transport (0 within a process); dense_bytes: what a full update sends; digest:
    of the tensors of this update as they are now, None where nobody read them; verified: they were read back and
    compared.
    """

    version: int
    tensors: int
    bytes: int
    seconds: float
    changed: tuple[str, ...]
    casts: tuple[str, ...]
    digest: str | None = None
    verified: bool = False
    sent_bytes: int = 0
    dense_bytes: int = 0

    @property
    def changed_tensors(self) -> int:
        return len(self.changed)
