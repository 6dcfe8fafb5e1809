"""Tell a worker on the trainer's own module what the trainer does to the weights, and load those of a checkpoint
that transformers leaves there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from samebit.rollout.worker import RolloutWorker

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names the files that peft writes an adapter's weights to, one or the other."""

_DEFAULT = "default"
"""Names the adapter that peft saves into a folder itself; each other one goes to a folder of its name in there."""


class TellOfSteps(TrainerCallback):
    """Tells of each optimizer step, and of the weights that a training begins with: they may be a checkpoint's."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    def on_train_begin(self, *_given: Any, **_rest: Any) -> None:
        self._worker.receive_weights()

    def on_optimizer_step(self, *_given: Any, **_rest: Any) -> None:
        self._worker.receive_weights()


def load_adapter_beside_others(model: Any, checkpoint: Path) -> None:
    """Load the adapter that trains from a checkpoint that has others too, as TRL's `ref`: where there is one,
    transformers loads the others alone, and the training would go on from the adapter that its model was built with.

    model: the trainer's; where the checkpoint holds an adapter, it is peft's.
    """
    held = any((checkpoint / name).is_file() for name in _WEIGHTS)
    if held and _DEFAULT in model.active_adapters:
        model.load_adapter(str(checkpoint), _DEFAULT, is_trainable=True, autocast_adapter_dtype=False)
