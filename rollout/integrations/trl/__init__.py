"""Put samebit into TRL: its trainers, with the same names, with exact rollouts (docs/trl.md).

`GRPOTrainer` and `RLOOTrainer` (`trainers`) sample between two steps. `AsyncGRPOTrainer`, in `async_grpo`, samples
beside them: it is imported from there, since TRL warns of what is experimental.

The way through: `versions` and `refusals` say what may run at all; `sampling` reads TRL's options and samples,
`fused_forward` is the trainer's forward (`token_trees`: over TRL's trees), `agreement` compares the two, `updates`
tells the worker of new weights. For `async_grpo` alone: `async_rollouts`, `served_weights` and `on_cpu`.

Imports the `worker` and what a user of it may, `requests` for its end tokens and prompts with images, `control` for
its report of updates, `structured_outputs`, `integrations.gloo_weights`, `samebit.weight_sync` for what a class keeps
in float32, and of `samebit.kernels` what a trainer may.
"""

from samebit.rollout.integrations.trl import versions  # noqa: F401  (before what needs TRL)

# isort: split
from samebit.rollout.integrations.trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer"]
