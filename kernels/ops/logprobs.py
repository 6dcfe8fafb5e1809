"""Compute log-probabilities by the one formula: log-softmax of the unprocessed logits divided by the temperature; and
entropy.

Contract: float32, a fixed order over the vocabulary, a row depends on that row alone. The sampler reports
these numbers and the trainer differentiates them; there is no second formula.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.options import Reduced
from samebit.kernels.layout.shape_checks import check_dtype, check_host, check_readable, check_shape
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.score_arguments import (
    check_ids,
    check_in_vocabulary,
    check_temperatures,
    temperatures_of,
)


def logprobs_from_logits(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Compute the log-probability of each given token, differentiable in ``logits``.

    Args:
        logits: ``[..., V]``; anything but float32 is widened first.
        token_ids: ``[...]`` int64, each in ``[0, V)``.
        temperature: a positive number, or a tensor that broadcasts to ``[...]``.

    Returns:
        ``[...]`` float32.

    Raises:
        ValueError: shapes that do not match, ids outside the vocabulary, a temperature that is not positive.
        TypeError: ids that are no integers, logits that are no floating-point numbers, tensors without values.
    """
    check_ids("token_ids", token_ids)
    _check_given(logits)
    if token_ids.shape != logits.shape[:-1]:
        raise ValueError(f"token_ids must have shape {tuple(logits.shape[:-1])}, got {tuple(token_ids.shape)}")
    rows, temperatures = _rows(logits, temperature)
    tokens = token_ids.reshape(-1).long()
    check_in_vocabulary("token_ids", tokens, rows.shape[1])
    return _logprobs(rows, tokens, temperatures).view(token_ids.shape)


def logprobs_of_rows(logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Do as `logprobs_from_logits`, of ids and temperatures known to be good: on a GPU its checks wait for the device.

    Args:
        logits: ``[T, V]``, on the CPU float32 or bfloat16.
        token_ids: ``[T]`` int64.
        temperatures: ``[T]`` float32, on the device of the logits.

    Returns:
        ``[T]`` float32.
    """
    _check(logits, tokens=token_ids, temperatures=temperatures)
    return _logprobs(logits, token_ids, temperatures)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Compute `logprobs_of_rows` of logits of any dtype."""
    if torch.is_grad_enabled() and logits.requires_grad:
        out: torch.Tensor = _Gather.apply(logits, tokens, temperatures)
        return out
    return operations_for(logits).gather(logits, tokens, temperatures)[0]


def entropy_from_logits(logits: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Compute the entropy of the distribution of each row, differentiable in ``logits``.

    Args:
        logits: ``[..., V]``; anything but float32 is widened first.
        temperature: a positive number, or a tensor that broadcasts to ``[...]``.

    Returns:
        ``[...]`` float32, in nats.

    Raises:
        ValueError: a temperature that is not positive.
        TypeError: logits that are no floating-point numbers.
    """
    _check_given(logits)
    rows, temperatures = _rows(logits, temperature)
    if torch.is_grad_enabled() and rows.requires_grad:
        out: torch.Tensor = _Entropy.apply(rows, temperatures)
    else:
        out = operations_for(rows).entropies(rows, temperatures)[0]
    return out.view(logits.shape[:-1])


def _check_given(logits: object) -> None:
    """Check what a caller calls logits."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits must be a tensor of floating-point numbers, [..., V], got {type(logits).__name__}")
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be a tensor of floating-point numbers, [..., V], got {logits.dtype}")
    check_readable("logits", logits)
    if not logits.dim():
        raise ValueError("logits is a single number; allowed: [..., V]")
    if not logits.shape[-1]:
        raise ValueError(f"logits has the shape {list(logits.shape)}; allowed: [..., V], V at least 1")


def _rows(logits: torch.Tensor, temperature: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits as ``[T, V]``, and the temperatures as ``[T]`` float32; kernels widen logits themselves."""
    temperatures = temperatures_of(temperature, logits.shape[:-1], logits.device).reshape(-1)
    check_temperatures(temperatures)
    return logits.reshape(-1, logits.shape[-1]), temperatures


def _check(logits: torch.Tensor, **of_row: torch.Tensor) -> None:
    """Check that the others have one element a row, and on the CPU that all are what its kernels read."""
    if logits.dim() != 2:
        raise ValueError(f"logits has the shape {list(logits.shape)}; allowed: [R, V]")
    for name, part in of_row.items():
        check_shape(name, part, len(logits))
        if not device.on_gpu(logits):
            check_host(name, part)
            if name != "grad":
                check_dtype(name, part, torch.int64 if name == "tokens" else torch.float32)
    if not device.on_gpu(logits):
        check_dtype("logits", logits, *device.DTYPES["cpu"])


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Compute every token's log-probability, the same bits as `logprobs_from_logits`; no gradient.

    Args:
        logits: ``[T, V]``.
        temperatures: ``[T]`` float32, positive.

    Returns:
        ``[T, V]`` float32.
    """
    _check(logits, temperatures=temperatures)
    return operations_for(logits).log_softmax(logits, temperatures)


def gather(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Compute each row's token's log-probability, and the normalisers; as `logprobs_of_rows`, no gradient."""
    _check(logits, tokens=tokens, temperatures=temperatures)
    return operations_for(logits).gather(logits, tokens, temperatures)


def gather_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute the gradient ``[T, N]`` of N logits of each row, all or a part of the vocabulary, in their dtype.

    Args:
        logits: ``[T, N]``.
        tokens: ``[T]`` int64, counted from the first of these logits; outside of ``[0, N)`` in other parts.
        temperatures: ``[T]`` float32.
        peaks, log_totals: ``[T]`` normalisers of whole rows, by `gather`.
        grad: ``[T]``, of the log-probabilities.
    """
    _check(logits, tokens=tokens, temperatures=temperatures, peaks=peaks, log_totals=log_totals, grad=grad)
    kernels = operations_for(logits)
    return kernels.gather_gradient(logits, tokens, temperatures, peaks, log_totals, grad)


def entropies(logits: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Compute each row's entropy, and the normalisers; ``logits``: as in `logprobs_of_rows`, no gradient."""
    _check(logits, temperatures=temperatures)
    return operations_for(logits).entropies(logits, temperatures)


def entropy_gradient(
    logits: torch.Tensor, temperatures: torch.Tensor, entropies: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute what `gather_gradient` does, for the ``entropies`` ``[T]``."""
    _check(logits, temperatures=temperatures, entropies=entropies, peaks=peaks, log_totals=log_totals, grad=grad)
    kernels = operations_for(logits)
    return kernels.entropy_gradient(logits, temperatures, entropies, peaks, log_totals, grad)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(logits)
        out, *normalisers = kernels.gather(logits, tokens, temperatures)
        ctx.save_for_backward(logits, tokens, temperatures, *normalisers)
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.kernels.gather_gradient(*ctx.saved_tensors, grad), None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(logits)
        out, *normalisers = kernels.entropies(logits, temperatures)
        ctx.save_for_backward(logits, temperatures, out.clone(), *normalisers)  # callers may write to `out`
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.kernels.entropy_gradient(*ctx.saved_tensors, grad), None
