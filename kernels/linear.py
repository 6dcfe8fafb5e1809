"""Row-invariant linear layer, with autograd.

Contract: ``linear(x, w, b)[i]`` depends on ``x[i]`` alone, not on how many rows are multiplied with it nor
on the number of threads. The order of the sum is written out (`cpu.gemm`): torch's GEMMs keep that promise in no dtype.
In float32 a thread's share of under four rows runs another kernel; in bfloat16, on processors with tile instructions
(AMX), the number of rows and of threads decides how the sum is cut. Gradients are torch's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numba import get_num_threads
from torch import nn

from . import device
from .cpu import gemm, gemm_amx, gemm_few, tiles_amx
from .cpu.memory import kind_of
from .cpu.numeric import LANES

_DTYPES = (torch.float32, torch.bfloat16)

_PRODUCTS_AN_ELEMENT = 16
"""Products that take the time of one element of a row-wise kernel."""

Layer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight and bias."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` with bits that do not depend on the other rows.

    Args:
        x: ``[..., K]``, the dtype of ``weight``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in the same dtype.

    Raises:
        ValueError: shapes that do not match.
        TypeError: dtypes that differ, or others than float32 and bfloat16 (on a GPU float16 too).
    """
    if device.on_gpu(x):
        from .triton import linear as gpu

        return gpu.linear(x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        product: torch.Tensor = _Linear.apply(x, weight, bias)
        return product
    return _multiplied(x, weight, bias)


def linears(x: torch.Tensor, modules: Sequence[nn.Linear]) -> list[torch.Tensor]:
    """Each module's own call on the same ``x``, or one call of all where nobody could tell: the same bits.

    Args:
        x: ``[..., K]``.
        modules: up to three bound ones, each ``[N, K]``.
    """
    if not torch.is_grad_enabled() and not device.on_gpu(x):
        layers = [(module.weight, module.bias) for module in modules if _is_plain(module)]
        if len(layers) == len(modules):
            return _multiplied_at_once(x, layers)
    return [module(x) for module in modules]


def _is_plain(module: nn.Module) -> bool:
    """Whether a call does no more than multiply: no adapter in the module's place, no hook."""
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


def gradient_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``grad.T @ x``: of a weight ``[N, K]``, where ``grad`` ``[R, N]`` is that of the result of ``x`` ``[R, K]``."""
    if device.on_gpu(x):
        from .triton import linear as gpu

        return gpu.gradient_of_weight(grad, x)
    return grad.T @ x


def add_gradient_of_inputs(sums: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> None:
    """``sums += grad @ weight``: of inputs ``[R, K]``, added up in float32 over the parts ``[N, K]`` of a weight."""
    if device.on_gpu(grad):
        from .triton import linear as gpu

        sums += gpu.gradient_of_inputs(grad, weight, torch.float32)
    elif weight.dtype == torch.float32:
        sums.addmm_(grad, weight)
    else:
        sums += grad @ weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _multiplied_at_once(x, [(weight, bias)])[0]


def _multiplied_at_once(x: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """The products of up to three layers, which share the preparation of ``x`` and the start of the threads."""
    *shape, inputs = x.shape
    rows = _with_unit_stride(x if len(shape) == 1 else x.reshape(-1, inputs))
    places = list(gemm.NO_LAYERS)
    results: list[torch.Tensor] = []
    count = rows.shape[0]
    layers = [(weight.contiguous(), None if bias is None else bias.contiguous()) for weight, bias in layers]
    for place, (weight, bias) in enumerate(layers):
        outputs, depth = weight.shape
        if depth != inputs or (bias is not None and bias.shape != (outputs,)):
            raise ValueError(
                f"x is {list(x.shape)}, weight {list(weight.shape)}, "
                f"bias {None if bias is None else list(bias.shape)}; allowed: [..., K], [N, K] and [N] or None"
            )
        if not (x.dtype in _DTYPES and x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)):
            given = f"x is {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
            raise TypeError(f"{given}; allowed: all alike, of {', '.join(map(str, _DTYPES))}")
        out = torch.empty(*shape, outputs, dtype=x.dtype)
        results.append(out)
        places[place] = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs, out.data_ptr()
    work = inputs * max(place[2] for place in places) // _PRODUCTS_AN_ELEMENT
    arguments = rows.data_ptr(), rows.stride(0), count, inputs, *places
    lanes = -(-count // LANES) * LANES
    if x.dtype == torch.bfloat16 and tiles_amx.available():
        gemm_amx.multiply(lanes * work, *arguments, get_num_threads())
    elif count <= gemm_few.MOST_ROWS:
        gemm_few.multiply((count + gemm_few.READING) * work, *arguments, kind_of(x.dtype), get_num_threads())
    else:
        gemm.multiply(lanes * work, *arguments, kind_of(x.dtype), get_num_threads())
    return results


def _with_unit_stride(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
