"""Tell a worker on the trainer's own module what the trainer does to the weights."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from samebit.rollout.worker import RolloutWorker


class TellOfSteps(TrainerCallback):
    """Tells of each optimizer step, and of the weights that a training begins with: they may be a checkpoint's."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    def on_train_begin(self, *_given: Any, **_rest: Any) -> None:
        self._worker.receive_weights()

    def on_optimizer_step(self, *_given: Any, **_rest: Any) -> None:
        self._worker.receive_weights()
