"""Say which weights each token or position of a sequence is of.

Most steps are of the weights of the step before: nothing is written then, since the last span goes on until another
begins.
"""

from __future__ import annotations

Span = tuple[int, int, int]
"""Holds a start, an end and a version of the weights."""


class VersionHistory:
    """Notes from where on things, which are added one behind the other, are of which version of the weights."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: list[tuple[int, int]] = []

    @property
    def oldest(self) -> int:
        """Return the version of the first thing; one must have begun."""
        return self._begun[0][1]

    def begin(self, start: int, version: int) -> None:
        """Note that what comes from `start` on, behind all that there is, is of this version."""
        begun = self._begun
        if begun and begun[-1][0] == start:  # nothing has come since
            begun.pop()
        if not begun or begun[-1][1] != version:
            begun.append((start, version))

    def spans(self, end: int) -> list[Span]:
        """Return the spans of one version each before `end`, where the last thing ends."""
        ends = [*(start for start, _ in self._begun[1:]), end]
        spans = zip(self._begun, ends, strict=False)  # of nothing there is no span, whatever its end
        return [(start, until, version) for (start, version), until in spans if start < until]
