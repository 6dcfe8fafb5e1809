"""Add products of low rank to the results of linear layers on the CPU: for a few rows in one kernel, which starts once
for up to three layers, and otherwise by the linear layer's own.

Invariant: the kernel multiplies by the code of `gemm.few_rows`, and scales, adds and rounds as separate operations: its
bits are those of the steps apart. A panel of rows is one thread's. T rows, K inputs, N outputs, r the rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from samebit.kernels.cpu.base.jit import RowKernel
from samebit.kernels.cpu.base.memory import elements, floats, kind_of, scratch, with_unit_stride
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.gemm.few_rows import MOST_ROWS, copy_rows, multiply_share
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, Share
from samebit.kernels.cpu.linear import PRODUCTS_AN_ELEMENT, multiply
from samebit.kernels.layout.lora.adapters import LowRank

MOST_FUSED = 16
"""Up to so many rows, starting kernels takes longer than what panels of a few rows lose."""

_FIELDS = 6


def add_low_rank(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: Sequence[LowRank]) -> list[torch.Tensor]:
    """Implement `Operations.add_low_rank`."""
    rows = with_unit_stride(x.reshape(-1, x.shape[-1]))
    if len(rows) > MOST_FUSED or any(term.down.dtype != torch.float32 for term in terms):
        return _step_by_step(bases, x, terms)
    held = [
        (base.contiguous(), term.down.contiguous(), term.up.contiguous())
        for base, term in zip(bases, terms, strict=True)
    ]
    results = [torch.empty_like(base) for base, _, _ in held]
    addresses: list[int] = []
    work = 0
    for (base, down, up), out in zip(held, results, strict=True):
        addresses += down.data_ptr(), len(down), up.data_ptr(), len(up), base.data_ptr(), out.data_ptr()
        work += down.numel() + up.numel()
    layers = (*addresses, *(0,) * (MOST_LAYERS * _FIELDS - len(addresses)))
    scales = (*(term.scale for term in terms), *(0.0,) * (MOST_LAYERS - len(terms)))
    _add(
        len(rows) * work // PRODUCTS_AN_ELEMENT,
        rows.data_ptr(), rows.stride(0), len(rows), x.shape[-1], layers, scales, kind_of(x.dtype),
    )  # fmt: skip
    return results


def _step_by_step(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: Sequence[LowRank]) -> list[torch.Tensor]:
    dtypes = {term.down.dtype for term in terms}
    if len(dtypes) == 1:
        lows = multiply(x.to(dtypes.pop()), [(term.down, None) for term in terms])
    else:
        lows = [multiply(x.to(term.down.dtype), ((term.down, None),))[0] for term in terms]
    products = [multiply(low, ((term.up, None),))[0].to(torch.float32) for low, term in zip(lows, terms, strict=True)]
    return [
        product.mul_(term.scale).add_(base).to(base.dtype)
        for base, product, term in zip(bases, products, terms, strict=True)
    ]


def _add_panels(x_address: int, x_stride: int, rows: int, inputs: int, layers: Any, scales: Any, kind: Any) -> None:
    """Compute all layers, a panel of `MOST_ROWS` rows an item."""
    for panel in prange((rows + MOST_ROWS - 1) // MOST_ROWS):
        first = np.int64(panel) * MOST_ROWS
        _add_panel(x_address, x_stride, first, min(MOST_ROWS, rows - first), rows, inputs, layers, scales, kind)


_add = RowKernel(_add_panels)


@njit(nogil=True, error_model="numpy")
def _add_panel(
    x_address: int, x_stride: int, first: int, count: int, rows: int, inputs: int, layers: Any, scales: Any, kind: Any
) -> None:
    """Compute ``count`` rows from ``first`` on of each layer."""
    panel = scratch(MOST_ROWS * inputs)
    copy_rows(elements(x_address, rows * x_stride, kind)[first * x_stride :], x_stride, count, inputs, panel)
    for place in range(MOST_LAYERS):
        at = place * _FIELDS
        rank, outputs = layers[at + 1], layers[at + 3]
        if outputs == 0:
            continue
        nothing = floats(layers[at], 0)
        low = scratch(MOST_ROWS * rank)
        multiply_share(panel, count, inputs, Share(floats(layers[at], rank * inputs), nothing, low, rank, 0, rank))
        widened = scratch(MOST_ROWS * rank)
        copy_rows(low, rank, count, rank, widened)
        product = scratch(MOST_ROWS * outputs)
        share = Share(floats(layers[at + 2], outputs * rank), nothing, product, outputs, 0, outputs)
        multiply_share(widened, count, rank, share)
        base = elements(layers[at + 4], rows * outputs, kind)[first * outputs :]
        out = elements(layers[at + 5], rows * outputs, kind)[first * outputs :]
        scale = np.float32(scales[place])
        for i in range(count * outputs):
            scaled = product[i] * scale
            out[i] = narrow(widen(base[i]) + scaled, out[0])
