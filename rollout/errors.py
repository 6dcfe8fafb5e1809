"""Define the errors a user of the rollout worker can meet, by whose fault they are."""

from __future__ import annotations


class RequestError(ValueError):
    """The request is wrong; nothing was submitted and the worker goes on serving all else."""


class RequestIdInUseError(RequestError):
    """A request with this id has not ended yet; once it has, the same request would be taken."""


class WorkerStateError(RuntimeError):
    """The worker can not do this now: closed, asleep, paused, broken, or its weights are incomplete.

    Where something broke it, that error is the `__cause__`.
    """


class WorkerLostError(WorkerStateError):
    """The process that the worker ran in died or does not answer; what it was generating is lost."""


class NoReplicaError(WorkerStateError):
    """No replica of the fleet takes requests now; says why each does not."""


class StreamGapError(RuntimeError):
    """Tokens of a stream were lost between a replica and its fleet's front; the request was ended."""


class NonFiniteLogitsError(RuntimeError):
    """The model gave NaN or infinite logits for this request; the other requests are not concerned."""


class NoTokenLeftError(RuntimeError):
    """The logits are finite, but this request's own parameters leave no token to choose; no other is concerned."""


class TokenizerError(RuntimeError):
    """The tokenizer could not decode this request's tokens; no other is concerned.

    What the tokenizer raised is the `__cause__`, where it raised.
    """


class ImageError(RuntimeError):
    """The model could not compute an image of this request, which is no other's concern.

    What its vision raised is the `__cause__`.
    """


class ModelLoadError(ValueError):
    """The folder or module can not be served: no such folder, no weights, NaN in them, wrong dtype."""


class SelfTestError(RuntimeError):
    """A row has other bits in another call on this machine; no worker was started. Names the first module to differ."""


class AdapterError(ValueError):
    """The adapter can not be served; nothing was loaded, and the worker goes on serving all else."""
