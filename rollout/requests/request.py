"""Hold a request and its sequences: what the engine, the scheduler and the cache share, and the runner reads.

Invariants
----------
* A sequence's known tokens are `token_ids[:num_tokens]`, the prompt first; the KV of positions
  `0 .. num_computed - 1` is in its blocks, and `num_computed < num_tokens` while it is unfinished.
* Only the engine's thread writes. A reader in another thread that takes `finished` first, then
  `num_tokens`, then the buffers, sees whole tokens only.
* Who writes what of a sequence: the cache `slot`, and through `resume_at` where it begins; the scheduler `arrival`,
  `siblings`, `num_ahead`, and that it runs (`status`) or through `forget_computed` that it waits again; the engine what
  was computed, sampled and scored, and through `finish` that it ended. What the cache remembers beside that is its own
  (`CacheEntry`).
* KV below `write_from` is shared: it is read, and never written by this sequence.
* `kv_spans` says under which weights each computed position was computed, `weight_spans` under which each token
  was sampled, `context_spans` what the oldest weights behind the KV were that it was sampled from.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from samebit.kernels.layout.lora.adapters import Adapter
from samebit.rollout.requests.block_digests import PromptDigests
from samebit.rollout.requests.stop_strings import StopStringMatcher
from samebit.rollout.requests.tokenizer import Tokenizer
from samebit.rollout.sampling_params import SamplingParams

Span = tuple[int, int, int]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Scalar = TypeVar("Scalar", bound=np.generic)


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestEvent:
    """Records that a request was added, scheduled, preempted or finished, or has its first token; `time` is
    `time.monotonic()`.

    `sample` is None for events of the whole request.
    """

    name: str
    time: float
    sample: int | None = None


class Request:
    """Holds what was asked for, and the n sequences that answer it.

    `prompt_digests`: what the prompt's full blocks are called, None if it was not hashed at submission.
    `adapter`: what it goes through until it ends; None for the model alone. It has
    `started` when a sequence was admitted, and is `answered` when one has a token.
    """

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
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.ordinal = ordinal
        self.max_new_tokens = max_new_tokens
        ends = () if params.ignore_eos else eos_token_ids
        self.eos_token_ids = tuple(dict.fromkeys((*ends, *params.stop_ids)))
        self.end_ids = frozenset(self.eos_token_ids)
        self.tokenizer = tokenizer
        self.prompt_digests = prompt_digests
        self.adapter = adapter
        self.arrival = time.monotonic()
        self.events = [RequestEvent("added", self.arrival)]
        self.started = False
        self.answered = False
        self.error: Exception | None = None
        self.sequences = [Sequence(self, index) for index in range(params.n)]
        self.unfinished = params.n

    @property
    def adapter_number(self) -> int:
        """Return the number of the adapter that it goes through; 0 for none."""
        return 0 if self.adapter is None else self.adapter.number

    def record(self, name: str, sample: int) -> float:
        """Note that this happened now; return the time."""
        now = time.monotonic()
        self.events.append(RequestEvent(name, now, sample))
        return now


class Sequence:
    """Holds one sample of a request.

    slot: its row in the block tables while it runs, -1 otherwise.
    num_ahead: 1 while a step behind the current one, launched ahead, computes one more position; else 0.
    arrival: its place in the order in which sequences came to the scheduler.
    siblings: samples that wait for this one to compute the prompt.
    kv_spans, weight_spans, context_spans: `[start, end, version]` each.
    kv_spans_before: `kv_spans` of a sample that does not run: as of its preemption, or of the prompt that another
        sample has computed for it.
    routed_experts: which experts computed each position, once it has ended and if it was asked for.
    num_cached_tokens: prompt tokens that were not computed for it, since others had been;
        None before it first ran.
    """

    __slots__ = (
        "arrival",
        "context_spans",
        "finish_reason",
        "kv_spans",
        "kv_spans_before",
        "logprobs",
        "matcher",
        "num_ahead",
        "num_cached_tokens",
        "num_computed",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "prompt_logprobs",
        "prompt_logprobs_wanted",
        "prompt_top_logprobs",
        "raw_logprobs",
        "request",
        "routed_experts",
        "sample_index",
        "siblings",
        "slot",
        "status",
        "stop_reason",
        "token_ids",
        "top_logprobs",
        "weight_spans",
        "write_from",
    )

    def __init__(self, request: Request, sample_index: int) -> None:
        params = request.params
        length = len(request.prompt)
        room = min(request.max_new_tokens, 64)
        self.request = request
        self.params = params
        self.sample_index = sample_index
        self.num_prompt_tokens = length
        self.num_tokens = length
        self.num_computed = 0
        self.num_ahead = 0
        self.write_from = 0
        self.num_cached_tokens: int | None = None
        self.arrival = 0
        self.siblings: list[Sequence] = []
        self.slot = -1
        self.status = SequenceStatus.WAITING
        self.token_ids: IntArray = np.empty(length + room, np.int64)
        self.token_ids[:length] = request.prompt
        self.logprobs: FloatArray = np.empty(room, np.float32)
        self.raw_logprobs: FloatArray = np.empty(room, np.float32)
        self.top_logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.routed_experts: npt.NDArray[np.int16] | None = None
        self.kv_spans: list[list[int]] = []
        self.kv_spans_before: list[list[int]] = []
        self.weight_spans: list[list[int]] = []
        self.context_spans: list[list[int]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.matcher: StopStringMatcher | None = None
        if params.stop_strings and request.tokenizer is not None:
            self.matcher = StopStringMatcher(request.tokenizer, params.stop_strings)
        wants = params.prompt_logprobs is not None and sample_index == 0
        self.prompt_logprobs_wanted = wants and length > 1
        self.prompt_logprobs: FloatArray | None = np.zeros(length, np.float32) if wants else None
        self.prompt_top_logprobs: list[dict[int, float] | None] | None = (
            [None] * length if wants and params.prompt_logprobs else None
        )

    @property
    def num_new_tokens(self) -> int:
        """Return how many tokens were sampled."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def finished(self) -> bool:
        """Return whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED

    @property
    def output_ids(self) -> IntArray:
        """Return the sampled tokens so far (a view)."""
        end = self.num_tokens
        return self.token_ids[self.num_prompt_tokens : end]

    @property
    def oldest_kv(self) -> int:
        """Return the oldest weights that a computed position depends on: those of the first one."""
        return self.kv_spans[0][2]

    def append(self, token: int, logprob: float, raw_logprob: float, *, version: int, context: int) -> None:
        """Add a sampled token, its log-probabilities, the weights it was sampled under and the oldest of its KV's."""
        position = self.num_tokens
        index = position - self.num_prompt_tokens
        if index >= len(self.logprobs):
            self._grow()
        self.token_ids[position] = token
        self.logprobs[index] = logprob
        self.raw_logprobs[index] = raw_logprob
        extend_spans(self.weight_spans, index, index + 1, version)
        extend_spans(self.context_spans, index, index + 1, context)
        self.num_tokens = position + 1

    def resume_at(self, start: int, *, write_from: int) -> None:
        """Begin behind `start` tokens, in blocks that have the KV of the first `write_from`; the cache calls this."""
        self.num_computed = start
        self.write_from = write_from
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(start, self.num_prompt_tokens)

    def mark_computed(self, start: int, length: int, version: int) -> None:
        """Note that positions `start .. start + length - 1` were computed; KV up to `write_from` was there before, from
        the step in which this sequence was admitted."""
        self.num_computed = start + length
        known = self.kv_spans[-1][1] if self.kv_spans else 0
        end = max(self.num_computed, self.write_from)
        if end > known:
            extend_spans(self.kv_spans, known, end, version)

    def take_prompt_of(self, leader: Sequence) -> None:
        """Note that the first token is drawn from the logits of another sample of the request, which has computed the
        prompt."""
        self.kv_spans_before = [list(span) for span in leader.kv_spans]

    @property
    def reported_kv_spans(self) -> list[list[int]]:
        """Return `kv_spans`, of a sample that does not run too."""
        return self.kv_spans or self.kv_spans_before

    @property
    def reported_cached_tokens(self) -> int:
        """Return `num_cached_tokens`, or the whole prompt of a sample that never ran: another has given it its first
        token."""
        if self.num_cached_tokens is None:
            return self.num_prompt_tokens if self.kv_spans_before else 0
        return self.num_cached_tokens

    def forget_computed(self) -> None:
        """Go back to the waiting state: the tokens stay, their KV is gone."""
        self.num_computed = 0
        self.write_from = 0
        self.num_cached_tokens = self.num_cached_tokens or 0
        self.kv_spans_before, self.kv_spans = self.reported_kv_spans, []
        self.status = SequenceStatus.WAITING

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """End the sample, for this reason."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.status = SequenceStatus.FINISHED
        self.request.unfinished -= 1
        self.request.record("finished", self.sample_index)

    def _grow(self) -> None:
        room = min(2 * len(self.logprobs), self.request.max_new_tokens)
        self.token_ids = _enlarged(self.token_ids, self.num_prompt_tokens + room)
        self.raw_logprobs = _enlarged(self.raw_logprobs, room)
        self.logprobs = _enlarged(self.logprobs, room)


def extend_spans(spans: list[list[int]], start: int, end: int, version: int) -> None:
    """Add `[start, end)` under `version` behind the last span, merging equal versions."""
    if spans and spans[-1][2] == version:
        spans[-1][1] = end
    else:
        spans.append([start, end, version])


def _enlarged(old: npt.NDArray[Scalar], size: int) -> npt.NDArray[Scalar]:
    new = np.empty(size, old.dtype)
    new[: len(old)] = old
    return new
