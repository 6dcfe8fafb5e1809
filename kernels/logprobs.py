"""The one formula for log-probabilities: log-softmax of the unprocessed logits divided by the temperature; and entropy.

Contract: float32, a fixed order over the vocabulary, a row depends on that row alone. The sampler reports
these numbers and the trainer differentiates them; there is no second formula.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import device
from .cpu import logprobs as cpu


def logprobs_from_logits(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor = 1.0
) -> torch.Tensor:
    """Log-probability of each given token, differentiable in ``logits``.

    Args:
        logits: ``[..., V]``; anything but float32 is widened first.
        token_ids: ``[...]`` int64, each in ``[0, V)``.
        temperature: a positive number, or a tensor that broadcasts to ``[...]``.

    Returns:
        ``[...]`` float32.

    Raises:
        ValueError: shapes that do not match, ids outside the vocabulary, a temperature that is not positive.
    """
    if token_ids.shape != logits.shape[:-1]:
        raise ValueError(f"token_ids must have shape {tuple(logits.shape[:-1])}, got {tuple(token_ids.shape)}")
    rows, temperatures = _rows(logits, temperature)
    tokens = token_ids.reshape(-1)
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= rows.shape[1]):
        raise ValueError(f"token_ids must lie in [0, {rows.shape[1]}), got {int(tokens.min())}..{int(tokens.max())}")
    return logprobs_of_rows(rows, tokens, temperatures).view(token_ids.shape)


def logprobs_of_rows(logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """`logprobs_from_logits` of ids and temperatures known to be good: on a GPU its checks wait for the device.

    Args:
        logits: ``[R, V]``; on the CPU float32.
        token_ids: ``[R]`` int64.
        temperatures: ``[R]`` float32, on the device of the logits.

    Returns:
        ``[R]`` float32.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        out: torch.Tensor = _Gather.apply(logits, token_ids, temperatures)
        return out
    return gather(logits, token_ids, temperatures)[0]


def entropy_from_logits(logits: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Entropy of the distribution of each row, differentiable in ``logits``.

    Args:
        logits: ``[..., V]``; anything but float32 is widened first.
        temperature: a positive number, or a tensor that broadcasts to ``[...]``.

    Returns:
        ``[...]`` float32, in nats.

    Raises:
        ValueError: a temperature that is not positive.
    """
    rows, temperatures = _rows(logits, temperature)
    if torch.is_grad_enabled() and rows.requires_grad:
        out: torch.Tensor = _Entropy.apply(rows, temperatures)
    else:
        out = entropies(rows, temperatures)[0]
    return out.view(logits.shape[:-1])


def _rows(logits: torch.Tensor, temperature: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[R, V]`` and ``[R]``, both float32; on a GPU the logits as they are, the kernels widen them."""
    temperatures = (
        torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(logits.shape[:-1]).reshape(-1)
    )
    if not bool((temperatures > 0).all()):
        raise ValueError(f"temperature must be positive, got {temperature!r}")
    rows = logits.reshape(-1, logits.shape[-1])
    return rows if device.on_gpu(rows) else rows.float(), temperatures


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Every token's log-probability, the same bits as `logprobs_from_logits`; no gradient.

    Args:
        logits: ``[R, V]`` float32.
        temperatures: ``[R]`` float32, positive.
    """
    if device.on_gpu(logits):
        from .triton import logprobs as gpu

        return gpu.log_softmax(logits, temperatures)
    out = torch.empty(logits.shape, dtype=torch.float32)
    cpu.log_softmax(logits.numel(), logits.detach().contiguous().numpy(), temperatures.numpy(), out.numpy())
    return out


Reduced = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``[R]`` float32 each: a value of every row, and its normaliser: the peak and the log of the sum above it."""


def gather(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Each row's token's log-probability, and the normalisers; arguments as in `logprobs_of_rows`, no gradient."""
    if device.on_gpu(logits):
        from .triton import logprobs as gpu

        return gpu.gather(logits.detach(), tokens, temperatures)
    out, peaks, log_totals = torch.empty(3, logits.shape[0], dtype=torch.float32).unbind(0)
    cpu.gather(
        logits.numel(), logits.detach().contiguous().numpy(), tokens.contiguous().numpy(),
        temperatures.contiguous().numpy(), out.numpy(), peaks.numpy(), log_totals.numpy(),
    )  # fmt: skip
    return out, peaks, log_totals


def gather_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``[R, N]``: the gradient of N logits of each row, all or a part of the vocabulary.

    Args:
        logits: ``[R, N]``.
        tokens: ``[R]`` int64, counted from the first of these logits; outside of ``[0, N)`` in other parts.
        temperatures: ``[R]`` float32.
        peaks, log_totals: ``[R]`` normalisers of whole rows, by `gather`.
        grad: ``[R]``, of the log-probabilities.
    """
    if device.on_gpu(logits):
        from .triton import logprobs as gpu

        return gpu.gather_gradient(logits.detach(), tokens, temperatures, peaks, log_totals, grad)
    out = torch.empty(logits.shape, dtype=torch.float32)
    cpu.gather_backward(
        logits.numel(), logits.detach().contiguous().numpy(), tokens.contiguous().numpy(),
        temperatures.contiguous().numpy(), peaks.numpy(), log_totals.numpy(), grad.float().contiguous().numpy(),
        out.numpy(),
    )  # fmt: skip
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        out, *normalisers = gather(logits, tokens, temperatures)
        ctx.save_for_backward(logits, tokens, temperatures, *normalisers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, tokens, temperatures, peaks, log_totals = ctx.saved_tensors
        return gather_gradient(logits, tokens, temperatures, peaks, log_totals, grad), None, None


def entropies(logits: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Each row's entropy, and the normalisers; ``logits``: as in `logprobs_of_rows`, no gradient."""
    if device.on_gpu(logits):
        from .triton import logprobs as gpu

        return gpu.entropies(logits.detach(), temperatures)
    out, peaks, log_totals = torch.empty(3, logits.shape[0], dtype=torch.float32).unbind(0)
    cpu.entropy(
        logits.numel(), logits.detach().contiguous().numpy(), temperatures.contiguous().numpy(), out.numpy(),
        peaks.numpy(), log_totals.numpy(),
    )  # fmt: skip
    return out, peaks, log_totals


def entropy_gradient(
    logits: torch.Tensor, temperatures: torch.Tensor, entropies: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `gather_gradient`, of the ``entropies`` ``[R]``."""
    if device.on_gpu(logits):
        from .triton import logprobs as gpu

        return gpu.entropy_gradient(logits.detach(), temperatures, entropies, peaks, log_totals, grad)
    out = torch.empty(logits.shape, dtype=torch.float32)
    cpu.entropy_backward(
        logits.numel(), logits.detach().contiguous().numpy(), temperatures.contiguous().numpy(), entropies.numpy(),
        peaks.numpy(), log_totals.numpy(), grad.float().contiguous().numpy(), out.numpy(),
    )  # fmt: skip
    return out


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        out, *normalisers = entropies(logits, temperatures)
        ctx.save_for_backward(logits, temperatures, out, *normalisers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, temperatures, values, peaks, log_totals = ctx.saved_tensors
        return entropy_gradient(logits, temperatures, values, peaks, log_totals, grad), None
