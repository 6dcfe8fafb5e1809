"""Hold a request and its sequences: what the engine, the scheduler and the cache share, and the runner reads.

Invariants
----------
* A sequence's known tokens are `token_ids[:num_tokens]`, the prompt first; the KV of positions
  `0 .. num_computed - 1` is in its blocks, and `num_computed < num_tokens` while it is unfinished.
* Only the engine's thread writes. A reader in another thread that takes `finished` first, then
  `num_tokens`, then the buffers, sees whole tokens only.
* Who writes what of a sequence: the cache `slot`, and through `resume_at` where it begins; the scheduler `schedule`,
  and through `forget_computed` that it waits again; the engine what was computed, sampled and scored, and through
  `finish` that it ended. What the cache remembers beside that is its own (`CacheEntry`).
* Behind a step's kernels nothing of a sequence is in a processor's caches: what each step reads of it lies in few
  objects, and what most steps do not change they do not write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from samebit.kernels.layout.lora.adapters import Adapter
from samebit.rollout.requests.block_digests import PromptDigests
from samebit.rollout.requests.images import PromptImages
from samebit.rollout.requests.shared import IntArray, Progress, Shared
from samebit.rollout.requests.stop_strings import StopStringMatcher
from samebit.rollout.requests.tokenizer import Tokenizer
from samebit.rollout.requests.version_history import Span, VersionHistory
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.grammars import Grammar

FloatArray = npt.NDArray[np.float32]
TopLogprobs = list[dict[int, float] | None]
"""Has the log-probabilities of the likeliest tokens by their ids, an entry a position; None where there are none."""
Scalar = TypeVar("Scalar", bound=np.generic)


class Request:
    """Holds what was asked for, and the n sequences that answer it.

    `shared`: what the sequences point to, none of which points to the request.
    `prompt_digests`: what the prompt's full blocks are called, None if it was not hashed at submission.
    """

    __slots__ = ("prompt_digests", "sequences", "shared")

    def __init__(
        self,
        request_id: str,
        prompt: IntArray,
        params: SamplingParams,
        *,
        ordinal: int,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        prompt_digests: PromptDigests | None = None,
        adapter: Adapter | None = None,
        grammar: Grammar | None = None,
        images: PromptImages | None = None,
    ) -> None:
        self.shared = Shared(
            request_id, prompt, params, ordinal=ordinal, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids,
            adapter=adapter, grammar=grammar, images=images,
        )  # fmt: skip
        self.prompt_digests = prompt_digests
        self.sequences = [Sequence(self.shared, index, tokenizer) for index in range(params.n)]

    @property
    def request_id(self) -> str:
        """Return what the request is called."""
        return self.shared.request_id

    @property
    def prompt(self) -> IntArray:
        """Return the tokens that were given."""
        return self.shared.prompt

    @property
    def params(self) -> SamplingParams:
        """Return how its samples are drawn."""
        return self.shared.params

    @property
    def adapter(self) -> Adapter | None:
        """Return the adapter that the request goes through."""
        return self.shared.adapter

    @property
    def adapter_number(self) -> int:
        """Return the number of the request's adapter; 0 for none."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def images(self) -> PromptImages | None:
        """Return those of the prompt; None without any, and once the request has ended."""
        return self.shared.images

    @property
    def progress(self) -> Progress:
        """Return how far the request is."""
        return self.shared.progress

    @property
    def error(self) -> Exception | None:
        """Return what failed the request."""
        return self.shared.error


@dataclass(slots=True, eq=False)
class Schedule:
    """Holds what the scheduler notes of a sequence.

    arrival: its place in the order in which sequences came to the scheduler.
    siblings: samples that wait for this one to compute the prompt.
    num_ahead: 1 while a step behind the current one, launched ahead, computes one more position; else 0.
    """

    arrival: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    num_ahead: int = 0


@dataclass(slots=True, eq=False)
class KVHistory:
    """Says where the KV of a sequence comes from.

    version: the weights that positions were computed under last; None before any was since the sequence was admitted.
    versions: of the weights that all were computed under.
    spans_before: those of a sample that does not run: as of its preemption, or of the prompt that another sample has
        computed for it.
    write_from: KV below it is shared, and not written.
    num_cached_tokens: prompt tokens that were not computed for it, since others had been; None before anything of it
        was computed.
    """

    version: int | None = None
    versions: VersionHistory = field(default_factory=VersionHistory)
    spans_before: list[Span] = field(default_factory=list)
    write_from: int = 0
    num_cached_tokens: int | None = None


class SampledTokens:
    """Holds what is reported of each sampled token beside itself: its log-probabilities, the most likely alternatives
    if they were asked for, the version of the weights it was sampled under, and the oldest behind the KV that it was
    sampled from.

    raw_logprobs: at temperature 1; `logprobs` itself where that is the temperature of the report.
    weights, contexts: the two versions, of all tokens.
    matcher: finds the strings that end the sample, if there are any.
    """

    __slots__ = ("contexts", "logprobs", "matcher", "raw_logprobs", "top_logprobs", "weights")

    def __init__(self, room: int, params: SamplingParams, tokenizer: Tokenizer | None, prompt: IntArray) -> None:
        self.logprobs: FloatArray = np.empty(room, np.float32)
        self.raw_logprobs = self.logprobs if params.temperature in (0, 1) else np.empty(room, np.float32)
        self.top_logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.weights = VersionHistory()
        self.contexts = VersionHistory()
        self.matcher: StopStringMatcher | None = None
        if params.stop_strings and tokenizer is not None:
            self.matcher = StopStringMatcher(tokenizer, params.stop_strings, prompt)

    def grow(self, room: int) -> None:
        """Make room for so many tokens."""
        one = self.raw_logprobs is self.logprobs
        self.logprobs = _enlarged(self.logprobs, room)
        self.raw_logprobs = self.logprobs if one else _enlarged(self.raw_logprobs, room)


@dataclass(slots=True, eq=False)
class PromptScores:
    """Holds log-probabilities of a prompt's tokens, the most likely ones if they were asked for, and whether some are
    still `wanted`."""

    logprobs: FloatArray
    top_logprobs: TopLogprobs | None
    wanted: bool

    @classmethod
    def of(cls, params: SamplingParams, length: int) -> PromptScores | None:
        """Return room for the scores of a prompt of this length; None where they were not asked for."""
        if params.prompt_logprobs is None:
            return None
        return cls(np.zeros(length, np.float32), [None] * length if params.prompt_logprobs else None, length > 1)

    def add(self, start: int, logprobs: FloatArray, top: TopLogprobs | None) -> None:
        """Keep the scores of the tokens from `start` on; those of the prompt's last token come last."""
        end = start + len(logprobs)
        self.logprobs[start:end] = logprobs
        if self.top_logprobs is not None and top is not None:
            self.top_logprobs[start:end] = top
        self.wanted = end < len(self.logprobs)


@dataclass(slots=True, eq=False)
class SampleEnding:
    """Says how a sample ended: `reason` is None until then, and written last.

    routed_experts: which experts computed each position, if it was asked for.
    """

    reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: npt.NDArray[np.int16] | None = None

    @property
    def by_token(self) -> bool:
        """Tell whether an end or stop token ended the sample, which is not in its text."""
        return self.reason == "stop" and not isinstance(self.stop_reason, str)


class Sequence:
    """Holds one sample of a request.

    shared: what it has in common with the request's other samples.
    slot: its row in the block tables while it runs, -1 otherwise.
    prompt_scores: those of the prompt, which the first sample has where they were asked for.
    """

    __slots__ = (
        "ending",
        "kv",
        "num_computed",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_scores",
        "sample_index",
        "sampled",
        "schedule",
        "shared",
        "slot",
        "token_ids",
    )

    def __init__(self, shared: Shared, sample_index: int, tokenizer: Tokenizer | None) -> None:
        params = shared.params
        length = len(shared.prompt)
        room = min(shared.max_new_tokens, 64)
        self.shared = shared
        self.sample_index = sample_index
        self.token_ids: IntArray = np.empty(length + room, np.int64)
        self.token_ids[:length] = shared.prompt
        self.num_prompt_tokens = self.num_tokens = length
        self.num_computed = 0
        self.slot = -1
        self.schedule = Schedule()
        self.kv = KVHistory()
        self.sampled = SampledTokens(room, params, tokenizer, shared.prompt)
        self.prompt_scores = PromptScores.of(params, length) if sample_index == 0 else None
        self.ending = SampleEnding()

    @property
    def params(self) -> SamplingParams:
        """Return the parameters of the request."""
        return self.shared.params

    @property
    def prompt_logprobs_wanted(self) -> bool:
        """Return whether the prompt's tokens are to be scored when they are computed."""
        return self.prompt_scores is not None and self.prompt_scores.wanted

    @property
    def num_new_tokens(self) -> int:
        """Return how many tokens were sampled."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Return whether the sample has ended, for whatever reason."""
        return self.ending.reason is not None

    @property
    def output_ids(self) -> IntArray:
        """Return the sampled tokens so far (a view)."""
        end = self.num_tokens
        return self.token_ids[self.num_prompt_tokens : end]

    def append(self, token: int, logprob: float, raw_logprob: float) -> int:
        """Add a sampled token and its log-probabilities; return how many there are."""
        position, sampled = self.num_tokens, self.sampled
        index = position - self.num_prompt_tokens
        if index >= len(sampled.logprobs):
            self._grow()
        self.token_ids[position] = token
        sampled.logprobs[index] = logprob
        if sampled.raw_logprobs is not sampled.logprobs:
            sampled.raw_logprobs[index] = raw_logprob
        self.num_tokens = position + 1
        return index + 1

    def resume_at(self, start: int, *, write_from: int) -> None:
        """Begin behind `start` tokens, in blocks that have the KV of the first `write_from`; the cache calls this."""
        self.num_computed = start
        self.kv.write_from = write_from

    def mark_computed(self, start: int, length: int, version: int) -> bool:
        """Note that positions `start .. start + length - 1` were computed; KV up to `write_from` was there before, from
        the step in which this sequence was admitted. Tell whether they are the first under these weights."""
        is_first = self.kv.version != version
        if is_first:
            if self.kv.num_cached_tokens is None:  # not at the admission: the step may be dropped
                self.kv.num_cached_tokens = min(start, self.num_prompt_tokens)
            self._go_on_under(version)
        self.num_computed = start + length
        return is_first

    def _go_on_under(self, version: int) -> None:
        """Note that what is computed and sampled from here on is of these weights."""
        kv, tokens = self.kv, self.num_new_tokens
        kv.versions.begin(0 if kv.version is None else self.num_with_kv, version)
        self.sampled.weights.begin(tokens, version)
        self.sampled.contexts.begin(tokens, kv.versions.oldest)
        kv.version = version

    @property
    def num_with_kv(self) -> int:
        """Return how many positions have their KV, once something was computed."""
        return max(self.num_computed, self.kv.write_from)

    def take_prompt_of(self, leader: Sequence, version: int) -> None:
        """Note that the first token is drawn, under these weights, from the logits of another sample of the request,
        which has computed the prompt."""
        self.kv.spans_before = leader.kv_spans
        self.sampled.weights.begin(0, version)
        self.sampled.contexts.begin(0, leader.kv.versions.oldest)

    @property
    def kv_spans(self) -> list[Span]:
        """Return the weights that positions were computed under, of a sample that does not run too."""
        return self.kv.spans_before if self.kv.version is None else self.kv.versions.spans(self.num_with_kv)

    @property
    def weight_spans(self) -> list[Span]:
        """Return the weights that tokens were sampled under."""
        return self.sampled.weights.spans(self.num_new_tokens)

    @property
    def context_spans(self) -> list[Span]:
        """Return the oldest weights behind the KV that tokens were sampled from."""
        return self.sampled.contexts.spans(self.num_new_tokens)

    @property
    def reported_cached_tokens(self) -> int:
        """Return `kv.num_cached_tokens`, or the whole prompt of a sample that never ran: another has given it its first
        token."""
        if self.kv.num_cached_tokens is None:
            return self.num_prompt_tokens if self.kv.spans_before else 0
        return self.kv.num_cached_tokens

    def forget_computed(self) -> None:
        """Wait again: the tokens stay, their KV is gone."""
        self.kv = KVHistory(spans_before=self.kv_spans, num_cached_tokens=self.kv.num_cached_tokens)
        self.num_computed = 0
        if self.prompt_scores is not None and not self.num_new_tokens:
            self.prompt_scores.wanted = self.num_prompt_tokens > 1  # again: those of before may be of other weights

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """End the sample, for this reason."""
        self.ending.stop_reason = stop_reason
        self.ending.reason = reason
        self.shared.progress.unfinished -= 1
        self.shared.record("finished", self.sample_index)

    def _grow(self) -> None:
        room = min(2 * len(self.sampled.logprobs), self.shared.max_new_tokens)
        self.token_ids = _enlarged(self.token_ids, self.num_prompt_tokens + room)
        self.sampled.grow(room)


def _enlarged(old: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    new = np.empty(size, old.dtype)
    new[: len(old)] = old
    return new
