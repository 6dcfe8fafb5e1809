"""The RPCs of a worker, over an engine and weights that somebody else has built.

Invariants
----------
* Write, version, and what happens to the requests in flight are one hold of the lock.
* An update that is refused (names, shapes, values, version) changes nothing. One that breaks off while
  writing leaves "weights incomplete": the requests in flight fail with the cause and the worker refuses
  to generate until a full update.
* Every call either acts or raises; nothing that is passed is ignored.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable

from samebit.rollout.cache.chain import PromptDigests
from samebit.rollout.engine import Engine
from samebit.rollout.errors import RequestError, WorkerStateError
from samebit.rollout.free_memory import return_free_memory
from samebit.rollout.handle import RequestHandle
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.request import IntArray, Request
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.service import GenerationService
from samebit.rollout.stats import worker_stats
from samebit.rollout.stopping import Tokenizer
from samebit.rollout.update import Transaction, WeightUpdate, check_update_args
from samebit.rollout.validate import RequestLimits
from samebit.rollout.weights import WorkerWeights
from samebit.rollout.worker_state import WorkerState
from samebit.weight_sync import SyncReport, UpdateTerms, VerificationError
from samebit.weight_sync.closing import Closing

TAGS = ("weights", "kv_cache")


class WorkerCore(Closing):
    """See `RolloutWorker`, which builds the parts from a model."""

    def __init__(
        self,
        engine: Engine,
        weights: WorkerWeights,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        queue_while_asleep: bool = False,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = RequestLimits(
            vocab_size=engine.runner.vocab_size,
            max_model_len=max_model_len,
            block_size=engine.cache.block_size,
            num_blocks=engine.cache.pool.num_blocks,
            has_tokenizer=tokenizer is not None,
        )
        self._engine = engine
        self._weights = weights
        self._eos_token_ids = eos_token_ids
        self._state = WorkerState(queue_while_asleep=queue_while_asleep)
        self._names = itertools.count()
        self._service = GenerationService(engine, self._state, on_thread_start)
        self._finalizer = weakref.finalize(self, self._service.request_stop)

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Sample from each prompt and wait; the results are in the order of the prompts.

        A bad prompt raises before anything is submitted. If a request fails, the rest of this call is
        aborted and its error is raised.
        """
        handles = self.submit_all(prompts, params)
        results: list[RequestOutput] = []
        try:
            results.extend(handle.result() for handle in handles)
        finally:
            if len(results) < len(handles):
                self._service.abort(handle.request_id for handle in handles)
        return results

    def submit_all(
        self,
        prompts: list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestHandle]:
        """Queue prompts, all or none; the handles are in their order."""
        if not isinstance(prompts, list | tuple):
            raise RequestError(f"prompts must be a list of token id lists, got {type(prompts).__name__}")
        if isinstance(params, list | tuple):
            each = list(params)
            if len(each) != len(prompts):
                raise RequestError(f"{len(prompts)} prompts, but {len(each)} params")
        else:
            each = [SamplingParams() if params is None else params] * len(prompts)
        return self._submit(prompts, each, [None] * len(prompts))

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> RequestHandle:
        """Queue one prompt; the handle gives the result, streams, or cancels."""
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise RequestError(f"request_id must be a non-empty string or None, got {request_id!r}")
        return self._submit([prompt], [SamplingParams() if params is None else params], [request_id])[0]

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End these requests with what they have so far; those that are finished already stay so."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        if not all(isinstance(request_id, str) for request_id in ids):
            raise RequestError(f"request ids are strings, got {ids!r}")
        self._service.abort(ids)

    def _submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        request_ids: list[str | None],
    ) -> list[RequestHandle]:
        self._service.check_thread()
        self._state.check_accepts_requests()
        checked: list[tuple[IntArray, SamplingParams, int]] = []
        digests: list[PromptDigests | None] = []
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                ids = self.limits.check_prompt(prompt)
                checked.append((ids, wanted, self.limits.check_params(wanted, len(ids))))
                digests.append(self._engine.cache.hash_prompt(ids, wanted.cache_salt))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {index}: {error}") from error

        def make(first_ordinal: int) -> list[Request]:
            return [
                Request(
                    request_id or f"request-{next(self._names)}",
                    ids,
                    wanted,
                    ordinal=first_ordinal + index,
                    max_new_tokens=max_new,
                    eos_token_ids=self._eos_token_ids,
                    tokenizer=self.tokenizer,
                    prompt_digests=digests[index],
                )
                for index, ((ids, wanted, max_new), request_id) in enumerate(zip(checked, request_ids, strict=True))
            ]

        deliveries = self._service.submit(make)
        return [
            RequestHandle(delivery, self.tokenizer, self.abort, self._service.check_thread) for delivery in deliveries
        ]

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def receive_weights(
        self,
        source: object = None,
        *,
        version: int | None = None,
        in_flight: str = "keep",
        partial: bool = False,
        cast: bool = False,
        verify: bool = False,
    ) -> SyncReport:
        """New weights, from a dict of tensors, a module, a folder of safetensors, a `WeightStream`, or the
        receiving end of a link to another process. Waits for the latter while generation goes on.

        `None` on a shared module says that the trainer has changed the parameters in place. The version
        goes up by one, or to `version`. `in_flight` says what becomes of the requests that have begun:
        "keep" goes on with the KV they have, "recompute" computes it again under the new weights, "wait"
        lets them finish first, "abort" ends them with what they have. `partial` allows some tensors to be
        missing, `cast` other floating dtypes than the model's, `verify` reads what was written back.
        """
        check_update_args(version, in_flight)
        terms = UpdateTerms(partial=partial, cast=cast)
        if source is None:
            return self._accept_in_place(version, in_flight, terms, verify)
        self._service.check_thread()
        self._state.check_usable()
        with (
            self._weights.open(source, terms, version=self.weight_version) as update,
            self._update(version, in_flight) as transaction,
        ):
            report = self._weights.write(update, transaction.version, verify=verify)
            transaction.complete = not partial
        return report

    def load_state_dict(self, state_dict: dict[str, object], *, cast: bool = False) -> SyncReport:
        """A full update from a state dict; `cast` allows other floating dtypes than the model's."""
        if not isinstance(state_dict, dict):
            raise TypeError(f"load_state_dict takes a dict of tensors, got {type(state_dict).__name__}")
        return self.receive_weights(state_dict, cast=cast)

    def weight_update(self, *, version: int | None = None, in_flight: str = "keep") -> WeightUpdate:
        """`with worker.weight_update(): optimizer.step()`, on a shared module.

        Generation stands still inside the block, and worker calls from inside it raise.
        """
        self._need_shared("weight_update()")
        return WeightUpdate(self._update(version, in_flight), self._weights, self._state)

    def _accept_in_place(self, version: int | None, in_flight: str, terms: UpdateTerms, verify: bool) -> SyncReport:
        self._need_shared("receive_weights() without a source")
        if terms != UpdateTerms():
            given = f"partial={terms.partial} and cast={terms.cast}"
            raise ValueError(f"{given} need a source: without one all parameters are taken as they are")
        began = time.monotonic()
        with self._update(version, in_flight) as transaction:
            if self._state.incomplete is not None:
                self._weights.check_finite()
            transaction.complete = True
            return self._weights.accept_in_place(transaction.version, time.monotonic() - began, read=verify)

    def _update(self, version: int | None, in_flight: str) -> Transaction:
        return Transaction(self._service, self._state, version, in_flight)

    def _need_shared(self, what: str) -> None:
        if not self._weights.shared:
            raise WorkerStateError(f"{what} needs a worker on the trainer's own module; this one has its own weights")

    # -- memory and control ------------------------------------------------------------------------

    def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None:
        """Release memory. Level 1 keeps the weights in an owner-only file, level 2 discards them.

        Sleeping "kv_cache" preempts the running requests; they go on after `wake_up`.
        """
        named = _check_tags(tags)
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(f"level must be 1 (keep a copy of the weights) or 2 (discard them), got {level!r}")
        if level == 2 and "weights" not in named:
            raise ValueError(f"level=2 discards the weights, but the tags are {', '.join(named)}")
        if "weights" in named and self._weights.shared:
            raise WorkerStateError(
                'sleep("weights") would free the trainer\'s own parameters; on a shared module use sleep("kv_cache")'
            )
        with self._service.command() as engine:
            if "weights" in named:
                self._sleep_weights(keep_copy=level == 1)
            engine.clear_prefix_cache()
            if "kv_cache" in named and not self._state.kv_asleep:
                engine.preempt_all()
                engine.runner.release_cache()
                self._set_asleep(kv_cache=True)
            return_free_memory()

    def _sleep_weights(self, *, keep_copy: bool) -> None:
        if not self._state.weights_asleep:
            self._weights.free(keep_copy=keep_copy and self._state.incomplete is None)
            self._set_asleep(weights=True)
        elif not keep_copy:
            self._weights.drop_spill()
        elif not self._weights.spilled and self._state.incomplete is None:
            raise WorkerStateError("sleep(level=1) can not keep the weights: they were discarded before")

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Take the memory again, of everything or of `tags`; what is awake already stays as it is.

        Raises:
            VerificationError: the copy of the weights was damaged meanwhile; a full update is needed.
        """
        named = _check_tags(TAGS if tags is None else tags)
        with self._service.command() as engine:
            if "weights" in named and self._state.weights_asleep:
                self._wake_weights()
            if "kv_cache" in named and self._state.kv_asleep:
                engine.runner.allocate_cache(engine.cache.pool.num_blocks)
                self._set_asleep(kv_cache=False)

    def _wake_weights(self) -> None:
        try:
            if not self._weights.restore() and self._state.incomplete is None:
                self._state.set_incomplete("they were discarded by sleep(level=2)")
        except VerificationError as error:
            self._state.set_incomplete(str(error), error)
            self._set_asleep(weights=False)
            raise
        self._set_asleep(weights=False)

    def _set_asleep(self, *, weights: bool | None = None, kv_cache: bool | None = None) -> None:
        with self._state.mutex:
            if weights is not None:
                self._state.weights_asleep = weights
            if kv_cache is not None:
                self._state.kv_asleep = kv_cache

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is hit again. Running requests go on with the KV they have."""
        with self._service.command() as engine:
            engine.clear_prefix_cache()

    def pause(self) -> None:
        """Stand still between two steps until `resume()`; submissions are queued."""
        with self._service.command():
            self._state.paused = True

    def resume(self) -> None:
        with self._service.command():
            self._state.paused = False

    def stats(self) -> dict[str, float]:
        """Counters and sizes, read without the lock; see docs/reference.md for each."""
        return worker_stats(self._engine, self._service.num_unstarted)

    def check_usable(self) -> None:
        """Raise `WorkerStateError` if the worker is closed or broken, with what broke it as the cause."""
        self._state.check_usable()

    def trouble(self) -> str | None:
        """Why a request would be refused now; None if it would not."""
        try:
            self._state.check_accepts_requests()
        except WorkerStateError as error:
            return str(error)
        return None

    def close(self) -> None:
        """Stop; pending requests fail. Closing twice is fine."""
        self._service.close()
        with self._service.lock:
            self._weights.drop_spill()
            if not self._state.kv_asleep:
                self._engine.runner.release_cache()
                self._set_asleep(kv_cache=True)


def _check_tags(tags: str | Iterable[str]) -> tuple[str, ...]:
    named = (tags,) if isinstance(tags, str) else tuple(tags)
    unknown = [tag for tag in named if tag not in TAGS]
    if unknown or not named:
        raise ValueError(f"tags must be of {', '.join(TAGS)}, got {tags!r}")
    return named
