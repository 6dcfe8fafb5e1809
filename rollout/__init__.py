"""Who runs when, on which memory: the rollout worker and what it is made of.

A name is loaded when it is first asked for: what a trainer's plugin mechanism imports of this package costs nothing and
can not fail before the plugin has a say.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "ModelLoadError": "errors",
    "NonFiniteLogitsError": "errors",
    "RequestError": "errors",
    "RequestEvent": "request",
    "RequestHandle": "handle",
    "RequestOutput": "outputs",
    "RolloutConfig": "config",
    "RolloutWorker": "worker",
    "SampleOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StreamChunk": "handle",
    "WorkerLostError": "errors",
    "WorkerStateError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("samebit.kernels")  # before torch: see samebit.kernels.openmp
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
