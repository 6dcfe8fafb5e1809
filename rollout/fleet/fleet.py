"""Offer the calls of one worker, made of several: `Fleet`.

Invariants
----------
* What a request samples does not depend on where it runs: one that brings no seed gets one of its own here, from the
  seed of the config and its number.
* A command reaches all replicas that live; those that come later are brought to the same state.
* A pause or a sleep that a replica refuses, or whose caller is interrupted, is none: replicas that have begun it go on.
* What is wrong with a request raises here, before it is sent anywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from samebit.rollout.checks import check_bool, check_positive_int
from samebit.rollout.config import RolloutConfig
from samebit.rollout.control.intake import as_request_ids, paired
from samebit.rollout.control.pausing import check_pause_mode
from samebit.rollout.control.sleep import check_sleep, check_tags
from samebit.rollout.control.worker_status import TAGS
from samebit.rollout.errors import RequestError, WorkerLostError, WorkerStateError
from samebit.rollout.fleet.adapters import FleetAdapters
from samebit.rollout.fleet.background import Doing, in_turn
from samebit.rollout.fleet.carrier import Carrier
from samebit.rollout.fleet.crew import Crew
from samebit.rollout.fleet.handle import FleetHandle
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.port import Command, ReplicaPort, Wanted
from samebit.rollout.fleet.routing.router import Prompt
from samebit.rollout.fleet.weights import FleetWeights
from samebit.rollout.guard import contained
from samebit.rollout.keys.digest_key import DigestKey
from samebit.rollout.outputs import RequestOutput
from samebit.rollout.requests.block_digests import ChainHasher
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.requests.shared import IntArray
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker_interface import checked_state_dict
from samebit.weight_sync import SyncReport
from samebit.weight_sync.closing import Closing
from samebit.weight_sync.wire.stream import gone_through

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from samebit.rollout.adapters.loading import AdapterKeywords
    from samebit.rollout.worker_interface import UpdateKeywords


class _Checked(NamedTuple):
    prompt: IntArray
    params: SamplingParams


class Fleet(Closing):
    """Acts as one worker to its callers. `RayFleet.start` makes one of actors.

    start: makes the port of the replica of this name, from the config given, with its model loaded. It runs in a thread
    and may wait; it is called again to replace a replica that has died. host: where replicas reach this process.
    """

    def __init__(
        self,
        start: Callable[[str, RolloutConfig], ReplicaPort],
        replicas: int,
        *,
        config: RolloutConfig | None = None,
        options: FleetOptions | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        check_positive_int("replicas", replicas)
        given = RolloutConfig() if config is None else config
        if given.digest_key is not None:
            raise ValueError("a fleet draws its digest key itself: leave digest_key=None in the config")
        key = DigestKey() if given.enable_prefix_caching else None
        inner = replace(given, digest_key=key)
        self._crew = Crew(
            lambda name: start(name, inner),
            replicas,
            given.max_num_seqs,
            FleetOptions() if options is None else options,
        )
        try:
            told = self._crew.introduction
            self.limits = told.limits
            self.eos_token_ids = told.eos_token_ids
            self.config = replace(given, block_size=told.limits.block_size)
            self._hasher = None if key is None else ChainHasher(told.limits.block_size, key)
            self._carrier = Carrier(self._crew)
            self._weights = FleetWeights(self._crew, host)
            self._adapters = FleetAdapters(self._crew, told.adapters)
            self._crew.begin(self._weights.catch_up, self._carrier.feed)
        except BaseException:
            self._crew.close()
            raise
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Sample from each prompt and wait; the results are in the order of the prompts.

        If a request fails, the rest of this call is aborted and its error is raised.
        """
        handles: list[FleetHandle] = []
        results: list[RequestOutput] = []
        try:
            self._send_all(prompts, params, handles)
            results.extend(handle.result() for handle in handles)
        finally:
            _cancel(handles[len(results) :])
        return results

    async def generate_async(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Do as `generate` for asyncio; cancelling it aborts its requests."""
        handles: list[FleetHandle] = []
        results: list[RequestOutput] = []
        try:
            self._send_all(prompts, params, handles)
            for handle in handles:
                results.append(await handle.result_async())
        finally:
            _cancel(handles[len(results) :])
        return results

    def submit(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session: str | None = None,
    ) -> FleetHandle:
        """Queue one prompt. session: names a conversation, whose turns go to one replica while that is not saturated.

        Raises:
            RequestError: it can not be taken; `RequestIdInUseError` where one with this id is running.
            NoReplicaError: no replica takes requests now.
        """
        for name, value in (("request_id", request_id), ("session", session)):
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"{name} must be a non-empty string or None, got {value!r}")
        return self._send(self._checked(prompt, SamplingParams() if params is None else params), request_id, session)

    def submit_all(
        self, prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[FleetHandle]:
        """Queue prompts; the handles are in their order. A bad one raises before anything is sent."""
        handles: list[FleetHandle] = []
        try:
            self._send_all(prompts, params, handles)
        except WorkerStateError:
            _cancel(handles)
            raise
        return handles

    def preparation(self, params: SamplingParams) -> None:
        """Return None: the replicas compile, and each beside its loop."""

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End these requests with what they have so far; those that are finished already stay so."""
        self._carrier.abort(as_request_ids(request_ids))

    def after_steps(self, listener: Callable[[], None]) -> None:
        """Call it when tokens have come for a caller that streams, for as long as the fleet lives. It must not wait."""
        self._carrier.after_steps(listener)

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Return the version of the replicas' weights: each update has a higher one."""
        return self._weights.version

    def receive_weights(self, source: object = None, **options: Unpack[UpdateKeywords]) -> SyncReport:
        """Bring new weights to all replicas: from a module, a dict of tensors or a `WeightStream` in this process, or a
        folder that every replica can read. The keywords are those of `UpdateOptions`.

        A replica that fails where others do not takes no requests until it has the weights from another. An update that
        a replica's death has broken is made again for the others, except from a `WeightStream`, which can be read once.
        """
        return self._weights.receive(source, options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, cast: bool = False) -> SyncReport:
        """Bring a full update from a state dict to all replicas; `cast` as in `receive_weights`."""
        return self.receive_weights(checked_state_dict(state_dict), cast=cast)

    # -- adapters ----------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        """Return the names that `SamplingParams.adapter` may have."""
        return self._adapters.names()

    def load_adapter(self, name: str, source: object, **options: Unpack[AdapterKeywords]) -> SyncReport:
        """Let all replicas take an adapter, or a new version of it, from a folder in peft's format that each can read.
        Where one refuses it, none has it. The keywords are those of `AdapterOptions`."""
        with gone_through(source):
            return self._adapters.load(name, source, options)

    def drop_adapter(self, name: str, *, in_flight: str = "finish") -> None:
        """Forget a loaded adapter, as `RolloutWorker.drop_adapter`, on all replicas."""
        self._adapters.drop(name, in_flight)

    # -- memory and control ------------------------------------------------------------------------

    def sleep(self, tags: str | Iterable[str] = TAGS, level: int = 1) -> None:
        """Release memory on all replicas, as `RolloutWorker.sleep`; where one refuses, none does."""
        named = check_sleep(tags, level, shared=False)
        levels = {tag: level if tag == "weights" else 1 for tag in named}  # a cache has nothing to keep a copy of
        self._change(lambda wanted: replace(wanted, asleep={**wanted.asleep, **levels}), "sleep", tuple(named), level)

    def wake_up(self, tags: str | Iterable[str] | None = None) -> None:
        """Take the memory again on all replicas."""
        named = check_tags(TAGS if tags is None else tags)
        with self._turn:
            asleep = {tag: level for tag, level in self._crew.wanted.asleep.items() if tag not in named}
            self._crew.wanted = replace(self._crew.wanted, asleep=asleep)
            self._crew.command("wake_up", tuple(named))
        self._weights.mend()

    def pause(self, mode: str = "keep") -> None:
        """Stand still until `resume()`, on all replicas, as `RolloutWorker.pause`; where one refuses, none does."""
        check_pause_mode(mode)
        self._change(lambda wanted: replace(wanted, paused=True), "pause", mode)

    def resume(self) -> None:
        """Go on after `pause()`, on all replicas."""
        with self._turn:
            self._crew.wanted = replace(self._crew.wanted, paused=False)
            self._crew.command("resume")
        self._crew.background.spawn(self._weights.bring_up())  # one that could not let its requests finish now can

    @property
    def paused(self) -> bool:
        """Return whether the fleet stands still until `resume()`."""
        return self._crew.wanted.paused

    @property
    def sleeping(self) -> tuple[str, ...]:
        """Return the tags that sleep."""
        return tuple(self._crew.wanted.asleep)

    def reset_prefix_cache(self, *, recompute_running: bool = False) -> None:
        """Make sure that nothing computed so far is hit again, on any replica."""
        check_bool("recompute_running", recompute_running)
        self._crew.command("reset_prefix_cache", recompute_running=recompute_running)

    # -- how it is ---------------------------------------------------------------------------------

    @property
    def replicas(self) -> dict[str, bool]:
        """Return the replicas by name, and whether each takes requests now."""
        closed = self._crew.router.closed()
        return {name: name not in closed for name in self._crew.members}

    def stats(self) -> dict[str, float]:
        """Return the numbers of all living replicas added up, asked for now; those of the router; and of the fleet."""
        total: dict[str, float] = {}
        for one in self._crew.command("stats"):
            for name, value in one.items():
                total[name] = total.get(name, 0) + value
        return {**total, **self.fleet_stats()}

    def replica_stats(self) -> dict[str, dict[str, float]]:
        """Return the numbers of each replica as of its last feed, at most about a second old; no replica is asked. Of a
        dead one there is what it has counted, and nothing in use."""
        return {name: dict(member.stats) for name, member in self._crew.members.items()}

    def fleet_stats(self) -> dict[str, float]:
        """Return the numbers of the fleet and its router; no replica is asked."""
        return {
            "weight_version": self.weight_version,
            "replicas": len(self._crew.members),
            "replicas_open": sum(self.replicas.values()),
            "replica_restarts": self._crew.restarts,
            "requests_resubmitted": self._carrier.resubmitted,
            "requests_lost": self._carrier.lost,
            **self._crew.router.stats(),
        }

    def check_usable(self) -> None:
        """Raise `WorkerLostError` if no replica is alive, `WorkerStateError` if the fleet is closed."""
        if self._crew.background.closed:
            raise WorkerStateError("the fleet is closed")
        if not self._crew.living():
            raise WorkerLostError(f"no replica is alive: {self._crew.router.closed()}")

    def trouble(self) -> str | None:
        """Say why a request would be refused now; None if a replica would take it."""
        closed = self._crew.router.closed()
        if self._crew.background.closed:
            return "the fleet is closed"
        if len(closed) < len(self._crew.members):
            return None
        return "no replica takes requests now: " + "; ".join(f"{name}: {why}" for name, why in closed.items())

    def close(self) -> None:
        """Stop all replicas; pending requests fail. Closing twice is fine."""
        error = WorkerStateError("the fleet was closed")
        self._carrier.fail_all(error)  # first: they do not wait until the replicas have ended
        try:
            self._crew.close()
        finally:
            self._carrier.fail_all(error)  # what was sent meanwhile; from here on nothing is

    # -- parts -------------------------------------------------------------------------------------

    def _change(self, change: Callable[[Wanted], Wanted], name: Command, *args: Any) -> None:
        """Bring all replicas to another state by a command, or to the one before."""
        with self._turn:
            before = self._crew.wanted
            self._crew.wanted = change(before)  # first: also for who starts while others wait
            try:
                changing = self._crew.background.spawn(self._crew.command_all(name, *args))
            except WorkerStateError:
                self._crew.wanted = before
                raise
            try:
                changing.result()
                return
            except BaseException as error:
                self._crew.wanted = before
                undoing, failed = self._crew.background.spawn(self._undo(changing)), error
        if isinstance(failed, Exception):  # the caller of one that was interrupted waits for no answer
            undoing.wait()
        raise failed

    async def _undo(self, changing: Doing[Any]) -> None:
        """Let replicas go on once all have answered a command. In a turn of its own: its caller may be interrupted."""
        await changing.wait_async()
        async with in_turn(self._turn):
            await self._go_on()
        await self._weights.bring_up()

    async def _go_on(self) -> None:
        """Let the replicas go on that stand still or sleep where the fleet does not."""
        awake = tuple(tag for tag in TAGS if tag not in self._crew.wanted.asleep)
        with contained("going back to the state before a command"):
            if not self._crew.wanted.paused:
                await self._crew.command_all("resume")
            if awake:
                await self._crew.command_all("wake_up", awake)

    def _checked(self, prompt: object, params: SamplingParams) -> _Checked:
        ids = self.limits.check_prompt(prompt)
        self.limits.check_params(params, len(ids))
        self._adapters.resolve(params.adapter)
        return _Checked(ids, params)

    def _send_all(
        self,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | list[SamplingParams] | None,
        handles: list[FleetHandle],
    ) -> None:
        good: list[_Checked] = []
        given, each, _ = paired(prompts, params)
        for index, (prompt, wanted) in enumerate(zip(given, each, strict=True)):
            try:
                good.append(self._checked(prompt, wanted))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}" if len(given) > 1 else str(error)) from error
        for one in good:
            handles.append(self._send(one, None, None))

    def _send(self, checked: _Checked, request_id: str | None, session: str | None) -> FleetHandle:
        number = next(self._numbers)
        ids, params = checked
        seed = _seed(self.config.seed, number) if params.seed is None else params.seed
        with self._adapters.sending:
            adapter = self._adapters.resolve(params.adapter)
            params = params.placed(seed, adapter.name)
            asked = Prompt((), len(ids), params.n, None, session)
            if self._hasher is not None:
                named = self._hasher.prompt(params.cache_salt, ids, adapter.number)
                asked = Prompt(named.blocks, len(ids), params.n, self._hasher.whole(named, ids), session)
            return self._carrier.send(request_id, ids.tolist(), params, asked)


def _cancel(handles: list[FleetHandle]) -> None:
    for handle in handles:
        handle.cancel()


def _seed(base: int, number: int) -> int:
    """Return the seed of the request with this number: 63 bits that no two requests share but by chance."""
    digest = hashlib.blake2b(base.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
