"""Run a rollout replica of verl: one server, started and driven from the process of the trainer's loop.

Invariant: a server that died or broke is known here within a second; `launched` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.replica import RolloutReplica

from samebit.rollout.integrations.ray import start_actor, wait_for_async
from samebit.rollout.integrations.ray.client import MOST_CALLS
from samebit.rollout.integrations.verl.names import server_name
from samebit.rollout.integrations.verl.options import check_trainer, server_options
from samebit.rollout.integrations.verl.patches import replace_trainer_functions
from samebit.rollout.integrations.verl.server import checkpoint_engine
from samebit.rollout.integrations.verl.server.launched import Server, watched
from samebit.rollout.integrations.verl.server.server import SamebitServer


class SamebitReplica(RolloutReplica):
    """Implements `RolloutReplica`; `sleep`, `abort_all_requests` and the like are its own, they call the server."""

    server_class: type[SamebitServer] = SamebitServer

    def __init__(self, replica_rank: int, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(replica_rank, config, model_config, *args, **kwargs)
        _prepare_process()
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        name = server_name(replica_rank, kind=kind, suffix=self.name_suffix)
        self.options = server_options(self.config, model_config, replica_rank, name)
        if self.is_policy:
            check_trainer(self.config.dtype, model_config, _mixed_precision(config))
        self.server: Server | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process knows of the server: another one watches it too."""
        return {**self.__dict__, "server": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Watch the server in this process too: fully_async starts servers in one process and trains in another."""
        self.__dict__.update(state)
        _prepare_process()
        self._watch()

    @property
    def is_policy(self) -> bool:
        """Return whether the server has the weights that are trained, and not those of a reward or teacher model."""
        return not (self.is_reward_model or self.is_teacher_model)

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """Return the worker beside a server with resources of its own."""
        return RayClassWithInitArgs(
            cls=ray.remote(checkpoint_engine.SamebitCheckpointWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )

    async def launch_servers(self) -> None:
        """Start the server on the machine of its worker, and on the worker's GPU."""
        node, given = await self.workers[0].__ray_call__.remote(
            lambda _: (ray.get_runtime_context().get_node_id(), ray.get_runtime_context().get_accelerator_ids())
        )
        name = self.options.name
        server = start_actor(
            self.server_class,
            num_cpus=self.options.num_cpus,
            num_threads=self.options.worker.num_threads,
            name=name,
            max_concurrency=MOST_CALLS,  # verl's limit would let requests that wait keep `resume` out
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": gpu_environment(self.options.device, given.get("GPU", []))},
        )
        await wait_for_async(server.load.remote(self.options, self.rollout_mode))
        self.servers = [server]
        self._server_handle = server
        self._server_address = name
        self._watch()

    def _watch(self) -> None:
        self.server = watched(self._server_handle, self._server_address, is_policy=self.is_policy)


def gpu_environment(device: str, gpus: Sequence[object]) -> dict[str, str]:
    """Return what shows a server the GPU of its worker, which Ray has given to that one alone; nothing on a CPU.

    gpus: the ids of the worker's, as Ray knows them.

    Raises:
        ValueError: they are not one.
    """
    if device == "cpu":
        return {}
    if len(gpus) != 1:
        raise ValueError(f"the worker beside a server has the GPUs {', '.join(map(str, gpus)) or 'none'}; allowed: one")
    return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": str(gpus[0])}


def _prepare_process() -> None:
    """Tell verl what it needs to know in the process of the trainer's loop."""
    replace_trainer_functions()
    checkpoint_engine.register()


def _mixed_precision(rollout_config: Any) -> Any:
    """Return the actor's, whose options stand beside the rollout's."""
    return OmegaConf.select(rollout_config, "..actor.fsdp_config.mixed_precision")
