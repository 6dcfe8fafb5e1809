"""Define TRL's AsyncGRPO trainer with samebit as generator, in its own process, and as the trainer's log-probabilities.

Invariants
----------
* Worker and trainer share one module, and generation goes on beside forward and backward; it stands still while the
  optimizer steps. No weight is sent anywhere.
* What TRL trains on under the weights that it was sampled under is compared, bit by bit. Older samples are off policy:
  their ratio is TRL's, with the numbers that the worker reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer as TrlAsyncGRPOTrainer

from samebit.kernels.binding.binding import binding_of
from samebit.rollout.checks import check_one_of
from samebit.rollout.config import RolloutConfig
from samebit.rollout.control.weights.transaction import IN_FLIGHT
from samebit.rollout.integrations.trl.agreement import Agreement
from samebit.rollout.integrations.trl.async_rollouts import MIXED, VERSION, InProcessRollouts, SharedModule, StandStill
from samebit.rollout.integrations.trl.fused_forward import give_scores
from samebit.rollout.integrations.trl.on_cpu import without_peak_flops
from samebit.rollout.integrations.trl.refusals import (
    check_arguments,
    check_model,
    check_served_nowhere,
    check_text_alone,
)
from samebit.rollout.integrations.trl.sampling import sampling_params
from samebit.rollout.worker import RolloutWorker

_VERSIONS = "samebit_versions"


class AsyncGRPOTrainer(TrlAsyncGRPOTrainer):
    """Trains as TRL's `AsyncGRPOTrainer`, with exact rollouts in this process, without a server.

    Attributes:
        worker: the rollout worker, on the trainer's module.
        agreement: what was compared, and what differed.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *more: Any,
        rollout_config: RolloutConfig | None = None,
        in_flight: str = "keep",
        **options: Any,
    ) -> None:
        """Build TRL's trainer, and a worker on its model.

        Args:
            model, reward_funcs, args, train_dataset, more, options: as TRL takes them, but for `rollout_worker` and
                `weight_transfer`, which are samebit's.
            rollout_config: of the worker; None for samebit's defaults with `args.seed`.
            in_flight: what a step does to the requests that run: "keep" (as TRL asks of a server), "recompute", "wait",
                "abort".

        Raises:
            ValueError: options under which the bits would not agree, or that would go unheard, by name.
            BindingError: a model that can not be bound exactly, by name.
        """
        check_one_of("in_flight", in_flight, IN_FLIGHT)
        taken = [name for name in ("rollout_worker", "weight_transfer") if options.get(name) is not None]
        if taken:
            raise ValueError(f"{' and '.join(taken)}: samebit brings its own")
        check_text_alone(train_dataset, [*more, *options.values()])
        if args is not None:
            check_arguments(args)
            check_served_nowhere(args)
        transfer = SharedModule(in_flight=in_flight)
        rollouts = InProcessRollouts(0 if args is None else args.queue_maxsize, transfer)
        own = {"rollout_worker": rollouts, "weight_transfer": transfer}
        with without_peak_flops():
            super().__init__(model, reward_funcs, args, train_dataset, *more, **{**options, **own})
        check_arguments(self.args)
        check_model(self, self.model)
        give_scores(self.model, None, self.temperature)
        config = RolloutConfig(seed=self.args.seed) if rollout_config is None else rollout_config
        self.agreement = Agreement()
        self.worker = RolloutWorker(self.model, config=config)
        if self.args.token_budget is None:
            self.args.token_budget = self.worker.limits.max_model_len
        transfer.attach(self.worker)
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] if reward_funcs else []
        rollouts.attach(
            self.worker,
            sampling_params(self.args, self.eos_token_ids, binding_of(self.model).vocab_size),
            **self._of_conversations(rewards, options),
        )
        self.add_callback(StandStill(transfer))

    def _of_conversations(self, reward_funcs: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        """Return what the loop of conversations is built with, besides the queues."""
        args = self.args
        return {
            "steps_done": lambda: self.state.global_step,
            "model_name": str(self.model.config.name_or_path),
            "dataset": self.train_dataset,
            "reward_funcs": reward_funcs,
            "processing_class": self.processing_class,
            "eos_token_ids": self.eos_token_ids,
            "tools": options.get("tools"),
            "environment_factory": options.get("environment_factory"),
            "num_generations": args.num_generations,
            "max_inflight_tasks": args.max_inflight_tasks,
            "chat_template_kwargs": args.chat_template_kwargs,
            "max_tool_calling_iterations": args.max_tool_calling_iterations,
            "log_completions": args.log_completions,
            "num_completions_to_print": args.num_completions_to_print,
            "fork_threshold_tokens": args.fork_threshold_tokens,
        }

    def get_train_dataloader(self) -> Any:
        """Return TRL's loader without accelerate's around it, which reads a batch ahead: each batch would be learned
        from one step after its staleness was looked at."""
        loader = super().get_train_dataloader().base_dataloader
        loader.collate_fn = _WithVersions(loader.collate_fn)
        return loader

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        recorded = _Recorded(model)
        loss: torch.Tensor = super().compute_loss(recorded, inputs, return_outputs, num_items_in_batch)
        selected = inputs["token_index"] >= 0
        trainer = recorded.output.log_probs.flatten()[inputs["token_index"][selected]]
        current = inputs[_VERSIONS][selected] == self.worker.weight_version
        self.agreement.add(inputs["old_log_probs"][selected], trainer, current, training=self.model.training)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs.update(self.agreement.take_metrics(training=self.model.training))
        super().log(logs, start_time)

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        """Count a version. An adapter is not merged: the worker generates through it."""
        self.weight_transfer.pause()
        self.weight_transfer.send_weights(iter(()))
        self.weight_transfer.resume()
        self.model_version += 1
        self.rollout_worker.update_model_version(self.model_version)
        return time.time(), time.time(), time.time()


class _Recorded:
    """Calls a model and keeps what it gave."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.output: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self.output = self._model(**inputs)
        return self.output


class _WithVersions:
    """Collates as TRL does, and adds the version of each loss term's weights."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = self._collate(examples)
        versions = torch.full_like(batch["token_index"], MIXED)
        for row, values in zip(examples[0], versions, strict=True):
            terms = [
                MIXED if math.isnan(version := sample["metrics"][VERSION]) else int(version)
                for sample in row.samples
                for _ in range(int(sample["completion_mask"][1:].sum()))
            ]
            values[: len(terms)] = torch.tensor(terms, dtype=values.dtype)
        return {**batch, _VERSIONS: versions}
