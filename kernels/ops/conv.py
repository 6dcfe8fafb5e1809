"""Compute the depthwise causal convolution with bias, and silu or nothing behind it, over ragged sequences, with
autograd.

Contract: a row depends on the K - 1 inputs of its own sequence before it and on itself, be they rows of this call or
of earlier ones (the window in the state memory). One call for all sequences; float32 inside, rounded once.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.shape_checks import check_host, check_shape
from samebit.kernels.layout.states.memory import LayerStates
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.errors import changed_dtype


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: ForwardContext, layer: int, *,
    silu: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Compute ``silu(conv(x) + bias)``, each channel by itself; without ``silu``, ``conv(x) + bias``.

    Args:
        x: ``[T, W]`` float32 or bfloat16, rows may be strided.
        weight: ``[W, 1, K]`` as in ``nn.Conv1d``; the last tap is the row itself.
        bias: ``[W]`` or None.
        context: the layout of the T rows. With states (rollout) no gradient flows and the windows move on.
        layer: which part of the state memory is its own.
        silu: what stands behind the sum is activated, before it is rounded.

    Returns:
        ``[T, W]`` contiguous, same dtype; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's, weight, bias or states of another shape.
        TypeError: dtypes of which there are no kernels, states of another dtype than x.
    """
    rows, width, taps = _check(x, weight, bias)
    if rows != context.num_rows:
        raise ValueError(f"x has {rows} rows, the context {context.num_rows}")
    bias = weight.new_zeros(width) if bias is None else bias
    if context.states is not None:
        _check_memory(x, (taps - 1, width), context.states.layers[layer], context)
    elif torch.is_grad_enabled():
        out: torch.Tensor = _CausalConv.apply(x, weight, bias, context, layer, silu)
        return out
    return operations_for(x).conv_forward(x, weight, bias, context, layer, silu)[0]


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int, int]:
    """Return T, W and K. (Asking a tensor for its shape takes longer than comparing it.)"""
    of_x, of_weight = x.shape, weight.shape
    if len(of_x) != 2 or len(of_weight) != 3 or not weight.numel():
        raise ValueError(f"x is {list(of_x)} and weight {list(of_weight)}; allowed: [T, W] and [W, 1, K]")
    (rows, width), taps = of_x, of_weight[2]
    check_shape("weight", weight, width, 1, taps)
    if bias is not None:
        check_shape("bias", bias, width)
    if not device.on_gpu(x):
        check_host("weight", weight)
        if bias is not None:
            check_host("bias", bias)
    return rows, width, taps


def _check_memory(x: torch.Tensor, window: tuple[int, int], memory: LayerStates, context: ForwardContext) -> None:
    if memory.dtype is not x.dtype:
        raise changed_dtype(f"the convolution's input is {x.dtype}", "states", memory.dtype)
    if not device.on_gpu(x):
        slots, kept, held = memory.windows
        if held != window:
            raise ValueError(f"the layer's window has the shape {held} a slot; allowed: {window}")
        if context.last_slot >= slots:
            raise ValueError(f"slot {context.last_slot} is to be read; the layer has {slots} of them")
        if kept != window[0] and not windows_align(memory, context):
            raise ValueError(
                f"a window of {kept} rows, blocks of {context.block_size} tokens, captures "
                f"{context.captures.tolist()}; allowed: rows that divide a block and the positions (the second numbers)"
            )


def windows_align(memory: LayerStates, context: ForwardContext) -> bool:
    """Return whether a layer's windows have the inputs before each block boundary and capture where checkpoints do."""
    _, rows, (size, _) = memory.windows
    if rows == size:
        return True
    return not (context.block_size % rows or (len(context.captures) and (context.captures[:, 1] % rows).any()))


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, context: ForwardContext, layer: int,
        silu: bool,
    ) -> torch.Tensor:  # fmt: skip
        kernels = ctx.kernels = operations_for(x)
        out, saved = kernels.conv_forward(x, weight, bias, context, layer, silu)
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.silu = context, silu
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        return *ctx.kernels.conv_backward(ctx.saved_tensors, grad, ctx.layout, ctx.silu), None, None, None
