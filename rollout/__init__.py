"""Who runs when, on which memory: the rollout worker and what it is made of."""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
from samebit.rollout.config import RolloutConfig
from samebit.rollout.errors import (
    ModelLoadError,
    NonFiniteLogitsError,
    RequestError,
    WorkerLostError,
    WorkerStateError,
)
from samebit.rollout.handle import RequestHandle, StreamChunk
from samebit.rollout.outputs import RequestOutput, SampleOutput
from samebit.rollout.request import RequestEvent
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.worker import RolloutWorker

__all__ = [
    "ModelLoadError",
    "NonFiniteLogitsError",
    "RequestError",
    "RequestEvent",
    "RequestHandle",
    "RequestOutput",
    "RolloutConfig",
    "RolloutWorker",
    "SampleOutput",
    "SamplingParams",
    "StreamChunk",
    "WorkerLostError",
    "WorkerStateError",
]
