"""Put samebit into TRL: its trainers, with the same names, with exact rollouts (docs/trl.md).

`GRPOTrainer` and `RLOOTrainer` (`trainers`) sample between two steps, `AsyncGRPOTrainer` (`async_trainer`) beside them.
"""

from samebit.rollout.integrations.trl.versions import check_version

check_version()

# isort: split
from samebit.rollout.integrations.trl.trainers import GRPOTrainer, RLOOTrainer

__all__ = ["GRPOTrainer", "RLOOTrainer"]
