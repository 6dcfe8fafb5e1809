"""Propose tokens for the decodes of a step: what followed the same n-gram in the prompt, in a sequence's own output, in
those of its request's other samples, or in what the same prompt was answered with before.

Prompt lookup (Saxena, 2023: https://github.com/apoorvumang/prompt-lookup-decoding), as vLLM's method "ngram"; with the
outputs of other samples and of the last epoch, as rollouts of reinforcement learning repeat themselves.

Invariants
----------
* A guess costs the same whatever the lengths of prompt and output, but for tokens that are new since the last.
* What is kept of prompts that have been answered is bounded, in tokens; the prompt that was answered longest ago goes
  first, and of one prompt the oldest of more than `_MOST_OUTPUTS`.
* Requests with different salts guess from nothing of each other.
* With recurrent layers, no guess is the last token of a chunk of their arithmetic: that token moves the state, and what
  is guessed must be able to be taken back (`samebit.kernels.layout.states.memory`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from samebit.rollout.drafts.group import Group, Kept
from samebit.rollout.requests.request import Sequence
from samebit.rollout.requests.shared import Shared

_MOST_OUTPUTS = 16
"""Answers that are kept of a prompt, or those of its last request where these are more: groups come as requests of
many samples, and as many requests of one."""

_OVERHEAD = 64
"""Tokens that take as much memory as an answer does beside its own."""


@dataclass(frozen=True)
class DraftOptions:
    """Says how much is guessed.

    num_tokens: of one sequence in a step. gram: tokens that must match before a guess. step_tokens: a step is filled up
    to so many tokens with guesses. history_tokens: what is kept of outputs, for prompts that come again. chunk: tokens
    between two moves of a state, from position 0 on; None for a model without recurrent layers.
    """

    num_tokens: int
    gram: int
    step_tokens: int
    history_tokens: int
    chunk: int | None = None


class Drafter:
    """Guesses what running sequences go on with."""

    def __init__(self, options: DraftOptions) -> None:
        self.options = options
        self._groups: dict[Shared, Group] = {}
        self._history: OrderedDict[bytes, list[Kept]] = OrderedDict()
        self._num_kept = 0

    def guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return tokens that may follow in a sequence that decodes, at most so many; none where there is no guess, or
        where the choice of a token depends on those before it by more than the logits."""
        count = min(self.options.num_tokens, most, self.most_behind(sequence))
        if count < 1 or sequence.params.depends_on_tokens:
            return ()
        return self._group(sequence.shared).guess(sequence, count)

    def most_behind(self, sequence: Sequence) -> int:
        """Return how many tokens may be guessed behind those of a sequence, whose last one is certain: one less than it
        may yet get, and up to the last but one of a chunk."""
        left = sequence.shared.max_new_tokens - sequence.num_new_tokens - 1
        chunk = self.options.chunk
        return left if chunk is None else min(left, chunk - 1 - sequence.num_tokens % chunk)

    def forget(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended, which others may guess from."""
        shared = sequence.shared
        if shared.params.depends_on_tokens:
            return
        group = self._group(shared)
        group.end(sequence)
        if not group.left:
            del self._groups[shared]
            self._keep(_key(shared), [output for output in group.outputs if len(output) > self.options.gram])

    def _group(self, shared: Shared) -> Group:
        group = self._groups.get(shared)
        if group is None:
            before = self._history.get(_key(shared), [])
            group = self._groups[shared] = Group(shared.prompt, before, shared.params.n, self.options.gram)
        return group

    def _keep(self, key: bytes, outputs: list[Kept]) -> None:
        """Keep what a prompt was answered with, beside what it was answered with before."""
        if not outputs:
            return
        before = [kept for kept in self._drop(key) if not any(np.array_equal(kept, output) for output in outputs)]
        kept = [*before, *outputs][-max(_MOST_OUTPUTS, len(outputs)) :]
        while _count(kept) > self.options.history_tokens:
            del kept[0]
        if kept:
            self._history[key] = kept
            self._num_kept += _count(kept)
        while self._num_kept > self.options.history_tokens:
            self._drop(next(iter(self._history)))

    def _drop(self, key: bytes) -> list[Kept]:
        kept = self._history.pop(key, [])
        self._num_kept -= _count(kept)
        return kept


def _count(outputs: list[Kept]) -> int:
    return sum(map(len, outputs)) + _OVERHEAD * len(outputs)


def _key(shared: Shared) -> bytes:
    """Return what names the prompt, its salt and its adapter: one that is trained resembles that of its name before."""
    salt, adapter = shared.params.cache_salt, None if shared.adapter is None else shared.adapter.name
    named = hashlib.blake2b(repr((salt, adapter)).encode(), digest_size=16)
    named.update(shared.prompt.tobytes())
    return named.digest()
