"""Add products of low rank to the results of linear layers on the CPU: for a few rows in one kernel, which starts once
for up to three layers; for more by the linear layer's own, and what is left, to scale, add and round, in another.

Invariant: the first kernel multiplies by the code of `gemm.few_rows`, and both scale, add and round as separate
operations: their bits are those of the steps apart. A panel of rows is one thread's. T rows, K inputs, N outputs, r the
rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import elements, floats, kind_of, scratch, with_unit_stride
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.few_rows import MOST_ROWS, copy_rows, multiply_share
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS, Share
from samebit.kernels.cpu.linear import PRODUCTS_AN_ELEMENT, multiply
from samebit.kernels.layout.lora.adapters import LowRank

MOST_FUSED = 16
"""Up to so many rows, starting kernels takes longer than what panels of a few rows lose."""

_FIELDS = 6
_ADDED_FIELDS = 4


def add_low_rank(bases: Sequence[torch.Tensor], x: torch.Tensor, terms: Sequence[LowRank]) -> list[torch.Tensor]:
    """Implement `Operations.add_low_rank`."""
    rows = with_unit_stride(x.reshape(-1, x.shape[-1]))
    if len(rows) > MOST_FUSED or any(term.down.dtype != torch.float32 for term in terms):
        return _step_by_step(bases, rows, terms)
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
    _multiply(
        len(rows) * work // PRODUCTS_AN_ELEMENT,
        rows.data_ptr(), rows.stride(0), len(rows), x.shape[-1], layers, _scales(terms), kind_of(x.dtype),
    )  # fmt: skip
    return results


def _step_by_step(bases: Sequence[torch.Tensor], rows: torch.Tensor, terms: Sequence[LowRank]) -> list[torch.Tensor]:
    dtypes = {term.down.dtype for term in terms}
    if len(dtypes) > 1:
        pairs = zip(bases, terms, strict=True)
        return [out for base, term in pairs for out in _step_by_step([base], rows, [term])]
    (dtype,) = dtypes
    lows = multiply(rows.to(dtype), [(term.down, None) for term in terms])
    products = [multiply(low, ((term.up, None),))[0] for low, term in zip(lows, terms, strict=True)]
    held = [base.contiguous() for base in bases]
    results = [
        product.view(base.shape) if product.dtype == base.dtype else torch.empty_like(base)
        for product, base in zip(products, held, strict=True)
    ]
    addresses: list[int] = []
    for product, base, out in zip(products, held, results, strict=True):
        addresses += product.data_ptr(), base.data_ptr(), out.data_ptr(), product.shape[-1]
    layers = (*addresses, *(0,) * (MOST_LAYERS * _ADDED_FIELDS - len(addresses)))
    work = sum(product.numel() for product in products)
    _add(work, len(rows), layers, _scales(terms), kind_of(bases[0].dtype), kind_of(dtype))
    return results


def _scales(terms: Sequence[LowRank]) -> tuple[float, ...]:
    return (*(term.scale for term in terms), *(0.0,) * (MOST_LAYERS - len(terms)))


def _multiply_panels(
    threads: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Any, scales: Any, kind: Any
) -> None:
    """Compute all layers, a panel of `MOST_ROWS` rows an item."""
    panels = (rows + MOST_ROWS - 1) // MOST_ROWS
    share_out(_multiply_panel, panels, threads, (x_address, x_stride, rows, inputs, layers, scales, kind))


_multiply = SharedKernel(_multiply_panels)


@kernel_part
def _multiply_panel(
    panel_number: int, x_address: int, x_stride: int, rows: int, inputs: int, layers: Any, scales: Any, kind: Any
) -> None:
    """Compute the rows of a panel, in each layer."""
    first = panel_number * MOST_ROWS
    count = min(MOST_ROWS, rows - first)
    panel = scratch(MOST_ROWS * inputs)
    copy_rows(elements(x_address, rows * x_stride, kind)[first * x_stride :], x_stride, count, inputs, panel)
    for place in range(MOST_LAYERS):
        at = place * _FIELDS
        rank, outputs = layers[at + 1], layers[at + 3]
        if outputs == 0:
            continue
        low, product = scratch(MOST_ROWS * rank), scratch(MOST_ROWS * outputs)
        multiply_share(panel, count, inputs, _all_of(layers[at], rank, inputs, low))
        widened = scratch(MOST_ROWS * rank)
        copy_rows(low, rank, count, rank, widened)
        multiply_share(widened, count, rank, _all_of(layers[at + 2], outputs, rank, product))
        base = elements(layers[at + 4], rows * outputs, kind)[first * outputs :]
        out = elements(layers[at + 5], rows * outputs, kind)[first * outputs :]
        _add_products(product, base, out, count * outputs, np.float32(scales[place]))


@inlined_part
def _all_of(weight: int, outputs: int, inputs: int, out: Any) -> Any:
    """Return all outputs of the matrix ``[outputs, inputs]`` float32 at an address, without a bias."""
    return Share(floats(weight, outputs * inputs), floats(weight, 0), out, outputs, 0, outputs)


def _add_rows(threads: int, rows: int, layers: Any, scales: Any, kind: Any, product_kind: Any) -> None:
    """Add the products of all layers, a row an item."""
    share_out(_add_row, rows, threads, (rows, layers, scales, kind, product_kind))


@kernel_part
def _add_row(row: int, rows: int, layers: Any, scales: Any, kind: Any, product_kind: Any) -> None:
    for place in range(MOST_LAYERS):
        at = place * _ADDED_FIELDS
        outputs = layers[at + 3]
        first = np.int64(row) * outputs
        product = elements(layers[at], rows * outputs, product_kind)[first:]
        base = elements(layers[at + 1], rows * outputs, kind)[first:]
        out = elements(layers[at + 2], rows * outputs, kind)[first:]
        _add_products(product, base, out, outputs, np.float32(scales[place]))


_add = SharedKernel(_add_rows)


@kernel_part
def _add_products(product: Any, base: Any, out: Any, count: int, scale: Any) -> None:
    """Write ``out = base + scale * product`` for ``count`` elements, rounded once; ``out`` may be the product."""
    for i in range(count):
        scaled = widen(product[i]) * scale
        out[i] = narrow(widen(base[i]) + scaled, out[0])
