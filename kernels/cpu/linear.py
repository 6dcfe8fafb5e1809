"""Compute the linear layer on the CPU: choose among the matrix products in `gemm`; gradients in bfloat16, those of
a few rows, and those on processors without AVX-512 are torch's.

T rows, K inputs, N outputs. Up to three layers of one input share the preparation of it and the start of the threads.
"""

from collections.abc import Sequence

import torch

from samebit.kernels.cpu import weight_gradient
from samebit.kernels.cpu.activation import gated_forward
from samebit.kernels.cpu.base.memory import kind_of, with_unit_stride
from samebit.kernels.cpu.base.vectors import REGISTERS
from samebit.kernels.cpu.gemm import amx, amx_tiles, dots, dots_vectors, few_rows, many_rows
from samebit.kernels.cpu.gemm.layers import in_one
from samebit.kernels.cpu.transpose import transposed
from samebit.kernels.layout.grids import LANES, ceil_div
from samebit.kernels.layout.options import Layer, Saved

_ROWS_OF_GRADIENTS = 64
"""With fewer rows torch's products are faster."""

PRODUCTS_AN_ELEMENT = 16
"""Products that take the time of one element of a row-wise kernel."""


def multiply_part(x: torch.Tensor, part: Layer, outputs: int) -> torch.Tensor:
    """Implement `Operations.multiply_part`: here the order of a sum is no matter of a layer's outputs."""
    return multiply(x, (part,))[0]


def multiply(x: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """Implement `Operations.multiply`."""
    *shape, inputs = x.shape
    rows, stride = with_unit_stride(x if len(shape) == 1 else x.reshape(-1, inputs))
    count, dtype = rows.size(0), x.dtype
    addresses: list[int] = []
    results: list[torch.Tensor] = []
    held = []  # what the addresses point to
    for weight, bias in layers:
        weight, bias, outputs = weight.contiguous(), None if bias is None else bias.contiguous(), weight.size(0)
        out = torch.empty(*shape, outputs, dtype=dtype, device="cpu")
        addresses += weight.data_ptr(), 0 if bias is None else bias.data_ptr(), outputs, out.data_ptr()
        held.append((weight, bias))
        results.append(out)
    work = inputs * max(addresses[2::4]) // PRODUCTS_AN_ELEMENT
    arguments = rows.data_ptr(), stride, count, inputs, in_one(addresses)
    lanes = ceil_div(count, LANES) * LANES
    if dtype == torch.bfloat16 and amx_tiles.available():
        amx.multiply(lanes * work, *arguments)
    elif dtype == torch.bfloat16 and dots_vectors.available():
        few = count <= dots.MOST_ROWS
        product, size = (dots.multiply_few, count + few_rows.READING) if few else (dots.multiply, lanes)
        product(size * work, *arguments)
    elif count <= few_rows.MOST_ROWS:
        few_rows.multiply((count + few_rows.READING) * work, *arguments, kind_of(dtype))
    else:
        many_rows.multiply(lanes * work, *arguments, kind_of(dtype))
    return results


def multiply_gated(
    activation: str, x: torch.Tensor, layers: Sequence[Layer], *, kept: bool
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.multiply_gated`."""
    gate, up = multiply(x, layers)
    return gated_forward(activation, gate, up)


def gradient_of_inputs(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.gradient_of_inputs`."""
    if not _by_own_kernels(grad):
        return torch_product(grad, weight)
    return multiply(grad, ((transposed(weight), None),))[0]


def gradient_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.gradient_of_weight`."""
    if not _by_own_kernels(grad):
        return torch_product(grad.T, x)
    out = torch.empty(grad.size(1), x.size(1), dtype=grad.dtype, device="cpu")
    write_gradient_of_weight(grad, x, out)
    return out


def write_gradient_of_weight(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Write `gradient_of_weight` to a contiguous ``[N, K]``."""
    if not _by_own_kernels(grad):
        out.copy_(torch_product(grad.T, x))
        return
    (grad, grad_stride), (x, x_stride) = with_unit_stride(grad), with_unit_stride(x)
    (rows, outputs), inputs = grad.shape, x.size(1)
    weight_gradient.multiply(
        rows * outputs * inputs // PRODUCTS_AN_ELEMENT,
        grad.data_ptr(), grad_stride, x.data_ptr(), x_stride, rows, inputs, outputs, out.data_ptr(),
    )  # fmt: skip


def add_gradient_of_inputs(sums: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> None:
    """Implement `Operations.add_gradient_of_inputs`."""
    sums += gradient_of_inputs(grad, weight)


def torch_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return torch's product of matrices, for gradients, rounded once.

    Without instructions for bfloat16 torch takes up to a hundred times as long for it as for float32.
    """
    if left.dtype == torch.bfloat16 and not dots_vectors.available():
        return torch.matmul(left.float(), right.float()).to(left.dtype)
    return torch.matmul(left, right)


def _by_own_kernels(grad: torch.Tensor) -> bool:
    """Return whether gradients are not torch's: in float32, where there are rows enough to turn a weight over for, and
    AVX-512; without it torch's are faster."""
    enough = grad.numel() >= _ROWS_OF_GRADIENTS * grad.size(-1)
    return REGISTERS == 32 and grad.dtype == torch.float32 and enough
