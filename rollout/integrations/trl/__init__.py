"""Put samebit into TRL: its trainers, with the same names, with exact rollouts (docs/trl.md).

`GRPOTrainer` and `RLOOTrainer` (`trainers`) sample between two steps. `AsyncGRPOTrainer`, in `async_grpo`, samples
beside them: it is imported from there, since TRL warns of what is experimental.
"""

from samebit.rollout.integrations.trl import versions  # noqa: F401  (before what needs TRL)

# isort: split
from samebit.rollout.integrations.trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer"]
