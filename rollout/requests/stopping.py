"""Decide when a sample ends.

Invariants
----------
* Stop strings are looked for in the incrementally decoded text; a match that straddles two tokens is
  found, an incomplete UTF-8 character is held back until it is whole.
* The text is cut before the match; the token ids keep every sampled token.
* A tokenizer is the user's: whatever it raises, or gives instead of text, is a `TokenizerError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from samebit.rollout.errors import TokenizerError


class Tokenizer(Protocol):
    """The one method that is asked of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The text of a list of ids (transformers declares more, for lists of lists)."""


def decoded(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text of these tokens, or raise `TokenizerError`.

    Boundary: a tokenizer in Rust panics with a BaseException, one in Python may leave with SystemExit. An interrupt is
    not the tokenizer's.
    """
    try:
        text: object = tokenizer.decode(token_ids, skip_special_tokens=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TokenizerError(
            f"the tokenizer raised {type(error).__name__} while it decoded {_few(token_ids)}"
        ) from error
    if not isinstance(text, str):
        raise TokenizerError(f"the tokenizer decoded {_few(token_ids)} to a {type(text).__name__}; allowed: a str")
    return text


def _few(token_ids: list[int]) -> str:
    return f"{token_ids}" if len(token_ids) <= 8 else f"{len(token_ids)} tokens, the last {token_ids[-8:]}"


def as_token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """A config's `eos_token_id`, which may be absent, an int or a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


class StopStringMatcher:
    """Incremental text of one sample, searched for stop strings as it grows."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._overlap = max(map(len, stops)) - 1
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
        """At the end of the sample: keep whatever was held back."""
        before = self._decode(self._context, self._decoded)
        after = self._decode(self._context, len(self._tokens))
        self.text += after[len(before) :]
        self._context = self._decoded = len(self._tokens)

    def _decode(self, start: int, end: int) -> str:
        return decoded(self._tokenizer, self._tokens[start:end])
