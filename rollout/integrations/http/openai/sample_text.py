"""Make the text of a sample, at its end or as it grows.

Invariants
----------
* The pieces of a stream are, joined, the text of the same sample that is not streamed. It goes on from that of its
  prompt: a space between them is in it.
* The token that ended a sample is not in its text; a stop string, and all behind it, neither. What may be the begin of
  one is held back.
* Special tokens are in no text, but where a reader of calls needs them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from samebit.rollout.outputs import SampleOutput, StreamChunk
from samebit.rollout.requests.stop_strings import Ids, StopStringMatcher, place_of, text_of
from samebit.rollout.requests.tokenizer import Tokenizer


def whole_text(tokenizer: Tokenizer, sample: SampleOutput, prompt: Ids) -> str:
    """Return the text of a sample that has ended, also of one from a worker without a tokenizer."""
    if sample.text is not None:
        return sample.text
    ended = ended_by(sample, sample.token_ids) is not None
    return text_of(tokenizer, sample.token_ids[:-1] if ended else sample.token_ids, prompt)


def text_by(tokenizer: Tokenizer, sample: SampleOutput, prompt: Ids) -> str:
    """Return the text of a sample that has ended as another tokenizer than the worker's has it."""
    if not isinstance(sample.stop_reason, str):
        return whole_text(tokenizer, replace(sample, text=None), prompt)
    last = StreamChunk(sample.index, sample.token_ids, sample.logprobs, True, sample.finish_reason, sample.stop_reason)
    return SampleText(tokenizer, (), frozenset(), prompt).push(last)


def ended_by(ended: SampleOutput | StreamChunk, token_ids: list[int]) -> int | None:
    """Return the token that ended a sample, None if none did. token_ids: the sample's last ones."""
    by_token = ended.finish_reason == "stop" and not isinstance(ended.stop_reason, str)
    return token_ids[-1] if by_token and token_ids else None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the special tokens by their ids."""
    return {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}


class KeepingSpecial:
    """Decodes as a tokenizer does, but does not skip the special tokens that are `kept`: None for all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: Collection[str] | None) -> None:
        self._tokenizer = tokenizer
        special = {} if kept is None else special_tokens(tokenizer)
        self._skipped = frozenset(token for token, text in special.items() if text not in (kept or ()))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        left = [token for token in token_ids if not (skip_special_tokens and token in self._skipped)]
        return self._tokenizer.decode(left, skip_special_tokens=False)


class SampleText:
    """Makes the pieces of one sample's text. `end_ids`: tokens that may end it. prompt: what it goes on from.

    Attributes:
        ended_by: the token that ended the sample, None before and if none did.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], end_ids: frozenset[int], prompt: Ids = ()) -> None:
        self._stops = stops
        self._end_ids = end_ids
        self._matcher = StopStringMatcher(tokenizer, stops, prompt)
        self._held: list[int] = []
        self._sent = 0
        self.ended_by: int | None = None

    def push(self, chunk: StreamChunk) -> str:
        """Take new tokens; return the text that is certain now and was not returned before."""
        ids = self._held + chunk.token_ids
        if chunk.finished:
            return self._rest(ids, chunk)
        # The last token may turn out to have ended the sample: the step that appends it finishes it a moment later.
        self._held = ids[-1:] if ids and (self._stops or ids[-1] in self._end_ids) else []
        for token in ids[: len(ids) - len(self._held)]:
            self._matcher.push(token, search=False)
        return self._piece(len(self._matcher.text) - self._possible_stop())

    def _rest(self, ids: list[int], chunk: StreamChunk) -> str:
        self.ended_by = ended_by(chunk, ids)
        body, last = ids[:-1], ids[-1:]
        for token in body:
            self._matcher.push(token, search=False)
        before = len(self._matcher.text)
        if self.ended_by is None:
            for token in last:
                self._matcher.push(token, search=False)
        self._matcher.flush()
        text = self._matcher.text
        if isinstance(chunk.stop_reason, str):
            place = place_of(chunk.stop_reason, text, before)
            return self._piece(before if place < 0 else place)  # -1: a special token that is kept stands within it
        return self._piece(len(text))

    def _piece(self, end: int) -> str:
        piece = self._matcher.text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _possible_stop(self) -> int:
        """Return how many characters at the end may be the begin of a stop string."""
        return max((overlap(self._matcher.text, stop) for stop in self._stops), default=0)


def overlap(text: str, word: str) -> int:
    """Return how many characters at the end of the text are the begin of the word, which is not whole there."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
