"""Define the report of an update, and the errors of one that has begun."""

from __future__ import annotations

from dataclasses import dataclass


class SyncBrokenError(RuntimeError):
    """An update broke off: the peer went away, took too long, or sent something other than it announced."""


class VerificationError(RuntimeError):
    """The weights that were read back are not those that were written."""


@dataclass(frozen=True)
class SyncReport:
    """Reports one update.

    Attributes:
        bytes: The size of the tensors whose bits changed. Where a trainer wrote the weights of a shared module in
            place, only the tensors that were seen to change count; None, as `changed`, when no change was seen, which
            does not prove that there was none.
        changed: The names of these tensors.
        casts: The casts of the sender and of the receiver.
        digest: The digest of this update's tensors as they are now; None when they were not read.
        verified: The tensors were read back and compared.
        sent_bytes: The bytes that travelled over a transport; 0 within a process.
        dense_bytes: The bytes that a full update sends.
    """

    version: int
    tensors: int
    bytes: int | None
    seconds: float
    changed: tuple[str, ...] | None
    casts: tuple[str, ...]
    digest: str | None = None
    verified: bool = False
    sent_bytes: int = 0
    dense_bytes: int = 0

    @property
    def changed_tensors(self) -> int | None:
        """Return the number of changed tensors; None where it is not known."""
        return None if self.changed is None else len(self.changed)
