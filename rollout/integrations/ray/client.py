"""Call a worker in an actor: the face of `RolloutWorker`, and where its process starts.

Invariants
----------
* Every call ends with a result, with the error that the worker raised, or with `WorkerLostError` once the
  actor's process has died; so does a `receive_weights` that is sending.
* What is submitted is queued in that order, and commands (`pause`, `sleep`, updates, ...) find it queued.
* The process has its OpenMP environment before it loads torch.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from torch import Tensor, nn

from samebit.kernels.openmp import process_environment
from samebit.rollout.adapters.loading import AdapterOptions
from samebit.rollout.checks import check_one_of
from samebit.rollout.config import DEVICES, RolloutConfig
from samebit.rollout.control.intake import as_request_ids, paired
from samebit.rollout.control.sleep import check_tags
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.errors import WorkerLostError
from samebit.rollout.integrations.ray.actor import Health, RolloutActor
from samebit.rollout.integrations.ray.calls import wait_for
from samebit.rollout.integrations.ray.handle import RayCall, RayRequestHandle
from samebit.rollout.integrations.ray.order import Submissions
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker_interface import UpdateOptions, checked_state_dict
from samebit.weight_sync import (
    CudaIpcSender,
    SharedMemorySender,
    SyncBrokenError,
    SyncRefusedError,
    SyncReport,
    WeightStream,
)
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.transports.addresses import CudaIpcAt, SharedMemoryAt
from samebit.weight_sync.wire.link import DEFAULT_TIMEOUT
from samebit.weight_sync.wire.stream import gone_through

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords
    from samebit.rollout.worker_interface import UpdateKeywords

HEALTH_TIMEOUT = 2.0
MOST_CALLS = 1_000_000
"""The most calls that wait in an actor at once; they wait without a thread. More than anyone submits: at the limit also
`resume` waits, and an actor that is paused never gets below it. (Groups of calls with limits of their own would not do:
Ray gives each a loop in another thread, and an `abort` could overtake its request.)"""


def start_actor(actor_class: type, *, num_cpus: int = 1, num_threads: int | None = None, **options: Any) -> Any:
    """Start an actor of this class, whose process computes with `num_threads` (`num_cpus` if None) threads.

    options: Ray's own, as in `.options()`: `name`, `scheduling_strategy`, ...; variables of its `runtime_env` win.
    """
    environment = process_environment(num_cpus if num_threads is None else num_threads)
    runtime: dict[str, Any] = dict(options.pop("runtime_env", None) or {})
    runtime["env_vars"] = {**environment, **runtime.get("env_vars", {})}
    return ray.remote(actor_class).options(num_cpus=num_cpus, runtime_env=runtime, **options).remote()


class RayWorker(Closing):
    """Calls a rollout worker in an actor like a `RolloutWorker`. `actor`: a handle of a `RolloutActor`.

    sync_timeout: how long a weight update waits for the other side while no weights move, in seconds. device: "cuda"
    where the actor and the modules that it gets weights of are on one GPU: they then go through its memory.
    """

    def __init__(self, actor: Any, *, sync_timeout: float = DEFAULT_TIMEOUT, device: str = "cpu") -> None:
        check_one_of("device", device, DEVICES)
        self.actor = actor
        self._sync_timeout = sync_timeout
        self._device = device
        self._sending = threading.Lock()
        self._sender: SharedMemorySender | CudaIpcSender | None = None
        self._submissions = Submissions()
        self._handles: weakref.WeakValueDictionary[str, RayRequestHandle] = weakref.WeakValueDictionary()

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        config: RolloutConfig | None = None,
        num_cpus: int = 1,
        sync_timeout: float = DEFAULT_TIMEOUT,
        device: str = "cpu",
        **options: Any,
    ) -> RayWorker:
        """Start an actor and load a model folder there. Ray must be running (`ray.init`).

        num_cpus: cores that Ray reserves, and threads that the worker computes with unless its config says. device: see
        the class. options: see `start_actor`; `max_concurrency` has to be above the number of requests in flight, for
        `resume` and the like are calls too. Raises what building a `RolloutWorker` raises.
        """
        check_one_of("device", device, DEVICES)
        num_threads = None if config is None else config.num_threads
        options.setdefault("max_concurrency", MOST_CALLS)
        actor = start_actor(RolloutActor, num_cpus=num_cpus, num_threads=num_threads, **options)
        worker = cls(actor, sync_timeout=sync_timeout, device=device)
        try:
            wait_for(worker.actor.load.remote(str(model), config))
        except BaseException:
            ray.kill(worker.actor)
            raise
        return worker

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Sample from each prompt and wait; an interrupt (Ctrl-C) of the wait aborts its requests."""
        call = self._generate(prompts, params)
        try:
            return call.result()
        except BaseException:
            call.leave()
            raise

    async def generate_async(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Do as `generate` for asyncio; cancelling it aborts its requests."""
        return await self._generate(prompts, params).result_async()

    def submit(
        self, prompt: GivenPrompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> RayRequestHandle:
        """Queue one prompt, after those that were submitted here before. What is wrong with it is raised by the
        handle's `result`.
        """
        ticket = uuid.uuid4().hex
        name = f"request-{ticket}" if request_id is None else request_id
        run = self.actor.run_in_turn
        reference = self._submissions.send(lambda place: run.remote(place, prompt, params, name, ticket))
        handle = RayRequestHandle(self.actor, name, ticket, reference)
        if isinstance(name, str):  # any other id is refused by the actor
            self._handles[name] = handle
        return handle

    def submit_all(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RayRequestHandle]:
        """Submit each prompt, in this order; a bad one does not keep the rest from being queued."""
        prompts, each, _ = paired(prompts, params)
        return [self.submit(prompt, wanted) for prompt, wanted in zip(prompts, each, strict=True)]

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End these requests with what they have; those whose handles are held here also while they are on the way."""
        ids = as_request_ids(request_ids)
        tickets = [handle.ticket for one in ids if (handle := self._handles.get(one)) is not None]
        wait_for(self.actor.abort.remote(ids, tickets))

    def _generate(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None
    ) -> RayCall[list[RequestOutput]]:
        ticket = uuid.uuid4().hex
        generate = self.actor.generate_in_turn
        reference = self._submissions.send(lambda place: generate.remote(place, prompts, params, ticket))
        return RayCall(self.actor, ticket, reference)

    def _settle(self) -> None:
        """Wait until what was submitted here is queued: Ray would let a command overtake it."""
        self._submissions.settle(lambda place: wait_for(self.actor.until_queued.remote(place)))

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        state: Health = wait_for(self.actor.health.remote())
        return state.weight_version

    def join_group(self, init_method: str, world_size: int, rank: int, backend: str = "gloo") -> None:
        """Join a group as `RolloutActor.join_group` does. Waits for the other ranks."""
        wait_for(self.actor.join_group.remote(init_method, world_size, rank, backend))

    def receive_weights(self, source: object = None, **options: Unpack[UpdateKeywords]) -> SyncReport:
        """Take new weights: from a module, a dict of tensors or a `WeightStream` in this process, which are sent
        through shared memory (the actor has to be on this machine); or from what the actor can open itself: a folder,
        `SharedMemoryAt`, `BroadcastFrom`.
        """

        def receive(opened: object) -> ray.ObjectRef[SyncReport]:
            return self.actor.receive_weights.remote(opened, **options)  # type: ignore[no-any-return]

        with gone_through(source):
            UpdateOptions.of(options)
            return self._taken(source, receive)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, cast: bool = False) -> SyncReport:
        """Take a full update from a state dict, through shared memory; `cast` as in `receive_weights`."""
        return self.receive_weights(checked_state_dict(state_dict), cast=cast)

    # -- adapters ----------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        names: list[str] = wait_for(self.actor.adapters.remote())
        return names

    def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport:
        """Take an adapter as `RolloutWorker` does. A module, a dict and a `WeightStream` of this process go through
        shared memory; the actor itself opens a folder, `SharedMemoryAt` and `BroadcastFrom`.
        """

        def load(opened: object) -> ray.ObjectRef[SyncReport]:
            return self.actor.load_adapter.remote(name, opened, **options)  # type: ignore[no-any-return]

        with gone_through(source):
            AdapterOptions(**options)
            return self._taken(source, load)

    def drop_adapter(self, name: str, *, in_flight: str = "finish") -> None:
        self._settle()
        wait_for(self.actor.drop_adapter.remote(name, in_flight=in_flight))

    # -- what travels ------------------------------------------------------------------------------

    def _taken(self, source: object, take: Callable[[object], ray.ObjectRef[SyncReport]]) -> SyncReport:
        """Let the actor take from a source, or from the link over which a source of this process is sent."""
        self._settle()
        if isinstance(source, nn.Module | Mapping):
            return self._send(WeightStream.of(source), take)
        return self._send(source, take) if isinstance(source, WeightStream) else wait_for(take(source))

    def _send(self, stream: WeightStream, take: Callable[[object], ray.ObjectRef[SyncReport]]) -> SyncReport:
        """Send in the caller's thread, since its weights may be a collective; another waits for the actor."""
        with self._sending, ThreadPoolExecutor(1) as other:
            sender = self._sender = self._sender or self._new_sender()
            on_gpu = self._device == "cuda"
            link = (CudaIpcAt if on_gpu else SharedMemoryAt)(sender.address, self._sync_timeout)
            received = other.submit(_received, sender, take(link))
            try:
                sender.send(stream)
                return received.result()
            except BaseException as error:
                self._hang_up()
                if isinstance(error, SyncBrokenError | SyncRefusedError):
                    received.result()  # why the other side ended it is the error to raise
                raise

    def _new_sender(self) -> SharedMemorySender | CudaIpcSender:
        kind = CudaIpcSender if self._device == "cuda" else SharedMemorySender
        return kind(timeout=self._sync_timeout)

    def _hang_up(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # -- memory and control ------------------------------------------------------------------------

    def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None:
        self._settle()
        wait_for(self.actor.sleep.remote(check_tags(tags), level))

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        self._settle()
        wait_for(self.actor.wake_up.remote(None if tags is None else check_tags(tags)))

    def pause(self, mode: str = "keep") -> None:
        self._settle()
        wait_for(self.actor.pause.remote(mode))

    def resume(self) -> None:
        self._settle()
        wait_for(self.actor.resume.remote())

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        self._settle()
        wait_for(self.actor.reset_prefix_cache.remote(recompute_running=recompute_running))

    def stats(self) -> dict[str, float]:
        numbers: dict[str, float] = wait_for(self.actor.stats.remote())
        return numbers

    def health(self, timeout: float = HEALTH_TIMEOUT) -> Health:
        """Tell whether the actor answers and would take requests. Raises `WorkerLostError` if it does not answer."""
        try:
            state: Health = wait_for(self.actor.health.remote(), timeout)
        except TimeoutError as error:
            raise WorkerLostError(f"the rollout worker's actor did not answer within {timeout} s") from error
        return state

    def close(self) -> None:
        """Stop the worker and end its process; pending requests fail. Closing twice is fine."""
        self._hang_up()
        with suppress(WorkerLostError):
            wait_for(self.actor.close.remote())
        ray.kill(self.actor)


def _received(sender: SharedMemorySender | CudaIpcSender, reference: ray.ObjectRef[SyncReport]) -> SyncReport:
    """Return the receiver's report. When it has failed, the sending ends."""
    try:
        return wait_for(reference)
    except BaseException:
        sender.close()
        raise
