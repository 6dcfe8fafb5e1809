"""Put samebit into TRL: its trainers, with the same names, with exact rollouts (docs/trl.md).

`GRPOTrainer` and `RLOOTrainer` (`trainers`) sample between two steps, `AsyncGRPOTrainer` (`async_trainer`) beside them.
"""

from samebit.rollout.integrations.trl import versions  # noqa: F401  (before what needs TRL)

# isort: split
from samebit.rollout.integrations.trl.async_trainer import AsyncGRPOTrainer
from samebit.rollout.integrations.trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["AsyncGRPOTrainer", "GRPOTrainer", "RLOOTrainer"]
