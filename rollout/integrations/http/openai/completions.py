"""Answer /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from samebit.rollout.integrations.http.errors import ApiError, JsonAnswer, written
from samebit.rollout.integrations.http.event_stream import DONE, EventStream, event
from samebit.rollout.integrations.http.openai import logprobs
from samebit.rollout.integrations.http.openai.answers import num_tokens, usage
from samebit.rollout.integrations.http.openai.logprobs import TokenTexts
from samebit.rollout.integrations.http.openai.prompts import apart, completion_prompts, prompt_texts
from samebit.rollout.integrations.http.openai.requests import CompletionRequest
from samebit.rollout.integrations.http.openai.sample_text import SampleText, whole_text
from samebit.rollout.integrations.http.openai.sampling import of_completion
from samebit.rollout.integrations.http.service import Asked, Service, asked_by
from samebit.rollout.outputs import RequestOutput, SampleOutput, StreamChunk
from samebit.rollout.requests.request import TopLogprobs


async def complete(service: Service, asked: CompletionRequest, request: Request) -> Response:
    """Run a completion: an answer, or the stream of one."""
    params = of_completion(asked, service.settings, service.adapter_of(asked.model))
    if asked.stream and asked.echo and (asked.logprobs is not None or asked.max_tokens == 0):
        raise ApiError(400, "a scored prompt (echo with logprobs or max_tokens=0) is not streamed", param="stream")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options goes with stream=true", param="stream_options")
    prompts = await completion_prompts(service, asked)
    job = asked_by(request, asked.request_id, prompts, params, prefix="cmpl-")
    job = await service.prepare(job, request)
    answering = _Completion(service, asked, job)
    if asked.stream:
        return EventStream(answering.events(), service.stalls, service.seconds_left(job), service.too_late)
    outputs = await service.outputs(job, request)
    before = await answering.echoed()
    size = num_tokens(outputs, params)
    return JsonAnswer(await apart(lambda: written(answering.whole(outputs, before)), size))


class _Completion:
    """Writes the answer of one request."""

    def __init__(self, service: Service, asked: CompletionRequest, job: Asked) -> None:
        self._service = service
        self._asked = asked
        self._job = job
        self._texts = TokenTexts(service.model.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._job.id, "object": "text_completion", "created": self._job.created,
            "model": self._asked.model or self._service.model.name,
        }  # fmt: skip

    async def echoed(self) -> list[str]:
        """Return what stands before the samples of each prompt."""
        prompts = self._job.prompts
        return await prompt_texts(self._service, prompts) if self._asked.echo else [""] * len(prompts)

    def whole(self, outputs: list[RequestOutput], before: list[str]) -> dict[str, Any]:
        """Return the answer. before: what stands before the samples of each prompt."""
        scored = self._asked.max_tokens == 0
        choices = (
            self._choice(index * self._job.params.n + sample.index, before[index], output, sample)
            for index, output in enumerate(outputs)
            for sample in output.samples
        )
        return {**self._head(), "choices": choices, "usage": usage(outputs, sampled=not scored)}

    def _choice(self, index: int, before: str, output: RequestOutput, sample: SampleOutput) -> dict[str, Any]:
        asked, tokenizer = self._asked, self._service.model.tokenizer
        scored = asked.max_tokens == 0
        finish = "length" if scored and sample.finish_reason != "abort" else sample.finish_reason
        text = "" if scored or tokenizer is None else whole_text(tokenizer, sample, output.prompt_token_ids)
        choice: dict[str, Any] = {
            "index": index,
            "text": before + text,
            "logprobs": None if asked.logprobs is None else self._logprobs(output, sample, scored),
            "finish_reason": finish,
            "stop_reason": None if scored else sample.stop_reason,
        }
        if asked.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = [] if scored else sample.token_ids
            choice["weight_versions"] = [] if scored else self._service.versions.spans(sample.weight_versions)
        return choice

    def _logprobs(self, output: RequestOutput, sample: SampleOutput, scored: bool) -> dict[str, Any]:
        ids = [] if scored else sample.token_ids
        values: list[float | None] = [] if scored else [*sample.logprobs]
        none: TopLogprobs = [None]
        top = [] if scored else [*(sample.top_logprobs or none * len(ids))]
        if self._asked.echo and output.prompt_logprobs is not None:
            ids = output.prompt_token_ids + ids
            values = output.prompt_logprobs + values
            top = [*(output.prompt_top_logprobs or none * len(output.prompt_token_ids)), *top]
        return logprobs.of_completion(self._texts, ids, values, top)

    # -- streamed --------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream; the request runs for as long as they are read."""
        service, job, params = self._service, self._job, self._job.params
        end_ids = service.end_ids(params)
        texts: dict[int, SampleText] = {}
        offsets: dict[int, int] = {}
        with service.submitted(job) as handles:
            before = await self.echoed()
            async for number, chunk in service.chunks(handles):
                index = number * params.n + chunk.sample
                piece = ""
                if service.model.tokenizer is not None:
                    if index not in texts:
                        prompt = job.prompts[number].token_ids
                        texts[index] = SampleText(service.model.tokenizer, params.stop_strings, end_ids, prompt)
                    piece = texts[index].push(chunk)
                began = index in offsets
                if not began:
                    offsets[index] = 0
                    piece = before[number] + piece
                content = self._piece(index, piece, chunk, offsets)
                if self._asked.return_token_ids and not began:
                    content["prompt_token_ids"] = job.prompts[number].token_ids
                if piece or chunk.finished or self._asked.return_token_ids or self._asked.logprobs is not None:
                    yield event({**self._head(), "choices": [content]})
            if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
                outputs = [await handle.result_async() for handle in handles]
                yield event({**self._head(), "choices": [], "usage": usage(outputs)})
            yield DONE

    def _piece(self, index: int, text: str, chunk: StreamChunk, offsets: dict[int, int]) -> dict[str, Any]:
        scores = None
        if self._asked.logprobs is not None:
            scores = logprobs.of_completion(
                self._texts, chunk.token_ids, chunk.logprobs, chunk.top_logprobs, offsets[index]
            )
            offsets[index] += sum(map(len, scores["tokens"]))
        piece: dict[str, Any] = {"index": index, "text": text, "logprobs": scores, "finish_reason": chunk.finish_reason}
        if chunk.finished:
            piece["stop_reason"] = chunk.stop_reason
        if self._asked.return_token_ids:
            piece["token_ids"] = chunk.token_ids
            if chunk.weight_versions is not None:
                piece["weight_versions"] = self._service.versions.spans(chunk.weight_versions)
        return piece
