"""Decode a sample as it grows, or when it has ended, and look for stop strings in its text.

Invariants
----------
* A match that straddles two tokens is found; an incomplete UTF-8 character is held back until it is whole.
* The text is cut before the match; the token ids keep every sampled token.
* A sample has one text: that as which it grew is that of all its tokens.
* The prompt's text and the sample's are, joined, the text of the sequence: a space between them is the sample's.
* However many tokens without text a sample has, a new token is decoded with a few before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from samebit.rollout.errors import TokenizerError
from samebit.rollout.requests.tokenizer import Tokenizer, decoded

Ids = Sequence[int] | npt.NDArray[np.int64]


def text_of(tokenizer: Tokenizer, token_ids: list[int], prompt: Ids = ()) -> str:
    """Return the text of a sample that has ended. prompt: what it goes on from.

    A tokenizer that falls back to bytes (Llama's, Mistral's, Gemma's) decodes a run of them to nothing but replacement
    characters where one character is incomplete: whole ones beside it are only there as the sample grows.
    """
    tail = _tail(tokenizer, prompt)
    before = decoded(tokenizer, tail)
    text = decoded(tokenizer, [*tail, *token_ids])
    if "\ufffd" not in text and text.startswith(before):
        return text[len(before) :]
    matcher = StopStringMatcher(tokenizer, (), prompt)
    for token in token_ids:
        matcher.push(token, search=False)
    matcher.flush()
    return matcher.text


def _tail(tokenizer: Tokenizer, prompt: Ids) -> list[int]:
    """Return the last tokens of a prompt, behind which those of a sample are decoded: as few as have a text, since
    SentencePiece's decoders take a space from where a text begins. None where they cut a character, which would spoil
    those behind it, and where the tokenizer can not decode them: that fails no sample whose own text it has."""
    last = [int(token) for token in prompt[-_TAIL:]]
    text = ""
    for count in range(1, len(last) + 1):
        try:
            text = decoded(tokenizer, last[-count:])
        except TokenizerError:
            return []
        if text and "\ufffd" not in text:
            return last[-count:]
    return [] if text else last


def place_of(stop: str, text: str, seen: int) -> int:
    """Return where a stop string begins that ends behind the first `seen` characters of a text; -1 if none does."""
    return text.find(stop, max(seen - len(stop) + 1, 0))


_TAIL = 8
"""Tokens at a prompt's end among which one with a text is looked for; a few special ones may stand behind it."""

_INCOMPLETE = 3
"""Tokens that an incomplete character can have: it lacks one byte at least of four."""

_HELD = 8
"""From this count of tokens on those before the last few are looked at by themselves: no text is decoded ever again."""


class StopStringMatcher:
    """Decodes the text of one sample as it grows, and searches it for stop strings. prompt: what it goes on from."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], prompt: Ids = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._prompt: Ids | None = prompt
        self._tokens: list[int] = []
        self._context = 0
        self._decoded = 0
        self.text = ""

    def push(self, token: int, *, search: bool) -> str | None:
        """Add a token; the stop string that now matches, if any (the text is then cut before it)."""
        if self._prompt is not None:
            self._tokens, self._prompt = _tail(self._tokenizer, self._prompt), None
            self._decoded = len(self._tokens)
        self._tokens.append(token)
        new, end = self._certain()
        if not new:
            return None
        seen = len(self.text)
        self.text += new
        self._context, self._decoded = self._decoded, end
        if not search:
            return None
        return self._cut(seen)

    def _cut(self, seen: int) -> str | None:
        found = [(at, stop) for stop in self._stops if (at := place_of(stop, self.text, seen)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def flush(self) -> None:
        """Keep whatever was held back, at the end of the sample."""
        self.text += self.held_back()
        self._context = self._decoded = len(self._tokens)

    def held_back(self) -> str:
        """Return what is not in the text yet, since a later token might change it."""
        return self._undecoded(len(self._tokens))

    def _certain(self) -> tuple[str, int]:
        """Return the text that no later token can change, of those that are not in the text yet, and where it ends.
        A token that is no text is forgotten: a run of them would be decoded again with each."""
        end = len(self._tokens)
        new = self._undecoded(end)
        if new and not new.endswith("\ufffd"):
            return new, end
        if self._is_no_text(self._tokens[-1]):
            self._tokens.pop()
            return "", self._decoded
        if end - self._decoded >= _HELD:
            apart = self._undecoded(end - _INCOMPLETE)
            if apart + self._decode(end - _INCOMPLETE, end) == new:
                return apart, end - _INCOMPLETE
        return "", self._decoded

    def _is_no_text(self, token: int) -> bool:
        """Tell a token that is no text wherever it stands, as a special one or one that the tokenizer does not know,
        from one that is none at this place only, as a space in front of all text: between two others that is some."""
        if decoded(self._tokenizer, [token]):
            return False
        known = self._tokens[self._context : self._decoded]
        without, between = [*known, *known, token], [*known, token, *known, token]
        return decoded(self._tokenizer, without) == decoded(self._tokenizer, between)

    def _undecoded(self, end: int) -> str:
        """Return the text of the tokens up to an end that are not in the text yet: what they add to that of the piece
        before, as a space may only be there behind other tokens. Bytes that end no character can undo that of those
        before."""
        before = self._decode(self._context, self._decoded)
        after = self._decode(self._context, end)
        return after[len(before) :] if after.startswith(before) else self._decode(self._decoded, end)

    def _decode(self, start: int, end: int) -> str:
        return decoded(self._tokenizer, self._tokens[start:end])
