"""Every function of verl that is replaced at run time: verl 0.9.1 has no hook there.

* `verl.utils.distributed.initialize_global_process_group_ray` names the backend "cpu:gloo,cpu:gloo" on a CPU, which
  torch refuses. And it is the last call before verl looks for a training engine: samebit's are registered there.
* `verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._sync_metadata_from_transfer_queue`: a generation that fails is
  dropped or tried again, for ever. A server that died must end the run, with the cause.
* `verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_metrics`: a rollout server has no way to put its counters into
  the metrics of a step.

A replacement calls what it replaces; replacing twice is replacing once. `tests/rollout/test_verl_plugin.py` holds verl
to the signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_MARK = "replaced_by_samebit"


def replace_process_group_start() -> None:
    """In every process, before a module of verl imports the function."""
    from verl.utils import distributed

    _replace(distributed, "initialize_global_process_group_ray", _start_process_group)


def replace_trainer_functions() -> None:
    """In the process of the trainer's loop."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    _replace(ReplayBuffer, "_sync_metadata_from_transfer_queue", _check_servers_first)
    _replace(PPOTrainer, "_compute_metrics", _with_server_metrics)


def compares_logprobs(config: Any) -> bool:
    """Whether the trainer computes the log-probabilities of what was sampled itself, and knows the rollout's."""
    bypass = (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
    return bool(config.actor_rollout_ref.rollout.calculate_log_probs and not bypass)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner)[name]
    if _MARK not in vars(original):
        replacement = wraps(original)(make(original))
        vars(replacement)[_MARK] = True
        setattr(owner, name, replacement)


def _start_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(timeout_second: float | None = None, backend: str | None = None) -> None:
        from verl.utils.device import get_device_name

        from samebit.rollout.integrations.verl import checkpoint, engine

        engine.register()
        checkpoint.register()
        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        original(timeout_second=timeout_second, backend=backend)

    return start


def _check_servers_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def synchronise(self: Any) -> None:
        from samebit.rollout.integrations.verl.replica import check_servers

        check_servers()
        original(self)

    return synchronise


def _with_server_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        from samebit.rollout.integrations.verl.metrics import on_policy
        from samebit.rollout.integrations.verl.replica import server_metrics

        original(self, batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update(server_metrics())
        if compares_logprobs(self.config):
            metrics.update(on_policy(batch, global_steps))

    return compute
