"""Run a rollout server of verl: an actor of Ray with a `RolloutWorker` inside.

Invariants
----------
* Requests wait on the event loop; what takes the worker's lock or waits for weights runs in a thread.
* Every result names the trainer's step whose weights sampled it.
* A worker that broke ends `watch` with the cause; so does the death of the process, for the caller that waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from samebit.rollout.async_worker import AsyncWorker
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.errors import RequestError
from samebit.rollout.integrations.verl.options import ServerOptions, check_tokenizer
from samebit.rollout.integrations.verl.server import requests
from samebit.rollout.integrations.verl.server.adapters import adapter_config
from samebit.rollout.integrations.verl.server.gate import Gate
from samebit.rollout.integrations.verl.server.images import ImageReader
from samebit.rollout.integrations.verl.server.profiling import Tracing
from samebit.rollout.integrations.verl.server.steps import StepsOfVersions
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.requests.stopping import as_token_ids, known_end_tokens
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker
from samebit.rollout.worker_interface import LocalWorker
from samebit.weight_sync import SyncReport
from samebit.weight_sync.transports.addresses import Sources

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords
    from samebit.rollout.worker_interface import UpdateKeywords

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5


class SamebitServer:
    """Serves verl's requests. It is a plain class; `SamebitReplica` makes the actor. A subclass may put another worker
    inside (`make_worker`)."""

    def __init__(self) -> None:
        self._options: ServerOptions
        self._mode: RolloutMode
        self._tracing: Tracing
        self._inside = AsyncWorker(Sources())
        self._gate = Gate()
        self._steps = StepsOfVersions()
        self._held = {0}
        self._numbers = itertools.count()
        self._busy = Busy()
        self._counted = dict.fromkeys(("syncs", "sync_seconds", "sync_bytes", "released_bytes"), 0.0)
        self._eos: tuple[int, ...]
        self._images: ImageReader | None = None

    async def load(self, options: ServerOptions, mode: RolloutMode) -> None:
        """Build the worker. Apart from `__init__` so that its errors reach the caller as they are."""
        self._options = options
        self._mode = mode
        self._tracing = Tracing(options.traces, options.name)
        await self._inside.build(self._build)

    def _build(self) -> LocalWorker:
        folder, words = copy_to_local(self._options.model), copy_to_local(self._options.tokenizer)
        check_tokenizer(words)
        tokenizer = AutoTokenizer.from_pretrained(words, trust_remote_code=False)
        self._images = ImageReader.of(words) if self._options.worker.images else None
        worker = self.make_worker(folder, self._options, tokenizer)
        named = as_token_ids(tokenizer.eos_token_id)
        self._eos = known_end_tokens(named, worker.limits.vocab_size, "the tokenizer's eos_token_id")
        if self._options.routed_experts and not worker.limits.has_experts:
            worker.close()
            raise ValueError(f"rollout.custom.routed_experts=True, but {folder} has no routed experts")
        return worker

    def make_worker(self, folder: str, options: ServerOptions, tokenizer: PreTrainedTokenizerBase) -> LocalWorker:
        """Return the worker that answers the requests."""
        return RolloutWorker(folder, config=options.worker_config(), tokenizer=tokenizer)

    @property
    def _worker(self) -> LocalWorker:
        return self._inside.worker

    # -- requests ----------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample a continuation: token ids in, token ids and log-probabilities out. image_data: PIL's, in the order of
        their placeholders, which verl's agent loop has put into the prompt, one a token of an image."""
        requests.check_media(self._images is not None, image_data, mm_processor_kwargs, video_data, audio_data)
        if priority:
            raise RequestError(f"samebit serves requests in their order: priority must be 0, got {priority}")
        ids = list(prompt_ids)
        number = next(self._numbers)
        params = self._params(sampling_params, len(ids), number)
        prompt: GivenPrompt = ids
        if self._images is not None and image_data:
            prompt = await self._images.prompt(ids, image_data, mm_processor_kwargs)
        name = f"{request_id}-{number}"
        prepared = await self._inside.prepare(params)  # and held while the gate is closed
        if not await self._gate.enter(name):
            return TokenOutput(**requests.turned_away(self._steps.newest))
        try:
            with self._busy:
                handle = self._worker.submit(prompt, params, name)
                del prepared
                output = await handle.result_async()
        finally:
            self._gate.leave(name)
        if requests.begins_again(output, params):
            return TokenOutput(**requests.turned_away(self._steps.newest))
        wanted = bool(sampling_params.get("logprobs"))
        return TokenOutput(**requests.finished(output, with_logprobs=wanted, steps=self._steps))

    def _params(self, asked: dict[str, Any], num_prompt_tokens: int, number: int) -> SamplingParams:
        """Return how the request of this number is sampled."""
        params = requests.sampling_params(
            asked,
            num_prompt_tokens,
            self._options,
            room=self._worker.limits.max_model_len - num_prompt_tokens,
            eos=self._eos,
            seed=requests.seed_of_resumed(self._steps.began, self._options.worker.seed, number),
        )
        return params if self._images is None else params.ruling_out(self._images.never)

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have, and let none in until `resume_generation`."""
        aborted = await self._gate.close(reject=reject_request, abort=self._worker.abort)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def resume_generation(self) -> None:
        self._gate.open()

    # -- weights -----------------------------------------------------------------------------------

    async def receive_weights(self, source: object = None, **options: Unpack[UpdateKeywords]) -> SyncReport:
        """Take weights as `RolloutWorker.receive_weights`; `source` names a link."""
        return await self._counting(self._inside.receive_weights(source, **options))

    async def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport:
        """Take the adapter that is trained, as `RolloutWorker.load_adapter`; `source` names a link. The trainer's
        options say which layers it changes."""
        if name not in self._worker.adapters and self._options.adapter is not None:
            options["config"] = adapter_config(self._options.adapter)
        return await self._counting(self._inside.load_adapter(name, source, **options))

    async def _counting(self, update: Awaitable[SyncReport]) -> SyncReport:
        began = time.monotonic()
        report = await update
        if report.changed_tensors:
            self._held = set()
        self._counted["sync_seconds"] += time.monotonic() - began
        self._counted["sync_bytes"] += report.sent_bytes
        self._counted["syncs"] += 1
        return report

    async def set_global_steps(self, version: int, global_steps: int) -> None:
        """Note that the weights of this version, which it has now, are those of that step of the trainer. The version
        is that of the adapter, where one is trained."""
        self._steps.note(version, global_steps)
        self._held.add(global_steps)

    async def steps_of_weights(self) -> set[int]:
        """Return the steps of the trainer whose weights are, bit for bit, the ones it has."""
        return set(self._held)

    # -- memory ------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Release the weights, which the next update brings again unless it is one of an adapter, and the KV cache."""
        if not self._options.frees_memory or self._mode == RolloutMode.STANDALONE:
            return
        level = 2 if self._mode == RolloutMode.HYBRID and self._options.adapter is None else 1
        await self._release(TAGS, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode != RolloutMode.STANDALONE:
            await self._inside.wake_up(tags)

    async def clear_kv_cache(self) -> None:
        await self._inside.reset_prefix_cache()

    async def release_kv_cache(self) -> None:
        if self._options.frees_memory:
            await self._release("kv_cache")

    async def resume_kv_cache(self) -> None:
        if self._options.frees_memory:
            await self._inside.wake_up("kv_cache")

    async def _release(self, tags: str | tuple[str, ...], level: int = 1) -> None:
        before = self._held_bytes()
        await self._inside.sleep(tags, level)
        self._counted["released_bytes"] += max(0, before - self._held_bytes())

    def _held_bytes(self) -> int:
        """Return the memory that the process holds: of the GPU where it computes on one."""
        return torch.cuda.memory_reserved() if self._options.device == "cuda" else _resident_bytes()

    # -- state -------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """Return the worker's counters; how long requests ran, and weights came, in seconds; bytes that came and that
        the process gave back to the system."""
        return {**self._worker.stats(), **self._counted, "generation_seconds": self._busy.seconds}

    async def check_usable(self) -> None:
        """Raise what broke the worker."""
        self._worker.check_usable()

    async def watch(self) -> None:
        """Raise what broke the worker; never return."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.check_usable()

    async def close(self) -> None:
        """Stop the worker; the process stays until the actor is ended."""
        await self._inside.close()

    async def start_profile(self, **labels: Any) -> None:
        """Begin a trace, if `rollout.profiler` asks for one of this server. labels: verl's name of what is profiled."""
        self._tracing.start()

    async def stop_profile(self) -> None:
        path = self._tracing.stop()
        if path is not None:
            logger.info("trace of %s: %s", self._options.name, path)


def _resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Busy:
    """Counts the seconds during which there was at least one request. A context manager for one of them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0
        self._began = 0.0

    def __enter__(self) -> None:
        if self._inside == 0:
            self._began = time.monotonic()
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if self._inside == 0:
            self.seconds += time.monotonic() - self._began
