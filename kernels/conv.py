"""Depthwise causal convolution with bias and silu over ragged sequences, with autograd.

Contract: a row depends on the K - 1 inputs of its own sequence before it and on itself, be they rows of this call or
of earlier ones (the window in the state memory). One call for all sequences; float32 inside, rounded once.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import device
from .context import ForwardContext
from .cpu import conv as cpu
from .cpu.memory import kind_of, with_unit_stride
from .states import SSMOptions


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: ForwardContext, options: SSMOptions
) -> torch.Tensor:
    """``silu(conv(x) + bias)``, each channel by itself.

    Args:
        x: ``[T, W]`` float32 or bfloat16, rows may be strided.
        weight: ``[W, 1, K]`` as in ``nn.Conv1d``; the last tap is the row itself.
        bias: ``[W]`` or None.
        context: the layout of the T rows. With states (rollout) no gradient flows and the windows move on.
        options: the layer's.

    Returns:
        ``[T, W]`` contiguous, same dtype; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's.
        TypeError: states of another dtype.
    """
    if x.shape[0] != context.num_rows:
        raise ValueError(f"x has {x.shape[0]} rows, the context {len(context.positions)}")
    if device.on_gpu(x):
        from .triton import conv as gpu

        return gpu.causal_conv(x, weight, bias, context, options)
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    if context.states is None and torch.is_grad_enabled():
        out: torch.Tensor = _CausalConv.apply(x, weight, bias, context)
        return out
    return _convolve(x, weight, bias, context, options)


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions | None,
) -> torch.Tensor:
    rows, width = x.shape
    x = with_unit_stride(x)
    weight, bias = weight.contiguous(), bias.contiguous()
    taps = weight.shape[-1]
    out = torch.empty(rows, width, dtype=x.dtype)
    windows, block_windows, captured, captures, kept, grid = 0, 0, 0, 0, 0, 0
    if context.states is not None and options is not None:
        layer = context.states.layers[options.layer]
        if layer.window.dtype != x.dtype:
            raise TypeError(
                f"the convolution's input is {x.dtype}, but the states are {layer.window.dtype}: "
                "the model changed its dtype after the rollout worker was built"
            )
        windows, block_windows = layer.window.data_ptr(), layer.block_window.data_ptr()
        captures, grid = len(context.captures), context.block_size
        if captures:
            captured = context.captured.data_ptr()
            kept = context.states.checkpoints[options.layer].window.data_ptr()
    cpu.convolve(
        x.numel() * taps, x.data_ptr(), x.stride(0), weight.data_ptr(), bias.data_ptr(), rows, width, taps,
        context.row_table.data_ptr(), context.layout.data_ptr(), len(context.lengths), grid, windows, block_windows,
        captured, captures, kept, out.data_ptr(), kind_of(x.dtype), kind_of(weight.dtype),
        kind_of(bias.dtype),
    )  # fmt: skip
    return out


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.layout = context
        return _convolve(x, weight, bias, context, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        sequence, within = (torch.from_numpy(part) for part in ctx.layout.tokens_of_rows)
        x, weight, bias = ctx.saved_tensors
        return *gradients(x, weight, bias, grad, sequence, within), None


def gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    grad: torch.Tensor,
    sequence: torch.Tensor,
    within: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of x, weight and bias; ``sequence`` and ``within``: ``[T]`` as in `ForwardContext.tokens_of_rows`."""
    taps = weight[:, 0, :].float().t()
    inputs = x.float()
    shifted = [_back(inputs, sequence, within, len(taps) - 1 - k) for k in range(len(taps))]
    before = bias.float() + sum(part * tap for part, tap in zip(shifted, taps, strict=True))
    gate = torch.sigmoid(before)
    upstream = grad.float() * gate * (1 + before * (1 - gate)) * (sequence >= 0)[:, None]
    grad_x = torch.zeros_like(inputs)
    for k, tap in enumerate(taps):
        distance = len(taps) - 1 - k
        seen = upstream * (within >= distance)[:, None]
        grad_x[: len(x) - distance] += seen[distance:] * tap
    grad_weight = torch.stack([(upstream * part).sum(0) for part in shifted], dim=-1)[:, None]
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), upstream.sum(0).to(bias.dtype)


def _back(x: torch.Tensor, sequence: torch.Tensor, within: torch.Tensor, distance: int) -> torch.Tensor:
    """Each row's input ``distance`` rows earlier in its sequence, 0 where there is none."""
    moved = F.pad(x, (0, 0, distance, 0))[: len(x)]
    return moved * ((sequence >= 0) & (within >= distance))[:, None]
