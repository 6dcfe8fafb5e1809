"""A rollout replica of verl: one server, started and driven from the process of the trainer's loop.

Invariant: a server that died or broke is known here within a second, and `check_servers` raises the cause;
`ask_servers` does not wait for that second.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakSet

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.replica import RolloutReplica

from samebit.rollout.errors import WorkerLostError
from samebit.rollout.integrations.ray import start_actor, wait_for, wait_for_async
from samebit.rollout.integrations.verl import checkpoint
from samebit.rollout.integrations.verl.metrics import of_servers
from samebit.rollout.integrations.verl.names import server_name
from samebit.rollout.integrations.verl.options import check_trainer, server_options
from samebit.rollout.integrations.verl.replacements import replace_trainer_functions
from samebit.rollout.integrations.verl.server import SamebitServer

logger = logging.getLogger(__name__)

ASK_SECONDS = 5.0
"""The longest wait for a server's answer that it is well."""

_launched: WeakSet[SamebitReplica] = WeakSet()
"""The replicas of this process, for the functions of verl that have no way to them."""


class SamebitReplica(RolloutReplica):
    """See `RolloutReplica`; `sleep`, `abort_all_requests` and the like are its own, they call the server."""

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        _prepare_process()
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        name = server_name(replica_rank, kind=kind, suffix=self.name_suffix)
        self.options = server_options(self.config, model_config, replica_rank, name)
        if self.is_policy:
            check_trainer(self.config.dtype, model_config, _mixed_precision(config))
        self.failure: Exception | None = None
        self.seen: dict[str, float] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """fully_async starts its servers in one process and trains in another: that one watches them too."""
        self.__dict__.update(state)
        _prepare_process()
        self._begin_to_watch()

    @property
    def is_policy(self) -> bool:
        """Its server has the weights that are trained; else it is one of a reward or teacher model."""
        return not (self.is_reward_model or self.is_teacher_model)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The worker beside a server with resources of its own."""
        return RayClassWithInitArgs(
            cls=ray.remote(checkpoint.SamebitCheckpointWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

    async def launch_servers(self) -> None:
        """Start the server on the machine of its worker."""
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        name = self.options.name
        server = start_actor(
            SamebitServer,
            num_cpus=self.options.num_cpus,
            num_threads=self.options.worker.num_threads,
            name=name,
            max_concurrency=self.max_concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        await wait_for_async(server.load.remote(self.options, self.rollout_mode))
        self.servers = [server]
        self._server_handle = server
        self._server_address = name
        self._begin_to_watch()

    def _begin_to_watch(self) -> None:
        threading.Thread(target=self._watch, name=f"{self.options.name}-watch", daemon=True).start()
        _launched.add(self)

    def _watch(self) -> None:
        try:
            wait_for(self._server_handle.watch.remote())
        except Exception as error:
            self.failure = error
            logger.error("%s: %s", self._server_address, error)


def _prepare_process() -> None:
    """What verl needs to know in the process of the trainer's loop."""
    replace_trainer_functions()
    checkpoint.register()


def check_servers() -> None:
    """Raise if a server of this process died or broke, as far as its watch has told."""
    for replica in _launched:
        if replica.failure is not None:
            raise _lost(replica, replica.failure)


def ask_servers() -> None:
    """The same, where something failed just now: ask each server. One that is slow to answer is not lost."""
    check_servers()
    asked = [(replica, replica.server_handle.check_usable.remote()) for replica in _launched]
    for replica, answer in asked:
        try:
            wait_for(answer, timeout=ASK_SECONDS)
        except TimeoutError:
            logger.warning("%s did not answer within %s s", replica.server_address, ASK_SECONDS)
        except Exception as error:
            raise _lost(replica, error) from error


def _lost(replica: SamebitReplica, cause: Exception) -> WorkerLostError:
    error = WorkerLostError(f"{replica.server_address} is lost: {cause}")
    error.__cause__ = cause
    return error


def server_metrics() -> dict[str, float]:
    """What the policy's servers did since the last call, under verl's kind of names."""
    replicas = _policies()
    before = [replica.seen for replica in replicas]
    for replica, stats in zip(replicas, ray.get([r.server_handle.stats.remote() for r in replicas]), strict=True):
        replica.seen = stats
    return of_servers(before, [replica.seen for replica in replicas])


def weights_in_servers() -> set[int]:
    """The trainer's steps whose weights are, bit for bit, those that all servers of the policy have."""
    held = ray.get([replica.server_handle.steps_of_weights.remote() for replica in _policies()])
    return set.intersection(*held) if held else set()


def _policies() -> list[SamebitReplica]:
    return [replica for replica in _launched if replica.is_policy]


def _mixed_precision(rollout_config: Any) -> Any:
    """Of the actor, whose options stand beside the rollout's."""
    return OmegaConf.select(rollout_config, "..actor.fsdp_config.mixed_precision")
