"""Decide who runs when, on which memory: the rollout worker and what it is made of.

Floors, from the top, each importing from itself and those below: `cli` > `audit`, `fleet`, `integrations` >
`async_worker` > `worker` > `worker_interface`, `build` > `control` > `models`, `adapters`, `self_test` > `runner`,
`stats` > `engine`, `memory` > `cache`, `drafts` > `requests`, `outputs` > `config`, `sampling_params` >
`structured_outputs` > `errors`, `checks`, `guard`, `keys`, `publishing`. Any of them may import `samebit.kernels` and
`samebit.weight_sync`, which know nothing of this package.

The way through is a request's: `worker` takes it, `control` makes it a `requests.request` and steps the `engine`, which
plans on the blocks of the `cache` and has the plan computed by the `runner`, in `memory` of a model's shape; what comes
back is in `outputs`. `build` puts these together from what `models` loaded, once `self_test` has passed; `adapters` are
loaded beside a model. A `fleet` is several workers as one, `integrations` put either into other systems, `audit` checks
the promise.

A name is loaded when it is first asked for: what a trainer's plugin mechanism imports of this package costs nothing and
can not fail before the plugin has a say.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samebit.rollout.config import RolloutConfig
    from samebit.rollout.control.delivery import RequestHandle
    from samebit.rollout.errors import (
        AdapterError,
        ImageError,
        ModelLoadError,
        NonFiniteLogitsError,
        NoReplicaError,
        NoTokenLeftError,
        RequestError,
        RequestIdInUseError,
        SelfTestError,
        StreamGapError,
        TokenizerError,
        WorkerLostError,
        WorkerStateError,
    )
    from samebit.rollout.outputs import RequestOutput, SampleOutput, StreamChunk
    from samebit.rollout.requests.prompt_with_images import PromptWithImages
    from samebit.rollout.requests.shared import RequestEvent
    from samebit.rollout.sampling_params import SamplingParams
    from samebit.rollout.structured_outputs.params import StructuredOutputsParams
    from samebit.rollout.worker import RolloutWorker
    from samebit.rollout.worker_interface import UpdateOptions, Worker

__all__ = [
    "AdapterError",
    "ImageError",
    "ModelLoadError",
    "NoReplicaError",
    "NoTokenLeftError",
    "NonFiniteLogitsError",
    "PromptWithImages",
    "RequestError",
    "RequestEvent",
    "RequestHandle",
    "RequestIdInUseError",
    "RequestOutput",
    "RolloutConfig",
    "RolloutWorker",
    "SampleOutput",
    "SamplingParams",
    "SelfTestError",
    "StreamChunk",
    "StreamGapError",
    "StructuredOutputsParams",
    "TokenizerError",
    "UpdateOptions",
    "Worker",
    "WorkerLostError",
    "WorkerStateError",
]

_MODULES = ("errors", "structured_outputs.params", "sampling_params", "config",
            "requests.prompt_with_images", "requests.shared", "outputs",
            "control.delivery", "worker_interface", "worker")  # fmt: skip
"""Lists the modules of the public names, light ones first: a name is looked for in this order; the rest is not
loaded."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("samebit.kernels")  # before torch: see samebit.kernels.openmp
    modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
    return next(vars(module)[name] for module in modules if name in vars(module))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
