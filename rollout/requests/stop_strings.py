"""Decode a sample as it grows, and look for stop strings in its text.

Invariants
----------
* A match that straddles two tokens is found; an incomplete UTF-8 character is held back until it is whole.
* The text is cut before the match; the token ids keep every sampled token.
"""

from __future__ import annotations

from samebit.rollout.requests.tokenizer import Tokenizer, decoded


class StopStringMatcher:
    """Decodes the text of one sample as it grows, and searches it for stop strings."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._overlap = max(map(len, stops), default=1) - 1
        self._tokens: list[int] = []
        self._context = 0
        self._decoded = 0
        self.text = ""

    def push(self, token: int, *, search: bool) -> str | None:
        """Add a token; the stop string that now matches, if any (the text is then cut before it)."""
        self._tokens.append(token)
        before = self._decode(self._context, self._decoded)
        after = self._decode(self._context, len(self._tokens))
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return None
        seen = len(self.text)
        self.text += after[len(before) :]
        self._context, self._decoded = self._decoded, len(self._tokens)
        if not search:
            return None
        return self._cut(max(seen - self._overlap, 0))

    def _cut(self, start: int) -> str | None:
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def flush(self) -> None:
        """Keep whatever was held back, at the end of the sample."""
        before = self._decode(self._context, self._decoded)
        after = self._decode(self._context, len(self._tokens))
        self.text += after[len(before) :]
        self._context = self._decoded = len(self._tokens)

    def _decode(self, start: int, end: int) -> str:
        return decoded(self._tokenizer, self._tokens[start:end])
