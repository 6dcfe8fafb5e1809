"""Answer /inference/v1/generate: token ids in, token ids and log-probabilities out.

Invariant: a log-probability is the float32 that the worker reports, at the sampling temperature; JSON carries its bits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from samebit.rollout.integrations.http.errors import ApiError, JsonAnswer, written
from samebit.rollout.integrations.http.event_stream import DONE, EventStream, event
from samebit.rollout.integrations.http.openai.answers import WeightSpan, num_tokens, usage
from samebit.rollout.integrations.http.openai.logprobs import TokenTexts, Top, ranked
from samebit.rollout.integrations.http.openai.prompts import apart
from samebit.rollout.integrations.http.openai.sample_text import SampleText, whole_text
from samebit.rollout.integrations.http.openai.sampling import check_cap, params_of
from samebit.rollout.integrations.http.rl.requests import GenerateRequest
from samebit.rollout.integrations.http.service import Asked, Prompt, Service, asked_by
from samebit.rollout.outputs import RequestOutput, SampleOutput


class Scored(BaseModel):
    """Holds a token and its log-probability. `rank` is known where it is among the alternatives that were asked for."""

    token_id: int
    logprob: float
    rank: int | None = None
    token: str | None = None


class ScoredToken(Scored):
    top_logprobs: list[Scored] = []


class ScoredTokens(BaseModel):
    content: list[ScoredToken]


class GenerateChoice(BaseModel):
    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ScoredTokens | None = None
    weight_versions: list[WeightSpan] | None = None


class GenerateAnswer(BaseModel):
    """Answers /inference/v1/generate."""

    request_id: str
    model: str
    choices: list[GenerateChoice]
    usage: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Scored] | None] | None = None
    prompt_token_ids: list[int] | None = None


async def generate(service: Service, asked: GenerateRequest, request: Request) -> Response:
    """Run a request: an answer, or the stream of one."""
    adapter = service.adapter_of(asked.model)
    asked = _with_inner(asked)
    wanted, caps = asked.sampling_params, service.settings
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options goes with stream=true", param="stream_options")
    if asked.stream and wanted.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not streamed", param="sampling_params.prompt_logprobs")
    if asked.output_mode == "text":
        service.need_tokenizer()
        if not (wanted.detokenize and wanted.skip_special_tokens and wanted.spaces_between_special_tokens):
            raise ApiError(400, "text is given without special tokens: leave detokenize and its kin at true")
        if wanted.include_stop_str_in_output:
            raise ApiError(400, "text ends before a stop string: leave include_stop_str_in_output at false")
    check_cap("logprobs", wanted.logprobs, caps.max_logprobs)
    check_cap("prompt_logprobs", wanted.prompt_logprobs, caps.max_logprobs)
    params = params_of(
        wanted,
        caps,
        max_tokens=wanted.max_tokens,
        logprobs=wanted.logprobs or None,
        prompt_logprobs=wanted.prompt_logprobs,
        cache_salt=asked.cache_salt,
        adapter=adapter,
    )
    job = asked_by(request, asked.request_id, [Prompt(asked.token_ids)], params)
    job = await service.prepare(job, request)
    answering = _Generation(service, asked, job)
    if asked.stream:
        return EventStream(answering.events(), service.stalls, service.seconds_left(job), service.too_late)
    outputs = await service.outputs(job, request)
    return JsonAnswer(await apart(lambda: written(answering.whole(outputs[0])), num_tokens(outputs, params)))


def _with_inner(asked: GenerateRequest) -> GenerateRequest:
    """Take what stands among the sampling parameters where the request itself does not say it."""
    found = {}
    for name in ("cache_salt", "return_token_ids"):
        outer, inner = vars(asked)[name], vars(asked.sampling_params)[name]
        if outer is not None and inner is not None and outer != inner:
            raise ApiError(400, f"{name} is {outer!r}, and {inner!r} in sampling_params", param=name)
        found[name] = inner if outer is None else outer
    return asked.model_copy(update=found)


class _Generation:
    """Writes the answer of one request."""

    def __init__(self, service: Service, asked: GenerateRequest, job: Asked) -> None:
        self._service = service
        self._asked = asked
        self._job = job
        self._head: dict[str, Any] = {"request_id": job.id, "model": asked.model or service.model.name}
        self._tokenizer = service.need_tokenizer() if asked.output_mode == "text" else None
        self._texts = TokenTexts(self._tokenizer)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the answer."""
        choices = (self._choice(output, sample) for sample in output.samples)
        answer = {**self._head, "choices": choices, "usage": usage([output]), "prompt_logprobs": self._prompt(output)}
        if self._asked.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _choice(self, output: RequestOutput, sample: SampleOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sample.index,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "logprobs": self._logprobs(sample.token_ids, sample.logprobs, sample.top_logprobs),
            "weight_versions": self._service.versions.spans(sample.weight_versions),
        }
        if self._tokenizer is not None:
            choice["text"] = whole_text(self._tokenizer, sample, output.prompt_token_ids)
        return choice

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Top] | None
    ) -> dict[str, Any] | None:
        count = self._asked.sampling_params.logprobs
        if count is None:
            return None
        content = []
        for index, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            best = ranked(top[index])[:count] if top is not None and count else []
            ranks = {other: rank for rank, (other, _) in enumerate(best, 1)}
            one = self._scored(token, logprob, ranks)
            content.append({**one, "top_logprobs": [self._scored(*pair, ranks) for pair in best]})
        return {"content": content}

    def _scored(self, token: int, logprob: float, ranks: dict[int, int]) -> dict[str, Any]:
        one = {"token_id": token, "logprob": logprob, "rank": ranks.get(token)}
        return one if self._tokenizer is None else {**one, "token": self._texts[token]}

    def _prompt(self, output: RequestOutput) -> list[dict[str, Any] | None] | None:
        """Return the prompt's log-probabilities as vLLM does: for each token an object by token id."""
        scores, count = output.prompt_logprobs, self._asked.sampling_params.prompt_logprobs
        if scores is None or count is None:
            return None
        found: list[dict[str, Any] | None] = []
        for index, (token, logprob) in enumerate(zip(output.prompt_token_ids, scores, strict=True)):
            if logprob is None:
                found.append(None)
                continue
            top = (output.prompt_top_logprobs or [None] * len(scores))[index] or {}
            best = ranked(top)[:count]
            ranks = {other: rank for rank, (other, _) in enumerate(best, 1)}
            found.append({str(other): self._scored(other, value, ranks) for other, value in [(token, logprob), *best]})
        return found

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream; the request runs for as long as they are read."""
        service, job = self._service, self._job
        texts = self._stream_texts()
        first: dict[str, Any] = {"prompt_token_ids": self._asked.token_ids} if self._asked.return_token_ids else {}
        with service.submitted(job) as handles:
            async for _, chunk in service.chunks(handles):
                choice: dict[str, Any] = {
                    "index": chunk.sample,
                    "token_ids": chunk.token_ids,
                    "finish_reason": chunk.finish_reason,
                    "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs),
                }
                if texts is not None:
                    choice["text"] = texts[chunk.sample].push(chunk)
                if chunk.weight_versions is not None:
                    choice["stop_reason"] = chunk.stop_reason
                    choice["weight_versions"] = service.versions.spans(chunk.weight_versions)
                yield event({**self._head, "choices": [choice], **first})
                first = {}
            if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
                yield event({**self._head, "choices": [], "usage": usage([await handles[0].result_async()])})
            yield DONE

    def _stream_texts(self) -> list[SampleText] | None:
        if self._tokenizer is None:
            return None
        params, prompt = self._job.params, self._asked.token_ids
        end_ids = self._service.end_ids(params)
        return [SampleText(self._tokenizer, params.stop_strings, end_ids, prompt) for _ in range(params.n)]
