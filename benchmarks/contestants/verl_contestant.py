"""Register `verl_huggingface` with verl, as `actor_rollout_ref.rollout.name=huggingface`.

Every process of verl imports this, by VERL_USE_EXTERNAL_MODULES, while verl's own `__init__` is running: the replica is
loaded later.
"""

from verl.workers.rollout import base, replica

NAME = "huggingface"


def replica_class() -> type:
    """Return the replica whose servers generate with Hugging Face's model."""
    from samebit.benchmarks.contestants.verl_huggingface import HuggingFaceReplica

    return HuggingFaceReplica


base._ROLLOUT_REGISTRY[(NAME, "async")] = "samebit.rollout.integrations.verl.trainer.rollout.SamebitRollout"
replica.RolloutReplicaRegistry.register(NAME, replica_class)
