"""Offer the calls that a user makes: `RolloutWorker`. What it is made of is built in `build`.

Invariants
----------
* Building either succeeds as a whole or raises before a thread exists.
* Write, version, and what happens to the requests in flight are one hold of the lock.
* An update that is refused (names, shapes, values, version) changes nothing. One that breaks off while
  writing leaves "weights incomplete": the requests in flight fail with the cause and the worker refuses
  to generate until a full update.
* Every call either acts or raises; nothing that is passed is ignored.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import nn

from samebit.rollout.adapters.loading import AdapterOptions
from samebit.rollout.build import WorkerParts, build
from samebit.rollout.checks import check_bool
from samebit.rollout.config import RolloutConfig
from samebit.rollout.control.delivery import Delivery, RequestHandle, requests_of
from samebit.rollout.control.generation_thread import GenerationThread
from samebit.rollout.control.intake import Intake, as_request_ids, paired
from samebit.rollout.control.pausing import pause
from samebit.rollout.control.shelter import Gate, Hold
from samebit.rollout.control.sleep import Sleep, check_sleep, check_tags
from samebit.rollout.control.weights.links_in_use import LinksInUse
from samebit.rollout.control.weights.transaction import (
    WeightUpdate,
    WeightUser,
    check_update_args,
    transaction,
    weight_update,
)
from samebit.rollout.control.weights.worker_weights import OpenedUpdate
from samebit.rollout.control.worker_adapters import WorkerAdapters
from samebit.rollout.control.worker_status import TAGS, WorkerStatus
from samebit.rollout.engine.engine import Engine
from samebit.rollout.errors import RequestError, WorkerStateError
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.requests.tokenizer import Tokenizer
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.stats import worker_stats
from samebit.rollout.worker_interface import UpdateOptions, checked_state_dict
from samebit.weight_sync import SyncReport, UpdateTerms
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.wire.link import ReceiverLink
from samebit.weight_sync.wire.stream import gone_through

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords
    from samebit.rollout.publishing.journal import CacheJournal, CacheSnapshot
    from samebit.rollout.worker_interface import UpdateKeywords


class RolloutWorker(Closing):
    """Generates from a model folder, or from the trainer's own module without a second copy of it.

    The log-probability it reports for each sampled token is bit for bit the one that `samebit.kernels.token_logprobs`
    computes on the same weights.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        config: RolloutConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._begin(build(model, RolloutConfig() if config is None else config, tokenizer))

    @classmethod
    def over(cls, parts: WorkerParts) -> RolloutWorker:
        """Make a worker of parts that were built elsewhere: in tests, around a runner without a model."""
        worker = cls.__new__(cls)
        worker._begin(parts)
        return worker

    def _begin(self, parts: WorkerParts) -> None:
        known: list[WeightUser] = parts.weights.users.in_order()
        for other in known:
            other.thread.check_thread()
        engine = parts.engine
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits()
        self._intake = Intake(self.limits, engine.cache, parts.adapters, parts.eos_token_ids, parts.tokenizer)
        self._engine = engine
        self._weights = parts.weights
        self._status = WorkerStatus(queue_while_asleep=parts.config.while_asleep == "wait")
        self._links = LinksInUse()
        self._thread = GenerationThread(engine, self._status, parts.threads)
        weakref.finalize(self, self._thread.request_stop)
        self._sleep = Sleep(engine, parts.weights.memory, self._status)
        self._weight_user = WeightUser(self._thread, parts.weights)
        self._adapters = WorkerAdapters(parts.adapters, self._thread, parts.weights, self._links)
        self._join(known)

    def _join(self, known: list[WeightUser]) -> None:
        """Take part in the updates of these weights; one that began before this worker was known ends first."""
        self._weights.users.join(self._weight_user)
        for other in known:
            other.thread.wait_a_turn()
        self._engine.watch.accept()
        self._weights.accept()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is neither pickled nor copied: it has a thread of this process. Build one "
            "where it is needed, or use samebit.rollout.integrations.ray.RayWorker"
        )

    @property
    def module(self) -> nn.Module:
        """Return the model that the worker generates with: the trainer's own, or the one it has loaded."""
        return self._weights.module

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a sample by themselves."""
        return self._intake.eos_token_ids

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Sample from each prompt, ids or a `PromptWithImages`, and wait; the results are in the order of the prompts.

        A bad prompt raises before anything is submitted. If a request fails, the rest of this call is
        aborted and its error is raised.
        """
        handles: list[RequestHandle] = []
        results: list[RequestOutput] = []
        try:
            self._submit(*paired(prompts, params), handles)
            results.extend(handle.result() for handle in handles)
        finally:
            if len(results) < len(handles):
                self._thread.abort(requests_of(handles))
        return results

    def submit_all(
        self,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestHandle]:
        """Queue prompts, all or none; the handles are in their order."""
        handles: list[RequestHandle] = []
        self._submit(*paired(prompts, params), handles)
        return handles

    def submit(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> RequestHandle:
        """Queue one prompt; the handle gives the result, streams, or cancels."""
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise RequestError(f"request_id must be a non-empty string or None, got {request_id!r}")
        handles: list[RequestHandle] = []
        self._submit([prompt], [SamplingParams() if params is None else params], [request_id], handles)
        return handles[0]

    def preparation(self, params: SamplingParams) -> Callable[[], object] | None:
        """Return what takes long before a request with these parameters is queued, to be called in another thread; None
        if nothing does. `submit` does it where it was not done."""
        return self._intake.preparation(params)

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End these requests with what they have so far; those that are finished already stay so."""
        self._thread.abort(as_request_ids(request_ids))

    def _submit(
        self,
        prompts: Sequence[GivenPrompt],
        params: list[SamplingParams],
        request_ids: list[str | None],
        handles: list[RequestHandle],
    ) -> None:
        """Queue prompts. `handles` is filled first, so that a caller that is interrupted can abort the requests."""
        self._thread.check_thread()
        self._status.check_accepts_requests()
        self._weights.check_module()
        make = self._intake.checked(prompts, params, request_ids)

        def hand_out(deliveries: list[Delivery]) -> None:
            handles.extend(
                RequestHandle(one, self.tokenizer, self._thread.abort, self._thread.check_thread) for one in deliveries
            )

        self._thread.submit(make, hand_out)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Return the version of the weights: each update has a higher one."""
        return self._engine.weight_version

    def receive_weights(self, source: object = None, **options: Unpack[UpdateKeywords]) -> SyncReport:
        """Take new weights, from a dict of tensors, a module, a folder of safetensors, a `WeightStream`, or the
        receiving end of a link to another process. Waits for the latter while generation goes on.

        `None` on a shared module says that the trainer has changed the parameters in place. The keywords are
        those of `UpdateOptions`: `version`, `in_flight`, `partial`, `cast`, `verify`.
        """
        with gone_through(source):
            return self._receive(source, UpdateOptions.of(options))

    def _receive(self, source: object, asked: UpdateOptions) -> SyncReport:
        if source is None:
            return self._accept_in_place(asked)
        self._thread.check_thread()
        self._status.check_usable()
        version = self.weight_version if self._status.incomplete is None else None

        def write(update: OpenedUpdate, gate: Gate) -> SyncReport:
            with transaction(self._weight_user, asked.version, asked.in_flight, gate, update) as written:
                report = self._weights.write(update, written.version, verify=asked.verify)
                written.complete = not asked.partial
            return report

        def read_and_write(gate: Gate) -> SyncReport:
            with self._weights.open(source, asked.terms, version=version) as update:
                return write(update, gate)

        if not isinstance(source, ReceiverLink):
            return self._thread.shelter(read_and_write)
        with (
            self._links.in_use(source),
            self._weights.open(source, asked.terms, version=version) as update,  # may be interrupted
        ):
            return self._thread.shelter(lambda gate: write(update, gate))

    def load_state_dict(self, state_dict: Mapping[str, object], *, cast: bool = False) -> SyncReport:
        """Take a full update from a state dict; `cast` allows other floating dtypes than the model's."""
        return self.receive_weights(checked_state_dict(state_dict), cast=cast)

    def weight_update(self, *, version: int | None = None, in_flight: str = "keep") -> Hold[WeightUpdate]:
        """Open the block of `with worker.weight_update(): optimizer.step()`, on a shared module.

        Generation stands still inside the block, that of other workers on this module too, and worker calls from inside
        it raise.
        """
        check_update_args(version, in_flight)
        self._need_shared("weight_update()")
        return self._thread.hold(lambda gate: weight_update(self._weight_user, version, in_flight, gate))

    def _accept_in_place(self, asked: UpdateOptions) -> SyncReport:
        self._need_shared("receive_weights() without a source")
        if asked.terms != UpdateTerms():
            given = f"partial={asked.partial} and cast={asked.cast}"
            raise ValueError(f"{given} need a source: without one all parameters are taken as they are")
        began = time.monotonic()

        def accept(gate: Gate) -> SyncReport:
            with transaction(self._weight_user, asked.version, asked.in_flight, gate) as written:
                if self._status.incomplete is not None:
                    self._weights.check_finite()
                written.complete = True
                return self._weights.accept_in_place(written.version, time.monotonic() - began, read=asked.verify)

        return self._thread.shelter(accept)

    def _need_shared(self, what: str) -> None:
        if not self._weights.shared:
            raise WorkerStateError(f"{what} needs a worker on the trainer's own module; this one has its own weights")

    # -- adapters ----------------------------------------------------------------------------------

    def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport:
        """Take an adapter, or a new version of it, under a name for `SamplingParams.adapter`: from a folder in peft's
        format, a name of the hub, a dict or a module of its tensors and no others, a `WeightStream`, or the receiving
        end of a link. Generation goes on.

        The keywords are those of `AdapterOptions`: `config`, `version`, `autocast`, `in_flight`, `revision`.
        """
        with gone_through(source):
            return self._adapters.load(name, source, AdapterOptions(**options))

    def drop_adapter(self, name: str, *, in_flight: str = "finish") -> None:
        """Forget a loaded adapter: requests that have begun end under it, or with what they have for "abort"."""
        self._adapters.drop(name, in_flight)

    @property
    def adapters(self) -> list[str]:
        """Return the names that `SamplingParams.adapter` may have."""
        return self._adapters.registry.names()

    # -- memory and control ------------------------------------------------------------------------

    def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None:
        """Release memory. Level 1 keeps the weights in an owner-only file, level 2 discards them.

        Sleeping "kv_cache" preempts the running requests; they go on after `wake_up`.
        """
        named = check_sleep(tags, level, shared=self._weights.shared)
        self._thread.run(lambda _: self._sleep.fall_asleep(named, keep_copy=level == 1))

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Take the memory again, of everything or of `tags`; what is awake already stays as it is.

        Raises:
            VerificationError: the copy of the weights was damaged meanwhile; a full update is needed.
        """
        named = check_tags(TAGS if tags is None else tags)
        self._thread.run(lambda _: self._sleep.get_up(named))

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Make sure that nothing computed so far is hit again. Running requests go on with the KV they have, or compute
        it again."""
        check_bool("recompute_running", recompute_running)

        def forget(engine: Engine) -> None:
            engine.clear_prefix_cache()
            if recompute_running:
                engine.preempt_all()

        self._thread.run(forget)

    def pause(self, mode: str = "keep") -> None:
        """Stand still between two steps until `resume()`; submissions are queued.

        mode: what becomes of the requests: "keep" goes on with them at `resume()`, "wait" lets those that have begun
        finish first, "abort" ends all with what they have.
        """
        pause(self._thread, mode)

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._thread.run(lambda _: self._status.end_pause())

    @property
    def paused(self) -> bool:
        """Return whether the worker stands still until `resume()`."""
        return self._status.paused

    @property
    def sleeping(self) -> tuple[str, ...]:
        """Return the tags of the memory that sleeps: "weights", "kv_cache"."""
        return self._status.sleeping

    @property
    def has_weights(self) -> bool:
        """Return whether the weights are in memory and complete."""
        return self._status.incomplete is None and "weights" not in self.sleeping

    def after_steps(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each step, while the worker lives: in the generation thread, or that of a command which
        finds a step in flight. It must not wait."""
        self._thread.after_steps(listener)

    def open_cache_journal(self, incarnation: int) -> CacheJournal:
        """Record, from now on, which blocks enter and leave the prefix cache; any thread may read the journal."""
        return self._thread.run(lambda engine: engine.cache.open_journal(incarnation))

    def cache_snapshot(self, journal: CacheJournal) -> CacheSnapshot:
        """Return all that the prefix cache can hit, as a message of the journal that is open."""
        return self._thread.run(lambda engine: engine.cache.snapshot(journal))

    def stats(self) -> dict[str, float]:
        """Return counters and sizes, read without the lock; see docs/reference.md for each."""
        return worker_stats(self._engine, self._thread.num_unstarted)

    def check_usable(self) -> None:
        """Raise `WorkerStateError` if the worker is closed or broken, with what broke it as the cause."""
        self._status.check_usable()

    def trouble(self) -> str | None:
        """Say why a request would be refused now; None if it would not."""
        try:
            self._status.check_accepts_requests()
        except WorkerStateError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Stop; pending requests fail, and so does `receive_weights`, whose link is closed. Closing twice is fine."""
        self._thread.check_thread()
        self._links.close()
        self._thread.close()
        self._weights.users.leave(self._weight_user)
        self._thread.shelter(self._release_memory)

    def _release_memory(self, gate: Gate) -> None:
        with self._thread.lock.turn(gate):
            self._sleep.release_all()
