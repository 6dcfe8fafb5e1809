"""Hold what all handlers share, and run a request of HTTP as requests of the worker.

Invariants
----------
* A client that goes away, a deadline and an error abort what they leave running.
* A request is inside the queue's bound from before it is submitted until its last byte is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from transformers import PreTrainedTokenizerBase

from samebit.kernels.layout.lora.adapters import BASE
from samebit.rollout.errors import RequestError, RequestIdInUseError
from samebit.rollout.integrations.http.admission import Admission
from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.metrics.requests import RequestMetrics
from samebit.rollout.integrations.http.openai.requests import LONGEST_ID
from samebit.rollout.integrations.http.openai.sessions import Sessions
from samebit.rollout.integrations.http.served import ServedHandle, ServedWorker, replicas_of, submitted
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.integrations.http.step_hub import StallWatch, StepHub
from samebit.rollout.integrations.http.versions import Versions
from samebit.rollout.outputs import RequestOutput, StreamChunk
from samebit.rollout.sampling_params import SamplingParams

if TYPE_CHECKING:
    from samebit.rollout.integrations.http.tracing import Tracing

logger = logging.getLogger(__name__)
T = TypeVar("T")


def session_of(request: Request) -> str | None:
    """Return the name that the client has given its conversation, if any.

    Raises:
        ApiError: it is too long to be kept.
    """
    name = request.headers.get("x-session-id") or None
    if name is not None and len(name) > LONGEST_ID:
        raise ApiError(
            400, f"X-Session-ID may have at most {LONGEST_ID} characters, got {len(name)}", param="X-Session-ID"
        )
    return name


@dataclass(frozen=True)
class Prompt:
    """Holds one prompt: its token ids, and its text where it came as text."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Says what to run: prompts with the same parameters, under one id.

    The worker knows the first prompt by that id, others by the id and their number. session: the conversation, which a
    fleet keeps on one replica. shared: requests at the same time may have this id, and the worker then knows the later
    ones by one of their own. began: when its seconds began to count. prepared: what keeps it from waiting where it is
    submitted.
    """

    id: str
    prompts: list[Prompt]
    params: SamplingParams
    session: str | None = None
    shared: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.monotonic)
    prepared: object = None

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n

    def alternatives(self, max_model_len: int) -> int:
        """Return how many alternatives the answer may have, to the tokens of the prompts and to those of samples."""
        new, before = self.params.logprobs or 0, self.params.prompt_logprobs or 0
        most = self.params.max_tokens
        count = 0
        for prompt in self.prompts:
            size = len(prompt.token_ids)
            count += size * before + self.params.n * (max(0, max_model_len - size) if most is None else most) * new
        return count


def asked_by(
    request: Request, request_id: str | None, prompts: list[Prompt], params: SamplingParams, prefix: str = ""
) -> Asked:
    """Return what a request of HTTP asks for. Its id is that of the body, of the header X-Request-Id, or a new one.

    A proxy gives the header to every request of one task, and again to one that it sends again, so it is shared.

    Raises:
        ApiError: the header is too long.
    """
    header = request.headers.get("x-request-id") or None
    shared = request_id is None and header is not None
    name = request_id or header or uuid.uuid4().hex
    if len(name) > LONGEST_ID:
        raise ApiError(
            400, f"X-Request-Id may have at most {LONGEST_ID} characters, got {len(name)}", param="X-Request-Id"
        )
    return Asked(id=f"{prefix}{name}", prompts=prompts, params=params, session=session_of(request), shared=shared)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Describes the model to clients. adapter_folders: where adapters came from, by their names. created: when it was
    loaded."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    chat_template: str | None
    adapter_folders: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))


class Service:
    """Holds a worker, or a fleet, and what stands between it and HTTP."""

    def __init__(
        self,
        worker: ServedWorker,
        settings: ServeSettings,
        name: str,
        tokenizer: PreTrainedTokenizerBase | None,
        tracing: Tracing | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.worker = worker
        self.settings = settings
        self.model = ServedModel(name=name, tokenizer=tokenizer, chat_template=chat_template)
        self.tracing = tracing
        self.sessions = Sessions(settings.max_sessions)
        self.versions = Versions()
        self.admission = Admission(worker.config.max_num_seqs * replicas_of(worker), settings.max_waiting)
        self.stalls = StallWatch(settings.stall_seconds)
        self.metrics = RequestMetrics(name, worker.limits.max_model_len)
        self.running: dict[str, list[ServedHandle]] = {}
        self._hub = StepHub()
        self._logged: set[str] = set()
        worker.after_steps(self._hub.stepped)

    @property
    def adapters(self) -> list[str]:
        """Return the adapters that a request may name as its model."""
        return [name for name in self.worker.adapters if name != BASE]

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's model names; None for the model that is served.

        Raises:
            ApiError: 404, for a model that is not served.
        """
        if model is None or model == self.model.name:
            return None
        adapters = self.adapters
        if model not in adapters:
            there = ", ".join(map(repr, (self.model.name, *adapters)))
            raise ApiError(
                404, f"there is no model {model!r} here; there is {there}", param="model", code="model_not_found"
            )
        return model

    def trouble(self) -> str | None:
        """Say why a request would not be answered now; None if it would."""
        return "generation is paused" if self.worker.paused else self.worker.trouble()

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that may end a sample with these parameters."""
        return frozenset(params.stop_ids if params.ignore_eos else (*params.stop_ids, *self.worker.eos_token_ids))

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises `ApiError` where the model's folder has none."""
        if self.model.tokenizer is None:
            raise ApiError(400, "the model's folder has no tokenizer: pass token ids, and no stop strings")
        return self.model.tokenizer

    def log_once(self, line: str) -> None:
        """Write a line of the log the first time that there is reason to."""
        if line not in self._logged:
            self._logged.add(line)
            logger.info("%s", line)

    async def prepare(self, asked: Asked, request: Request) -> Asked:
        """Do what takes long before a request can be submitted, beside the event loop, unless the client goes away
        first; return the request with what was prepared."""
        if asked.params.structured_outputs is None:
            return asked
        work = self.admission.prepare(self.worker, asked.params, asked.samples)
        return replace(asked, prepared=await self.while_there(request, self._in_time(asked, work)))

    @contextmanager
    def submitted(self, asked: Asked) -> Iterator[list[ServedHandle]]:
        """Run requests for the length of the block; what has not ended at its end is aborted."""
        self._check_alternatives(asked)
        if asked.id in self.running and not asked.shared:
            raise ApiError(409, f"a request with the id {asked.id!r} is running", param="request_id")
        handles: list[ServedHandle] = []
        given_up: set[str] = set()
        traced = nullcontext() if self.tracing is None else self.tracing.requests(asked.params, handles, given_up)
        counted = self.metrics.counted(asked.params, len(asked.prompts))
        with self.admission.enter(asked.samples), traced, counted as seen:
            running = self.running.setdefault(asked.id, [])
            try:
                for index, prompt in enumerate(asked.prompts):
                    name = f"{asked.id}-{index}" if index else asked.id
                    handles.append(self._submit(prompt, asked, name, index))
                    running.append(handles[-1])
                yield handles
            finally:
                self._leave(asked.id, handles)
                given_up.update(handle.request_id for handle in handles if not handle.done)
                if given_up:
                    self.worker.abort(given_up)
                seen.ended(handles, given_up)

    def _check_alternatives(self, asked: Asked) -> None:
        count, most = asked.alternatives(self.worker.limits.max_model_len), self.settings.max_alternatives
        if count > most:
            raise ApiError(
                400,
                f"the answer may have {count} alternatives (prompts, samples, tokens and logprobs multiplied), and at "
                f"most {most} are allowed here: ask for fewer, give a smaller max_tokens, or make several requests",
                param="logprobs",
            )

    def _leave(self, name: str, handles: Sequence[ServedHandle]) -> None:
        """Forget what ran under an id; others may run under it still."""
        running = self.running[name]
        running[:] = [handle for handle in running if handle not in handles]
        if not running:
            del self.running[name]

    def _submit(self, prompt: Prompt, asked: Asked, name: str, index: int) -> ServedHandle:
        try:
            return submitted(self.worker, prompt.token_ids, asked.params, name, asked.session)
        except RequestIdInUseError as error:  # one that was aborted is not in `running`, and ends with its step
            if asked.shared:
                return self._submit(prompt, asked, f"{name}-{uuid.uuid4().hex}", index)
            raise ApiError(
                409, f"a request with the id {name!r} has not ended yet; try again", param="request_id"
            ) from error
        except RequestError as error:
            where = f"prompt {index}: " if len(asked.prompts) > 1 else ""
            raise ApiError(400, f"{where}{error}") from error

    async def outputs(self, asked: Asked, request: Request) -> list[RequestOutput]:
        """Run to the end, unless the client goes away first."""
        with self.submitted(asked) as handles:
            return await self.while_there(request, self._in_time(asked, _all(handles)))

    async def _in_time(self, asked: Asked, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(work, self.seconds_left(asked))
        except asyncio.TimeoutError as error:
            raise self.too_late() from error

    def seconds_left(self, asked: Asked) -> float | None:
        """Return how long a request may take from now on; None where nothing ends it."""
        most = self.settings.request_seconds
        return None if most is None else max(0.0, asked.began + most - time.monotonic())

    def too_late(self) -> ApiError:
        """Return the error of a request that ran longer than it may."""
        return ApiError(
            504,
            f"the request was ended after {self.settings.request_seconds} s",
            code="deadline",
            headers={"x-should-retry": "false"},
        )

    async def chunks(self, handles: Sequence[ServedHandle]) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yield new tokens of all these requests as they come, each with the number of its request."""
        if len(handles) == 1:
            async for chunks in self._paced(handles[0]):
                for chunk in chunks:
                    yield 0, chunk
            return
        queue: asyncio.Queue[tuple[int, StreamChunk] | Exception | None] = asyncio.Queue()

        async def follow(index: int, handle: ServedHandle) -> None:
            try:
                async for chunks in self._paced(handle):
                    for chunk in chunks:
                        queue.put_nowait((index, chunk))
                queue.put_nowait(None)
            except Exception as error:  # boundary: the reader of the queue raises it
                queue.put_nowait(error)

        tasks = [asyncio.create_task(follow(index, handle)) for index, handle in enumerate(handles)]
        try:
            left = len(tasks)
            while left:
                entry = await queue.get()
                if isinstance(entry, Exception):
                    raise entry
                if entry is None:
                    left -= 1
                else:
                    yield entry
        finally:
            for task in tasks:
                task.cancel()

    async def _paced(self, handle: ServedHandle) -> AsyncIterator[list[StreamChunk]]:
        """Yield new tokens of one request, and observe the time between them."""
        last: float | None = None
        async for chunks in self._hub.chunks(handle):
            now = time.monotonic()
            if last is not None:
                self.metrics.between_tokens((now - last) / max(1, len(chunks[0].token_ids)))
            last = now
            yield chunks
        await handle.result_async()  # its last tokens may be read before it has ended

    async def while_there(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, and cancel it when the client goes away."""
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ApiError(499, "the client has gone away")
            return doing.result()
        finally:
            for task in (doing, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _all(handles: Sequence[ServedHandle]) -> list[RequestOutput]:
    return [await handle.result_async() for handle in handles]


async def _left(request: Request) -> None:
    """Return when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
