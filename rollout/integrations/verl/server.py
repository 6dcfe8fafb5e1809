"""A rollout server of verl: an actor of Ray with a `RolloutWorker` inside.

Invariants
----------
* Requests wait on the event loop; what takes the worker's lock or waits for weights runs in a thread.
* Every result names the trainer's step whose weights sampled it.
* A worker that broke ends `watch` with the cause; so does the death of the process, for whoever waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
from transformers import AutoTokenizer
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, TokenOutput

from samebit.rollout.errors import RequestError
from samebit.rollout.integrations.ray.links import Sources
from samebit.rollout.integrations.verl import requests
from samebit.rollout.integrations.verl.baseline import HuggingFaceWorker
from samebit.rollout.integrations.verl.gate import Gate
from samebit.rollout.integrations.verl.options import ServerOptions, check_tokenizer
from samebit.rollout.integrations.verl.profiling import Tracing
from samebit.rollout.worker import RolloutWorker
from samebit.rollout.worker_core import TAGS
from samebit.weight_sync import SyncReport

logger = logging.getLogger(__name__)

MOST_COMMANDS = 32
WATCH_SECONDS = 0.5
T = TypeVar("T")


class SamebitServer:
    """Plain class; `SamebitReplica` makes the actor."""

    def __init__(self) -> None:
        self._options: ServerOptions
        self._mode: RolloutMode
        self._tracing: Tracing
        self._threads = ThreadPoolExecutor(MOST_COMMANDS, "samebit-command")
        self._sources = Sources()
        self._gate = Gate()
        self._steps = {0: 0}
        self._held = {0}
        self._numbers = itertools.count()
        self._busy = Busy()
        self._counted = dict.fromkeys(("syncs", "sync_seconds", "sync_bytes", "released_bytes"), 0.0)
        self._worker: RolloutWorker | HuggingFaceWorker
        self._eos: tuple[int, ...]

    async def load(self, options: ServerOptions, mode: RolloutMode) -> None:
        """Build the worker. Apart from `__init__` so that its errors reach the caller as they are."""
        self._options = options
        self._mode = mode
        self._tracing = Tracing(options.traces, options.name)
        self._worker = await self._in_thread(self._build)

    def _build(self) -> RolloutWorker | HuggingFaceWorker:
        folder, words = copy_to_local(self._options.model), copy_to_local(self._options.tokenizer)
        check_tokenizer(words)
        tokenizer = AutoTokenizer.from_pretrained(words)
        self._eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        if self._options.generate_with == "huggingface":
            return HuggingFaceWorker(folder, self._options.worker, tokenizer)
        return RolloutWorker(folder, config=self._options.worker, tokenizer=tokenizer)

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
        """Token ids in, token ids and log-probabilities out."""
        if image_data or video_data or audio_data or mm_processor_kwargs:
            raise RequestError("samebit serves text only: no images, video or audio")
        if priority:
            raise RequestError(f"samebit serves requests in their order: priority must be 0, got {priority}")
        prompt = list(prompt_ids)
        room = self._worker.limits.max_model_len - len(prompt)
        params = requests.sampling_params(sampling_params, len(prompt), self._options, room=room, eos=self._eos)
        name = f"{request_id}-{next(self._numbers)}"
        if not await self._gate.enter(name):
            return TokenOutput(**requests.turned_away(self._step))
        try:
            with self._busy:
                output = await self._worker.submit(prompt, params, name).result_async()
        finally:
            self._gate.leave(name)
        wanted = bool(sampling_params.get("logprobs"))
        return TokenOutput(**requests.finished(output, with_logprobs=wanted, steps=self._steps))

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with what they have, and let none in until `resume_generation`."""
        aborted = await self._gate.close(reject=reject_request, abort=self._worker.abort)
        return {"aborted_count": len(aborted), "request_ids": aborted}

    async def resume_generation(self) -> None:
        self._gate.open()

    # -- weights -----------------------------------------------------------------------------------

    async def receive_weights(
        self,
        source: object = None,
        *,
        version: int | None = None,
        in_flight: str = "keep",
        partial: bool = False,
        cast: bool = False,
        verify: bool = False,
    ) -> SyncReport:
        """As `RolloutWorker.receive_weights`; `source` names a link."""

        def receive() -> SyncReport:
            with self._sources.opened(source) as opened:
                return self._worker.receive_weights(
                    opened, version=version, in_flight=in_flight, partial=partial, cast=cast, verify=verify
                )

        began = time.monotonic()
        report = await self._in_thread(receive)
        if report.changed_tensors:
            self._held = set()
        self._counted["sync_seconds"] += time.monotonic() - began
        self._counted["sync_bytes"] += report.sent_bytes
        self._counted["syncs"] += 1
        return report

    async def set_global_steps(self, version: int, global_steps: int) -> None:
        """The weights of this version, which it has now, are those of that step of the trainer."""
        self._steps[version] = global_steps
        self._held.add(global_steps)

    async def steps_of_weights(self) -> set[int]:
        """The steps of the trainer whose weights are, bit for bit, the ones it has."""
        return set(self._held)

    @property
    def _step(self) -> int:
        return self._steps[max(self._steps)]

    # -- memory ------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Release the weights, which the next update brings again, and the KV cache."""
        if not self._options.frees_memory or self._mode == RolloutMode.STANDALONE:
            return
        level = 2 if self._mode == RolloutMode.HYBRID else 1
        await self._release(lambda: self._worker.sleep(TAGS, level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode != RolloutMode.STANDALONE:
            await self._in_thread(lambda: self._worker.wake_up(tags))

    async def clear_kv_cache(self) -> None:
        await self._in_thread(self._worker.reset_prefix_cache)

    async def release_kv_cache(self) -> None:
        if self._options.frees_memory:
            await self._release(lambda: self._worker.sleep("kv_cache"))

    async def resume_kv_cache(self) -> None:
        if self._options.frees_memory:
            await self._in_thread(lambda: self._worker.wake_up("kv_cache"))

    async def _release(self, sleep: Callable[[], None]) -> None:
        before = _resident_bytes()
        await self._in_thread(sleep)
        self._counted["released_bytes"] += max(0, before - _resident_bytes())

    # -- state -------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """The worker's counters; how long there were requests, and weights came, in seconds; bytes that came and that
        the process gave back to the system."""
        return {**self._worker.stats(), **self._counted, "generation_seconds": self._busy.seconds}

    async def check_usable(self) -> None:
        """Raises what broke the worker."""
        self._worker.check_usable()

    async def watch(self) -> None:
        """Never returns; raises what broke the worker."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.check_usable()

    async def close(self) -> None:
        """Stop the worker; the process stays until the actor is ended."""
        await self._in_thread(self._worker.close)
        self._sources.close()
        self._threads.shutdown()

    async def start_profile(self, **labels: Any) -> None:
        """Begin a trace, if `rollout.profiler` asks for one of this server. labels: verl's name of what is profiled."""
        self._tracing.start()

    async def stop_profile(self) -> None:
        path = self._tracing.stop()
        if path is not None:
            logger.info("trace of %s: %s", self._options.name, path)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Busy:
    """Seconds during which there was at least one request. A context manager for one of them."""

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
