"""How weights travel into a model: what may be offered, what is checked, what is written.

Knows nothing of `samebit.rollout` or `samebit.kernels`.
"""

from samebit.weight_sync.apply import PreparedUpdate, SyncReport, apply_weights, prepare_update
from samebit.weight_sync.manifest import (
    Manifest,
    NonFiniteWeightError,
    TensorSpec,
    WeightMismatchError,
)
from samebit.weight_sync.source import TensorSource, WeightSourceError, open_source

__all__ = [
    "Manifest",
    "NonFiniteWeightError",
    "PreparedUpdate",
    "SyncReport",
    "TensorSource",
    "TensorSpec",
    "WeightMismatchError",
    "WeightSourceError",
    "apply_weights",
    "open_source",
    "prepare_update",
]
