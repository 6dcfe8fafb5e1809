"""Hold what a caller gets back: plain data, detached from the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from samebit.rollout.requests.request import Request, Sequence, TopLogprobs
from samebit.rollout.requests.shared import RequestEvent
from samebit.rollout.requests.stop_strings import text_of
from samebit.rollout.requests.tokenizer import Tokenizer
from samebit.rollout.requests.version_history import Span


@dataclass(frozen=True)
class SampleOutput:
    """Holds one sampled continuation.

    token_ids: the sampled tokens. logprobs: theirs, at the sampling temperature (at 1 when greedy);
        raw_logprobs: at temperature 1. All float32 values.
    top_logprobs: for each token the most likely alternatives, None when not asked for.
    weight_versions: `(start, end, version)` over `token_ids`: the weights each was sampled under.
    context_versions: `(start, end, version)` over `token_ids`: the oldest weights behind the KV that each was
        sampled from. Where it is the token's weight version, the trainer with these weights gives its
        log-probability bit for bit; where it is older, the token attended to keys of other weights ("keep").
    kv_versions: `(start, end, version)` over prompt and output: the weights that the KV of each position
        was computed under, last: also after a preemption, an update with "recompute", or a sleep.
    finish_reason: "stop", "length" or "abort". stop_reason: the stop token id or stop string, None for
        the end-of-sequence token.
    text: decoded output, when the worker has a tokenizer, as it stands behind the prompt's text, with a space between
        them that is there; without an end or stop token that ended it, and cut before a stop string.
    routed_experts: `[positions, layers, experts of a token]` int16, the experts that computed each token of prompt and
        output, in ascending order; 0 in layers without routed experts. The last sampled token was not computed, and has
        none; what an aborted sample had not computed, neither. None when not asked for.
    num_cached_tokens: prompt tokens that were not computed for this sample: they were in the prefix cache,
        or another sample of the request had computed them.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    weight_versions: list[Span]
    context_versions: list[Span]
    kv_versions: list[Span]
    finish_reason: str
    stop_reason: int | str | None
    text: str | None
    num_cached_tokens: int
    routed_experts: npt.NDArray[np.int16] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RequestOutput:
    """Holds a finished request.

    num_cached_tokens: prompt tokens that its first sample found in the prefix cache.
    prompt_logprobs: its first entry is None, since nothing comes before the first token.
    events: what happened when, on the clock of `time.monotonic()`.
    adapter, adapter_version: what it went through from beginning to end; None for the model alone. The version of one
        that a trainer writes to is 0: the versions of its weights say when.
    """

    request_id: str
    prompt_token_ids: list[int]
    samples: list[SampleOutput]
    num_cached_tokens: int
    prompt_logprobs: list[float | None] | None
    prompt_top_logprobs: TopLogprobs | None
    events: list[RequestEvent]
    adapter: str | None = None
    adapter_version: int | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from being added to the first token of any sample; None if there was none."""
        times = {event.name: event.time for event in reversed(self.events)}
        return times["first_token"] - times["added"] if "first_token" in times else None


@dataclass(frozen=True)
class StreamChunk:
    """Holds new tokens of one sample; `finished` is True on its last chunk (which may be empty).

    start: how many tokens of the sample came before.
    top_logprobs: as in `SampleOutput`, of these tokens. stop_reason, weight_versions: of the sample, on its last chunk.
    """

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    finished: bool
    finish_reason: str | None
    stop_reason: int | str | None = None
    weight_versions: list[Span] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    start: int = 0


def request_output(request: Request, tokenizer: Tokenizer | None) -> RequestOutput:
    first = request.sequences[0]
    scores: list[float | None] | None = None
    found = first.prompt_scores
    if found is not None and not found.wanted:
        scores = [None, *found.logprobs[1:].tolist()]
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt.tolist(),
        samples=[_sample_output(sequence, tokenizer) for sequence in request.sequences],
        num_cached_tokens=first.reported_cached_tokens,
        prompt_logprobs=scores,
        prompt_top_logprobs=None if found is None or found.wanted else found.top_logprobs,
        events=list(request.shared.events),
        adapter=None if request.adapter is None else request.adapter.public_name,
        adapter_version=None if request.adapter is None else request.adapter.version,
    )


def _sample_output(sequence: Sequence, tokenizer: Tokenizer | None) -> SampleOutput:
    count = sequence.num_new_tokens
    token_ids = sequence.output_ids.tolist()
    if sequence.ending.reason is None:
        raise RuntimeError(f"sample {sequence.sample_index} is not finished")
    return SampleOutput(
        index=sequence.sample_index,
        token_ids=token_ids,
        logprobs=sequence.sampled.logprobs[:count].tolist(),
        raw_logprobs=sequence.sampled.raw_logprobs[:count].tolist(),
        top_logprobs=sequence.sampled.top_logprobs,
        weight_versions=sequence.weight_spans,
        context_versions=sequence.context_spans,
        kv_versions=sequence.kv_spans,
        finish_reason=sequence.ending.reason,
        stop_reason=sequence.ending.stop_reason,
        text=_text(sequence, token_ids, tokenizer),
        num_cached_tokens=sequence.reported_cached_tokens,
        routed_experts=sequence.ending.routed_experts,
    )


def new_tokens(sequence: Sequence, seen: int) -> StreamChunk:
    """Return the tokens behind the first `seen`; `finished` is read first, so a last chunk lacks none."""
    finished = sequence.finished
    count = sequence.num_new_tokens
    start = sequence.num_prompt_tokens
    return StreamChunk(
        sample=sequence.sample_index,
        token_ids=sequence.token_ids[start + seen : start + count].tolist(),
        logprobs=sequence.sampled.logprobs[seen:count].tolist(),
        finished=finished,
        finish_reason=sequence.ending.reason if finished else None,
        stop_reason=sequence.ending.stop_reason if finished else None,
        weight_versions=sequence.weight_spans if finished else None,
        top_logprobs=None if sequence.sampled.top_logprobs is None else sequence.sampled.top_logprobs[seen:count],
        start=seen,
    )


def _text(sequence: Sequence, token_ids: list[int], tokenizer: Tokenizer | None) -> str | None:
    matcher = sequence.sampled.matcher
    if matcher is not None:  # of an aborted sample nobody knew that no token would follow
        return matcher.text + matcher.held_back() if sequence.ending.reason == "abort" else matcher.text
    if tokenizer is None:
        return None
    return text_of(tokenizer, token_ids[:-1] if sequence.ending.by_token else token_ids, sequence.shared.prompt)
