"""Propose tokens for the decodes of a step: what followed the same n-gram in the prompt, in a sequence's own output, in
those of its request's other samples, or in what the same prompt was answered with before; where there is no such guess,
what a draft model goes on with.

Prompt lookup (Saxena, 2023: https://github.com/apoorvumang/prompt-lookup-decoding), as vLLM's method "ngram"; with the
outputs of other samples and of the last epoch, as rollouts of reinforcement learning repeat themselves.

Invariants
----------
* A guess costs the same whatever the lengths of prompt and output, but for tokens that are new since the last.
* What is kept of prompts that have been answered is bounded, in tokens; the prompt that was answered longest ago goes
  first, and of one prompt the oldest of more than `_MOST_OUTPUTS`. What an answer began with that was aborted is none:
  it is kept, before all else is dropped, for a request that goes on with it, and is a part of that one's answer.
* Requests with different salts guess from nothing of each other.
* With recurrent layers, no guess is the last token of a chunk of their arithmetic: that token moves the state, and what
  is guessed must be able to be taken back (`samebit.kernels.layout.states.memory`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from samebit.rollout.drafts.group import Group, Kept
from samebit.rollout.requests.request import Sequence
from samebit.rollout.requests.shared import IntArray, Shared

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


class Begun(NamedTuple):
    """Holds what an answer began with before it was aborted, and the key of its prompt."""

    key: bytes
    output: Kept


class Proposer(Protocol):
    """Guesses what several sequences go on with, all of them at once: a draft model."""

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return for each sequence, whose last token is certain, up to so many tokens that may follow."""

    def forget(self, sequence: Sequence) -> None:
        """Keep nothing of a sequence that has ended; it may be one that was never asked for."""

    def release(self) -> None:
        """Give all memory back; what is asked next takes it again."""

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Return how many KV blocks it has, and how many of them no sequence uses."""


class Drafter:
    """Guesses what running sequences go on with. model: is asked where no n-gram has come before; None for none."""

    def __init__(self, options: DraftOptions, model: Proposer | None = None) -> None:
        self.options = options
        self.model = model
        self._groups: dict[Shared, Group] = {}
        self._history: OrderedDict[bytes, list[Kept]] = OrderedDict()
        self._begun: OrderedDict[bytes, Begun] = OrderedDict()
        self._num_kept = 0

    def guesses(self, sequences: list[Sequence], room: int) -> list[tuple[int, ...]]:
        """Return for each sequence that decodes tokens that may follow, together at most as many as there is room."""
        found: list[tuple[int, ...]] = []
        for sequence in sequences:
            found.append(self.guess(sequence, room))
            room -= len(found[-1])
        if self.model is not None and room > 0:
            self._ask_model(self.model, sequences, found, room)
        return found

    def _ask_model(self, model: Proposer, sequences: list[Sequence], found: list[tuple[int, ...]], room: int) -> None:
        """Put what the model guesses where nothing was found: equal shares of the room, while there is some."""
        open_to = [at for at, guess in enumerate(found) if not guess and not sequences[at].params.depends_on_tokens]
        each = min(self.options.num_tokens, max(1, room // max(1, len(open_to))))
        counts = [(at, min(each, self.most_behind(sequences[at]))) for at in open_to]
        asked = [(at, count) for at, count in counts if count > 0][: room // each]
        guesses = model.propose([(sequences[at], count) for at, count in asked]) if asked else []
        for (at, _), guess in zip(asked, guesses, strict=True):
            found[at] = guess

    def guess(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Return tokens that may follow in a sequence that decodes, at most so many, by its n-grams; none where there
        is no guess, or where the choice of a token depends on those before it by more than the logits."""
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
        if self.model is not None:
            self.model.forget(sequence)
        group, aborted = self._group(shared), not sequence.finished
        group.end(sequence, answered=not aborted)
        if aborted and sequence.num_new_tokens:
            self._keep_begun(sequence)
        if not group.left:
            del self._groups[shared]
            begun = self._take_begun(_key(shared, shared.prompt)) if group.outputs else None
            key, first = (_key(shared, shared.prompt), []) if begun is None else (begun.key, [begun.output])
            answers = [np.concatenate((*first, output)) for output in group.outputs]
            self._keep(key, [answer for answer in answers if len(answer) > self.options.gram])

    def _group(self, shared: Shared) -> Group:
        group = self._groups.get(shared)
        if group is None:
            key, prompt, begun = _key(shared, shared.prompt), shared.prompt, list[Kept]()
            if key in self._begun:  # its prompt is another one with the beginning of an answer
                key, output = self._begun[key]
                prompt, begun = prompt[: len(prompt) - len(output)], [output]
            before = [*self._history.get(key, []), *begun]
            group = self._groups[shared] = Group(prompt, before, shared.params.n, self.options.gram)
        return group

    def _keep(self, key: bytes, outputs: list[Kept]) -> None:
        """Keep what a prompt was answered with, beside what it was answered with before."""
        if not outputs:
            return
        came = {output.tobytes() for output in outputs}
        kept = [*(output for output in self._drop(key) if output.tobytes() not in came), *outputs]
        kept = self._newest(kept[-max(_MOST_OUTPUTS, len(outputs)) :])
        if kept:
            self._history[key] = kept
            self._num_kept += _count(kept)
        self._keep_to_limit()

    def _newest(self, outputs: list[Kept]) -> list[Kept]:
        """Return as many of the last outputs as may be kept."""
        sizes = np.cumsum([len(output) + _OVERHEAD for output in reversed(outputs)])
        fitting = int(np.searchsorted(sizes, self.options.history_tokens, side="right"))
        return outputs[len(outputs) - fitting :]

    def _keep_begun(self, sequence: Sequence) -> None:
        """Keep what a sample that is aborted began with, for a request whose prompt goes on behind it."""
        shared, begun = sequence.shared, self._begun.get(_key(sequence.shared, sequence.shared.prompt))
        output = sequence.output_ids.astype(np.int32)
        if begun is None:
            begun = Begun(_key(shared, shared.prompt), output)
        else:
            begun = Begun(begun.key, np.concatenate((begun.output, output)))
        key = _key(shared, sequence.token_ids[: sequence.num_tokens])
        self._take_begun(key)
        self._begun[key] = begun
        self._num_kept += _count([begun.output])
        self._keep_to_limit()

    def _take_begun(self, key: bytes) -> Begun | None:
        begun = self._begun.pop(key, None)
        if begun is not None:
            self._num_kept -= _count([begun.output])
        return begun

    def _drop(self, key: bytes) -> list[Kept]:
        kept = self._history.pop(key, [])
        self._num_kept -= _count(kept)
        return kept

    def _keep_to_limit(self) -> None:
        while self._num_kept > self.options.history_tokens:
            if self._begun:
                self._take_begun(next(iter(self._begun)))
            else:
                self._drop(next(iter(self._history)))


def _count(outputs: list[Kept]) -> int:
    return sum(map(len, outputs)) + _OVERHEAD * len(outputs)


def _key(shared: Shared, prompt: IntArray) -> bytes:
    """Return what names a prompt with its images, the salt of a request and its adapter: one that is trained resembles
    that of its name before."""
    salt, adapter = shared.params.cache_salt, None if shared.adapter is None else shared.adapter.public_name
    named = hashlib.blake2b(repr((salt, adapter)).encode(), digest_size=16)
    named.update(prompt.tobytes())
    if shared.images is not None:
        named.update(shared.images.digests)
    return named.digest()
