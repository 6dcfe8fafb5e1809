"""Compute the gates of the delta rule: how much a head, or each channel of its keys, forgets at a token, and how
strongly the token writes.

Contract: an element depends on its own inputs alone; float32 inside and out.
"""

from typing import Any

import torch
from torch.nn import functional as F

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.shape_checks import check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.ops.dispatch import operations_for


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, beta_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``-exp(a_log) softplus(a + dt_bias)`` and ``beta_scale sigmoid(b)``.

    Args:
        a: ``[T, H]``, or by channel ``[T, H K]``, float32 or bfloat16, rows may be strided.
        b: ``[T, H]``, same dtype, rows may be strided.
        a_log: ``[H]`` float32 or bfloat16, as `dt_bias`.
        dt_bias: as wide as a.
        beta_scale: 2.0 where a model allows negative eigenvalues of its transitions.

    Returns:
        The log of the decay, in the shape of a, and the strength ``[T, H]``, float32, contiguous.

    Raises:
        ValueError: sizes that do not match.
        TypeError: a and b of two dtypes, or of one without kernels.
    """
    of_a, of_b = a.shape, b.shape  # asked for once: each time takes longer than a comparison
    if len(of_a) != 2 or len(of_b) != 2 or of_a[0] != of_b[0] or not of_b[1] or of_a[1] % of_b[1]:
        raise ValueError(
            f"a is {list(of_a)} and b {list(of_b)}; allowed: two alike, [T, H], or a [T, H K] and b [T, H]"
        )
    check_shape("a_log", a_log, of_b[1])
    check_shape("dt_bias", dt_bias, of_a[1])
    if a.dtype is not b.dtype:
        raise TypeError(f"a is {a.dtype} and b {b.dtype}; allowed: two alike")
    if not device.on_gpu(a):
        check_dtype_of_cpu(a.dtype)
        check_host("b", b)
        check_host("a_log", a_log)
        check_host("dt_bias", dt_bias)
    a_log, dt_bias = _in_float32(a_log), _in_float32(dt_bias)
    if torch.is_grad_enabled():
        decay, beta = _Gates.apply(a, b, a_log, dt_bias, beta_scale)
        return decay, beta
    return operations_for(a).gates(a, b, a_log, dt_bias, beta_scale)


def _in_float32(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter itself where it is float32: torch takes five times as long to find that out."""
    return parameter if parameter.dtype is torch.float32 else parameter.float()


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(a, b, a_log, bias)
        ctx.scale = scale
        return operations_for(a).gates(a, b, a_log, bias, scale)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad_decay: torch.Tensor, grad_beta: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, a_log, bias = ctx.saved_tensors
        rate, share = -a_log.exp(), torch.sigmoid(b.float())
        raw = a.float() + bias
        grad_raw = grad_decay * rate.repeat_interleave(a.shape[1] // b.shape[1]) * torch.sigmoid(raw)
        grad_b = grad_beta * share * (1 - share) * ctx.scale
        grad_log = (grad_decay * F.softplus(raw)).sum(0).view(len(rate), -1).sum(1) * rate
        return grad_raw.to(a.dtype), grad_b.to(b.dtype), grad_log, grad_raw.sum(0), None
