"""Answer /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from samebit.rollout.errors import RequestError
from samebit.rollout.integrations.http.errors import ApiError, JsonAnswer, written
from samebit.rollout.integrations.http.event_stream import DONE, EventStream, event
from samebit.rollout.integrations.http.openai import logprobs
from samebit.rollout.integrations.http.openai.answers import num_tokens, usage
from samebit.rollout.integrations.http.openai.forced_calls import forced_calls
from samebit.rollout.integrations.http.openai.logprobs import TokenTexts
from samebit.rollout.integrations.http.openai.prompts import apart, chat_text, described, heard, token_ids
from samebit.rollout.integrations.http.openai.requests import ChatRequest, Message, ToolCall
from samebit.rollout.integrations.http.openai.sample_text import SampleText, whole_text
from samebit.rollout.integrations.http.openai.sampling import of_chat
from samebit.rollout.integrations.http.openai.sessions import Conversation
from samebit.rollout.integrations.http.openai.tools import Parsed, Reading, ToolParser, reading
from samebit.rollout.integrations.http.service import Asked, Prompt, Service, asked_by, session_of
from samebit.rollout.outputs import RequestOutput, SampleOutput, StreamChunk


async def chat(service: Service, asked: ChatRequest, request: Request) -> Response:
    """Run a chat completion: an answer, or the stream of one."""
    adapter = service.adapter_of(asked.model)
    service.need_tokenizer()
    asked = asked.model_copy(update={"messages": heard(service, asked)})
    params = of_chat(asked, service.settings, adapter)
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options goes with stream=true", param="stream_options")
    if asked.tools and asked.tool_choice in (None, "auto") and service.settings.tool_call_parser is None:
        raise ApiError(
            400,
            "tools need a server that reads tool calls (--tool-call-parser), or a tool_choice: 'none', 'required', or "
            "a named function",
            param="tools",
        )
    session = session_of(request)
    prompt = Prompt(await _prompt_ids(service, asked, session))
    job = asked_by(request, asked.request_id, [prompt], params, prefix="chatcmpl-")
    job = await _prepare(service, asked, job, request)
    read_by = await apart(lambda: _reading(service, asked, prompt.token_ids), len(prompt.token_ids))
    answering = _Chat(service, asked, job, session, read_by)
    if asked.stream:
        return EventStream(answering.events(), service.stalls, service.seconds_left(job), service.too_late)
    return JsonAnswer(await answering.whole((await service.outputs(job, request))[0]))


async def _prepare(service: Service, asked: ChatRequest, job: Asked, request: Request) -> Asked:
    try:
        return await service.prepare(job, request)
    except RequestError as error:
        forced = forced_calls(asked)
        if forced is None:
            raise
        raise ApiError(400, f"{forced} can not be honoured: {error}", param="tools") from error


async def _prompt_ids(service: Service, asked: ChatRequest, session: str | None) -> list[int]:
    async def encode(text: str) -> list[int]:
        return await token_ids(service, text, special=False)

    async def render(messages: list[Message]) -> str:
        return await chat_text(service, asked, messages)

    if session is None:
        return await encode(await render(asked.messages))
    return await service.sessions.prompt(session, _conversation(asked), render, encode)


def _reading(service: Service, asked: ChatRequest, prompt_ids: list[int]) -> Reading | None:
    forced = forced_calls(asked)
    if forced is not None:
        return forced.reading()
    name = service.settings.tool_call_parser
    if name is None or not asked.tools or asked.tool_choice == "none":
        return None
    return reading(name, service.need_tokenizer(), prompt_ids, described(asked.tools))


def _conversation(asked: ChatRequest) -> Conversation:
    beside = asked.model_dump_json(include={"tools", "chat_template_kwargs"}, exclude_defaults=True)
    return Conversation(asked.messages, beside, asked.continue_final_message)


class _Chat:
    """Writes the answer of one request."""

    def __init__(
        self, service: Service, asked: ChatRequest, job: Asked, session: str | None, read_by: Reading | None
    ) -> None:
        self._service = service
        self._asked = asked
        self._job = job
        self._session = session
        self._tokenizer = service.need_tokenizer()
        self._texts = TokenTexts(self._tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._reading = read_by

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._asked.model or self._service.model.name
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": model}

    async def whole(self, output: RequestOutput) -> bytes:
        """Return the answer, as JSON."""
        answer = self._head("chat.completion")
        size = num_tokens([output], self._job.params)
        read = await apart(lambda: [self._parsed(output, sample) for sample in output.samples], size)
        for sample, parsed in zip(output.samples, read, strict=True):
            self._note(output, sample, parsed)
        answer["choices"] = map(self._choice, output.samples, read)
        answer["usage"] = usage([output])
        if self._asked.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return await apart(lambda: written(answer), size)

    def _parsed(self, output: RequestOutput, sample: SampleOutput) -> Parsed:
        """Return what a sample says."""
        if self._reading is None:
            return Parsed(whole_text(self._tokenizer, sample, output.prompt_token_ids))
        return self._reading.read(sample, self._tokenizer, output.prompt_token_ids)

    def _choice(self, sample: SampleOutput, parsed: Parsed) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.calls:
            message["tool_calls"] = parsed.calls
            message["content"] = parsed.content or None
        if parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": None,
            "finish_reason": parsed.finish_reason(sample.finish_reason),
            "stop_reason": sample.stop_reason,
        }
        if self._asked.logprobs:
            choice["logprobs"] = logprobs.of_chat(
                self._texts, sample.token_ids, sample.logprobs, sample.top_logprobs, self._asked.top_logprobs or 0
            )
        if self._asked.return_token_ids:
            choice["token_ids"] = sample.token_ids
            choice["weight_versions"] = self._service.versions.spans(sample.weight_versions)
        return choice

    def _note(self, output: RequestOutput, sample: SampleOutput, parsed: Parsed) -> None:
        """Keep the ids of the turn for the next one of its session."""
        if self._session is not None and sample.finish_reason != "abort":
            calls = [ToolCall.model_validate(call) for call in parsed.calls] or None
            answer = Message(role="assistant", content=parsed.content, tool_calls=calls)
            ids = output.prompt_token_ids + sample.token_ids
            ended = sample.finish_reason != "length"
            self._service.sessions.note(self._session, _conversation(self._asked), answer, ids, ended=ended)

    # -- streamed --------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream; the request runs for as long as they are read."""
        service, job = self._service, self._job
        messages = [self._message() for _ in range(job.params.n)]
        head = self._head("chat.completion.chunk")
        every = bool(self._asked.return_token_ids or self._asked.logprobs)
        first: dict[str, Any] = {"prompt_token_ids": job.prompts[0].token_ids} if self._asked.return_token_ids else {}
        with service.submitted(job) as handles:
            async for _, chunk in service.chunks(handles):
                message = messages[chunk.sample]
                delta = message.delta(chunk)
                if delta or chunk.finished or every:
                    yield event({**head, "choices": [self._piece(chunk, delta, message)], **first})
                    first = {}
            output = await handles[0].result_async()
        for sample, message in zip(output.samples, messages, strict=True):
            self._note(output, sample, message.whole)
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage([output])})
        yield DONE

    def _message(self) -> _GrowingMessage:
        params, reads = self._job.params, self._reading
        tokenizer = self._tokenizer if reads is None else reads.tokenizer or self._tokenizer
        prompt = self._job.prompts[0].token_ids
        text = SampleText(tokenizer, params.stop_strings, self._service.end_ids(params), prompt)
        return _GrowingMessage(text, None if reads is None else reads.parser())

    def _piece(self, chunk: StreamChunk, delta: dict[str, Any], message: _GrowingMessage) -> dict[str, Any]:
        piece: dict[str, Any] = {
            "index": chunk.sample,
            "delta": delta,
            "logprobs": None,
            "finish_reason": message.whole.finish_reason(chunk.finish_reason),
        }
        if self._asked.logprobs:
            piece["logprobs"] = logprobs.of_chat(
                self._texts, chunk.token_ids, chunk.logprobs, chunk.top_logprobs, self._asked.top_logprobs or 0
            )
        if chunk.finished:
            piece["stop_reason"] = chunk.stop_reason
        if self._asked.return_token_ids:
            piece["token_ids"] = chunk.token_ids
            if chunk.weight_versions is not None:
                piece["weight_versions"] = self._service.versions.spans(chunk.weight_versions)
        return piece


class _GrowingMessage:
    """Makes the deltas of one sample's message, and keeps the whole."""

    def __init__(self, text: SampleText, parser: ToolParser | None) -> None:
        self.whole = Parsed()
        self._text = text
        self._parser = parser
        self._began = False

    def delta(self, chunk: StreamChunk) -> dict[str, Any]:
        """Take new tokens; return what they add to the message."""
        parsed = self._parsed(chunk)
        delta: dict[str, Any] = {}
        if not self._began:
            self._began = True
            delta["role"] = "assistant"
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.reasoning is not None:
            delta["reasoning_content"] = parsed.reasoning
        first = len(self.whole.calls)
        calls = [{"index": first + place, **call} for place, call in enumerate(parsed.calls)]
        if parsed.arguments:
            calls.insert(0, {"index": first - 1, "function": {"arguments": parsed.arguments}})
        if calls:
            delta["tool_calls"] = calls
        self.whole = self.whole.then(parsed)
        return delta

    def _parsed(self, chunk: StreamChunk) -> Parsed:
        piece = self._text.push(chunk)
        if self._parser is None:
            return Parsed(piece)
        found = self._parser.push(piece)
        return found.then(self._parser.finish(self._text.ended_by)) if chunk.finished else found
