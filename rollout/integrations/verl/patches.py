"""Replace functions of verl at run time, all of them here but `value_heads`: verl 0.9.1 has no hook there.

* `verl.utils.distributed.initialize_global_process_group_ray` names the backend "cpu:gloo,cpu:gloo" on a CPU, which
  torch refuses, and lets rank 0 listen on all addresses of its machine, where one will do. And it is the last call
  before verl looks for a training engine: samebit's are registered there.
* `verl.utils.device.auto_set_device`, the first that every trainer's program does with its configuration: wrong options
  are known before Ray and twenty processes are started.
* `verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu`, which keeps the weights of the last update of the servers, for the
  old log-probabilities of several steps: of weights that are on the CPU it makes no copy, and keeps what is trained.
* `verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._sync_metadata_from_transfer_queue`: a generation that fails is
  dropped or tried again, for ever; in `sync` its group is filled up and trained. A server that died must end the run,
  with the cause: where a group has failed, the servers are asked before verl goes on with it.
* `verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_metrics`: a rollout server has no way to put its counters into
  the metrics of a step.
* `verl.utils.debug.metrics.calculate_debug_metrics`: the same, in the trainers that are not V1 (one_step_off,
  fully_async). They call it once a step, when the servers have the weights that the step trains.
* `verl.experimental.fully_async_policy.message_queue.MessageQueueClient.get_sample`: fully_async takes a generation
  that fails for the end of the data, and the run for a success.

A replacement calls what it replaces; replacing twice is replacing once.
`tests/rollout/integrations/test_verl_plugin.py` holds verl to the signatures.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from samebit.rollout.integrations.verl.versions import as_made_for

_MARK = "replaced_by_samebit"


def replace_start() -> None:
    """Replace what every process needs, before a module of verl imports the functions."""
    from verl.utils import device, distributed

    _replace(device, "auto_set_device", _check_options_first)
    _replace(distributed, "initialize_global_process_group_ray", _start_process_group)


def replace_snapshot() -> None:
    """Replace what the processes need that hold the trainer's weights."""
    from verl.utils import fsdp_utils

    _replace(fsdp_utils, "fsdp2_sharded_save_to_cpu", _copying)


def replace_trainer_functions() -> None:
    """Replace what the process of the trainer's loop needs."""
    with as_made_for():
        from verl.experimental.fully_async_policy.message_queue import MessageQueueClient
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer
        from verl.utils.debug import metrics

        _replace(ReplayBuffer, "_sync_metadata_from_transfer_queue", _check_servers_first)
        _replace(PPOTrainer, "_compute_metrics", _with_server_metrics)
        _replace(metrics, "calculate_debug_metrics", _with_metrics_of_the_step)
        _replace(MessageQueueClient, "get_sample", _check_servers_at_the_end)


def compares_logprobs(config: Any) -> bool:
    """Tell whether the trainer computes the log-probabilities of what was sampled itself, and knows the rollout's."""
    bypass = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
    return bool(config.actor_rollout_ref.rollout.calculate_log_probs and not bypass)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner)[name]
    if _MARK not in vars(original):
        replacement = wraps(original)(make(original))
        vars(replacement)[_MARK] = True
        setattr(owner, name, replacement)


def _check_options_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(config: Any) -> None:
        from samebit.rollout.integrations.verl.run_check import check_run

        check_run(config)
        original(config)

    return start


def _start_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(timeout_second: float | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name

        from samebit.rollout.integrations.verl.server import checkpoint_engine
        from samebit.rollout.integrations.verl.trainer import engine

        engine.register()
        checkpoint_engine.register()
        replace_snapshot()
        if get_device_name() == "cpu":
            backend = backend or "cpu:gloo"
            _join_group(backend, timeout_second)
        original(timeout_second=timeout_second, backend=backend)

    return start


def _join_group(backend: str, timeout_second: float | None) -> None:
    """Join as the original would, which then finds the group there, but for where rank 0 listens."""
    import torch.distributed as dist

    from samebit.weight_sync import connected_store, listening_store

    if dist.is_initialized() or "DIST_INIT_METHOD" in os.environ:
        return
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = listening_store(host, port) if rank == 0 else connected_store(host, port)
    timeout = None if timeout_second is None else timedelta(seconds=timeout_second)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _copying(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(model: Any) -> Any:
        from verl.utils.device import get_device_name

        shards, layout = original(model)
        if get_device_name() != "cpu":
            return shards, layout
        return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, layout

    return save


def _check_servers_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def synchronise(self: Any) -> None:
        from samebit.rollout.integrations.verl.server.launched import ask_servers, check_servers

        check_servers()
        original(self)
        if any(self.failure_keys.values()):
            ask_servers()

    return synchronise


def _with_server_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        from samebit.rollout.integrations.verl.server.launched import server_metrics
        from samebit.rollout.integrations.verl.server.metrics import on_policy

        original(self, batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update(server_metrics())
        if compares_logprobs(self.config):
            custom = self.config.actor_rollout_ref.rollout.get("custom") or {}
            metrics.update(on_policy(batch, global_steps, with_routing=bool(custom.get("routed_experts"))))

    return compute


def _with_metrics_of_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def calculate(data: Any) -> dict[str, Any]:
        from samebit.rollout.integrations.verl.server.launched import check_servers, server_metrics, weights_in_servers
        from samebit.rollout.integrations.verl.server.metrics import on_policy_of

        check_servers()
        return {**original(data), **server_metrics(), **on_policy_of(data, weights_in_servers())}

    return calculate


def _check_servers_at_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    async def get(self: Any) -> Any:
        from samebit.rollout.integrations.verl.server.launched import check_servers

        sample = await original(self)
        if sample is None or sample[0] is None:
            check_servers()
        return sample

    return get
