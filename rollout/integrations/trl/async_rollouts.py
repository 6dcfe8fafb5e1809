"""Sample for TRL's AsyncGRPO in the trainer's own process: its rollout worker and its weight transfer.

TRL's loop of conversations, tools, environments and rewards (`_AsyncRolloutLoop`) runs in a thread instead of a
process, and asks a `RolloutWorker` instead of a server.

Invariants
----------
* A sample carries the version of the weights that all of its sampled tokens, and all that they attended to, were
  computed under; -1 if there were several. TRL's staleness counts from the oldest.
* While the optimizer steps, generation stands still; nothing else ever waits.
* A resumed training draws other random numbers than the steps before it did.
* A turn that a step aborts goes on from the tokens that it has: no conversation is cut in the middle.
* An error in the loop reaches the trainer by `check_health`, each time that it asks.
* What was not sampled to its end, because the training has ended, is not scored.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import TrainerCallback
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    TrainingSequence,
    _AsyncRolloutLoop,
)

from samebit.rollout.integrations.trl.sampling import fitting
from samebit.rollout.outputs import SampleOutput
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

logger = logging.getLogger(__name__)

VERSION = "samebit/weight_version"
"""Names the version of a sample's weights among its metrics; NaN where there were several."""

MIXED = -1
_STOPPING = 60.0


@dataclass
class _Conversation:
    """Holds the turns that were sampled, and whether what a tool said behind them fills the model's length."""

    turns: list[SampleOutput] = field(default_factory=list)
    is_full: bool = False


_conversation: ContextVar[_Conversation] = ContextVar("samebit_conversation")


@dataclass
class _Value:
    """Stands where TRL shares a number between processes."""

    value: float = 0.0


@dataclass
class _Errors:
    """Stands where TRL sends from process to process what ended its loop."""

    found: list[tuple[str, str, str]] = field(default_factory=list)

    def put_nowait(self, error: tuple[str, str, str]) -> None:
        self.found.append(error)


@dataclass(frozen=True)
class _Sampled:
    """Says under which weights a conversation was sampled: the oldest, and whether they were the only ones."""

    oldest: int
    alone: bool

    @classmethod
    def of(cls, turns: list[SampleOutput]) -> _Sampled:
        spans = [span for turn in turns for span in (*turn.weight_versions, *turn.context_versions)]
        versions = {version for _, _, version in spans}
        return cls(min(versions), len(versions) == 1)


class _Loop(_AsyncRolloutLoop):
    """Runs TRL's loop over a worker in this process."""

    def __init__(
        self, worker: RolloutWorker, params: SamplingParams, steps_done: Callable[[], int], **options: Any
    ) -> None:
        super().__init__(**options)
        self._worker = worker
        self._params = params
        self._seeds = random.Random(f"{worker.config.seed} {steps_done()}")
        self._sampled: dict[str, _Sampled] = {}
        self._running: set[str] = set()
        self.ahead = 0
        """Holds how far TRL's count of versions is ahead of the worker's."""

    def ask_to_stop(self) -> None:
        """Ask the loop, from another thread, to end soon, and abort the requests that it waits for."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stop_event.set()
        self._worker.abort(list(self._running))

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        loops = (self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event))
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one has failed: the other ends what it has begun
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_one(self, *given: Any, **options: Any) -> Any:
        conversation = _Conversation()
        _conversation.set(conversation)  # each is a task, with a context of its own
        result = await super()._generate_one(*given, **options)
        completion, completion_ids, sequences, *_ = result
        if conversation.is_full:
            completion.pop()
            completion_ids.pop()
            _take_back_the_end(sequences)
        for sequence in sequences if conversation.turns else ():
            self._sampled[sequence.rollout_id] = _Sampled.of(conversation.turns)
        return result

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        conversation = _conversation.get()
        room = self._worker.limits.max_model_len - len(prompt_ids)
        conversation.is_full = room < 1 and bool(conversation.turns)
        seed = self._seeds.getrandbits(63) if self._params.seed is None else self._params.seed
        params = replace(fitting(self._params, room), seed=seed)
        token_ids: list[int] = []
        logprobs: list[float] = []
        while not (conversation.is_full or self._stop_event.is_set()):
            sample = await self._sampled_from([*prompt_ids, *token_ids], _rest(params, len(token_ids)))
            if sample.token_ids:
                conversation.turns.append(sample)
            token_ids += sample.token_ids
            logprobs += sample.logprobs
            if sample.finish_reason != "abort":  # else a step has aborted it
                return token_ids, logprobs
        # Ends the conversation with a turn that is taken back; after the stop it is not scored.
        return [self.eos_token_ids[0]], [0.0]

    async def _sampled_from(self, ids: list[int], params: SamplingParams) -> SampleOutput:
        handle = self._worker.submit(ids, params)
        self._running.add(handle.request_id)
        try:
            output = await handle.result_async()
        finally:
            self._running.discard(handle.request_id)
        return output.samples[0]

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        if self._stop_event.is_set():
            return []
        samples: list[RolloutSample] = await super()._score_group(group)
        sequences = [sequence for each in group.completions_sequences for sequence in each]
        for sample, sequence in zip(samples, sequences, strict=True):
            found = self._sampled[sequence.rollout_id]
            sample.model_version = found.oldest + self.ahead
            sample.metrics[VERSION] = float(found.oldest) if found.alone else float("nan")
        for sequence in sequences:
            self._sampled.pop(sequence.rollout_id, None)
        return samples


def _rest(params: SamplingParams, sampled: int) -> SamplingParams:
    """Return the same for a turn of which so many tokens are there."""
    most = None if params.max_tokens is None else params.max_tokens - sampled
    return replace(params, max_tokens=most, min_tokens=max(0, params.min_tokens - sampled))


def _take_back_the_end(sequences: list[TrainingSequence]) -> None:
    """Remove the last token, which nobody sampled, and what no other was sampled behind: it fits the length then."""
    last = sequences[-1]
    last.completion_mask[-1] = 0
    while last.completion_mask and not last.completion_mask[-1]:
        for values in (last.input_ids, last.completion_mask, last.old_log_probs):
            del values[-1]
    if not last.completion_mask:
        sequences.pop()


class InProcessRollouts(AsyncRolloutWorker):
    """Implements TRL's `RolloutWorkerProtocol`. TRL builds its trainer around it before there is a worker: `attach`.

    A subclass of TRL's own, because its trainer keeps the place in the data set in checkpoints of that class only.
    """

    def __init__(self, maxsize: int, transfer: SharedModule) -> None:
        self._transfer = transfer
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(4096)
        self._loop_kwargs: dict[str, Any] = {"dataset_start_index": 0, "queue_maxsize": maxsize}
        self._model_version_value = _Value()
        self._heartbeat = _Value()
        self._failed = threading.Event()
        self._errors = _Errors()
        self._loop: _Loop | None = None
        self._thread: threading.Thread | None = None
        self._worker: RolloutWorker | None = None
        self._params: SamplingParams | None = None

    def attach(self, worker: RolloutWorker, params: SamplingParams, **options: Any) -> None:
        """Say who generates, and what TRL's loop is built with."""
        self._worker, self._params = worker, params
        self._loop_kwargs |= options

    @property
    def model_version(self) -> int:
        return int(self._model_version_value.value)

    def update_model_version(self, model_version: int) -> None:
        self._model_version_value.value = model_version
        if self._loop is not None and self._worker is not None:
            self._loop.ahead = model_version - self._worker.weight_version

    def start(self) -> None:
        if self._worker is None or self._params is None:
            raise RuntimeError("attach() comes before start()")
        if self._thread is not None:
            raise RuntimeError("the rollouts run already")
        self._heartbeat.value = time.time()
        self._loop = _Loop(
            self._worker,
            self._params,
            rollout_buffer=self.rollout_buffer,
            model_version_value=self._model_version_value,
            heartbeat_value=self._heartbeat,
            failed_event=self._failed,
            exception_info_queue=self._errors,
            metrics_queue=self.metrics_queue,
            **self._loop_kwargs,
        )
        self.update_model_version(self.model_version)
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="samebit-trl-rollouts", daemon=True)
        self._thread.start()

    def _run(self, loop: _Loop) -> None:
        try:
            loop.run()
        except BaseException:
            if not self._failed.is_set():
                raise
            logger.debug("the rollouts ended; check_health says why", exc_info=True)

    def check_health(self, stale_after_s: float) -> None:
        if self._failed.is_set():
            kind, message, trace = self._errors.found[0]
            raise RuntimeError(f"the rollouts failed: {kind}: {message}\n{trace}")
        age = time.time() - self._heartbeat.value
        if age > stale_after_s:
            raise RuntimeError(f"the rollouts have not moved for {age:.0f} s (heartbeat_stale_after_s={stale_after_s})")

    def stop(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._transfer.destroy()  # generation goes on, or fails, if a step has left it standing
        self._loop.ask_to_stop()
        self._thread.join(_STOPPING)
        if self._thread.is_alive():
            logger.warning("the rollouts did not end within %g s", _STOPPING)
        self._thread = None


@dataclass
class SharedModule:
    """Implements TRL's `WeightTransferProtocol` for a worker on the trainer's module: there is nothing to send.

    The weights change in the optimizer's step; that `StandStill` keeps generation out of. TRL's calls come afterwards.
    """

    worker: RolloutWorker | None = None
    in_flight: str = "keep"
    _held: ExitStack = field(default_factory=ExitStack, repr=False)

    def attach(self, worker: RolloutWorker) -> None:
        self.worker = worker

    def init_weight_transfer(self) -> None:
        """Take the weights as they are: they may be a checkpoint's."""
        self._there().receive_weights()

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def hold(self) -> None:
        """Let generation stand still until `release`."""
        self._held.enter_context(self._there().weight_update(in_flight=self.in_flight))

    def release(self) -> None:
        self._held.close()

    def destroy(self) -> None:
        """End a hold that a failed step has left: its weights are a mixture."""
        failed = RuntimeError("the optimizer's step did not end")
        self._held.__exit__(RuntimeError, failed, None)

    def _there(self) -> RolloutWorker:
        if self.worker is None:
            raise RuntimeError("attach() comes before the first call")
        return self.worker


class StandStill(TrainerCallback):
    """Holds generation while the optimizer steps."""

    def __init__(self, transfer: SharedModule) -> None:
        self._transfer = transfer

    def on_pre_optimizer_step(self, *_given: Any, **_rest: Any) -> None:
        self._transfer.hold()

    def on_optimizer_step(self, *_given: Any, **_rest: Any) -> None:
        self._transfer.release()
