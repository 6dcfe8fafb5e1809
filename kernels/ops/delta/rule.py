"""Compute the gated delta rule over ragged sequences, with autograd (Gated DeltaNet: Yang et al. 2024).

Contract: chunks are anchored at position 0 of each sequence, and a row is the chunk's formula on its chunk's tail up to
itself, in prefill, mixed batches, decode and training alike (see `samebit.kernels.cpu.delta.rule`). A decode step reads
the state as of the chunk boundary, which is written once a chunk. The chunk of the arithmetic is a constant;
``ssm_chunk`` is the grid on which states are kept, and changes no bit.
"""

from typing import Any

import torch

from samebit.kernels.layout import device
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.options import DeltaOptions
from samebit.kernels.layout.shape_checks import check_dtype_of_cpu, check_host, check_shape
from samebit.kernels.layout.states.delta import DeltaStates
from samebit.kernels.ops.delta.gradients import gradients_by_channel
from samebit.kernels.ops.dispatch import operations_for
from samebit.kernels.ops.errors import changed_dtype


def delta_rule(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, context: ForwardContext, options: DeltaOptions
) -> torch.Tensor:
    """Run every sequence of the call through its state: ``S <- exp(g) S; S <- S + k^T beta (v - k S); o = q S``.

    Queries and keys are divided by the root of their sum of squares, queries also by that of K; value head h reads key
    head ``h // (Hv / Hk)``.

    Args:
        qkv: ``[T, 2 Hk K + Hv V]`` float32 or bfloat16, contiguous: q, k and v after the convolution.
        decay: ``[T, Hv]`` float32, g, the log of what is left of the state: at most 0.
        beta: ``[T, Hv]`` float32, how strongly a token writes.
        context: the layout of the T rows. With states (rollout) no gradient flows and the slots move on.
        options: the layer's.

    Returns:
        ``[T, Hv V]`` in the dtype of ``qkv``; zero for padding rows.

    Raises:
        ValueError: rows that are not the context's, sizes that do not match each other, the options or the states,
            captures between the grid's lines.
        TypeError: inputs of other dtypes, states of another than qkv, or of another kind of layer.
    """
    _check(qkv, decay, beta, context.num_rows, options)
    if not decay.dtype is beta.dtype is torch.float32:
        raise TypeError(f"decay and beta are {decay.dtype} and {beta.dtype}; allowed: float32")
    if context.states is not None:
        _check_memory(qkv, context.states.layer(options.layer, DeltaStates), context, options)
    elif torch.is_grad_enabled():
        out: torch.Tensor = _DeltaRule.apply(qkv, decay, beta, context, options)
        return out
    return operations_for(qkv).delta_rule(qkv, decay, beta, context, options)


def _check(qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, rows: int, options: DeltaOptions) -> None:
    """Check what is given; ``rows``: the context's."""
    shape = qkv.shape  # (of a tensor, ``len`` takes four times as long)
    if len(shape) != 2 or shape[1] != options.width:
        raise ValueError(f"qkv is {list(shape)}; allowed: [T, {options.width}], q, k and v of the heads of {options}")
    if shape[0] != rows:
        raise ValueError(f"qkv has {shape[0]} rows, the context {rows}")
    check_shape("decay", decay, rows, options.decays)
    check_shape("beta", beta, rows, options.value_heads)
    if not device.on_gpu(qkv):
        check_host("qkv", qkv)
        check_host("decay", decay)
        check_host("beta", beta)
        check_dtype_of_cpu(qkv.dtype)


def _check_memory(qkv: torch.Tensor, memory: DeltaStates, context: ForwardContext, options: DeltaOptions) -> None:
    if memory.dtype is not qkv.dtype:
        raise changed_dtype(f"qkv is {qkv.dtype}", "states", memory.dtype)
    if not device.on_gpu(qkv):
        slots, of_state, of_keys = memory.shapes
        if (of_state, of_keys) != options.shapes_of_slot:
            raise ValueError(
                f"the layer's state has the shape {of_state} a slot, its tail of keys {of_keys}; "
                f"allowed: {options.shapes_of_slot}"
            )
        if context.last_slot >= slots:
            raise ValueError(f"slot {context.last_slot} is to be read; the layer has {slots} of them")
    if len(context.captures) and bool((context.captures[:, 1] % options.chunk).any()):
        raise ValueError(f"captures {context.captures.tolist()} must lie on chunk boundaries (chunk {options.chunk})")


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, context: ForwardContext,
        options: DeltaOptions,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(qkv, decay, beta)
        ctx.layout, ctx.options = context, options
        return operations_for(qkv).delta_rule(qkv, decay, beta, context, options)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_channel = ctx.options.by_channel
        backward = gradients_by_channel if by_channel else operations_for(grad).delta_rule_backward
        return *backward(ctx.saved_tensors, grad, ctx.layout, ctx.options), None, None
