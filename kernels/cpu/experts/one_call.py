"""Compute the experts of a layer in one call: sort pairs, multiply, activate, multiply, add up.

Invariant: these are the parts and kernels of the single steps, in their order. Which product and which activation they
are is chosen as there, and called at its address: there is one kernel, whatever the processor and the experts' form.

T rows of width W, P pairs; E experts of width I.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import typeof, types

from samebit.kernels.cpu import activation
from samebit.kernels.cpu.base.callee import call_at
from samebit.kernels.cpu.base.jit import SharedKernel, called_kernel
from samebit.kernels.cpu.base.memory import kind_of, read, rows_at, table
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.experts import grouped
from samebit.kernels.cpu.experts.combine import add_up_rows
from samebit.kernels.cpu.experts.forms import constants_of, kernel_of_form
from samebit.kernels.cpu.experts.sorting import refusal_of, sort
from samebit.kernels.cpu.gemm.few_rows import READING
from samebit.kernels.cpu.gemm.grouped import Product
from samebit.kernels.cpu.layers.products import shared
from samebit.kernels.cpu.linear import PRODUCTS_AN_ELEMENT
from samebit.kernels.layout.options import ExpertOptions, ExpertWeights

_PAIRS_A_THREAD = 2048
"""Count of pairs a thread whose products are computed before what follows them: fewer gain nothing."""


class Sizes(NamedTuple):
    """Holds T, top_k, E, W and I; how many products a pair has for an input of the second, and how the weights lie."""

    rows: int
    top_k: int
    experts: int
    width: int
    inner: int
    products: int
    transposed: int


class Operands(NamedTuple):
    """Holds addresses, 0 for no bias."""

    x: int
    ids: int
    weights: int
    up: int
    up_bias: int
    down: int
    down_bias: int
    out: int


class ExpertKernels(NamedTuple):
    """Holds addresses of the kernels that multiply and that activate, and whether the latter is of gated experts."""

    multiply: int
    activate: int
    gated: int


SIZES, OPERANDS, KERNELS = len(Sizes._fields), len(Operands._fields), len(ExpertKernels._fields)
"""Count their fields."""


def is_one_call(options: ExpertOptions) -> bool:
    """Return whether experts are computed so: all but those with an activation of torch's."""
    return options.form != "gated" or activation.kernel_of(options.activation) is not None


def compute(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, options: ExpertOptions
) -> torch.Tensor:
    """Return the sums ``[T, W]``; the arguments are those of `Operations.experts_forward`.

    Raises:
        ValueError: ids of no expert.
    """
    x, ids, weights, up, down = (part.contiguous() for part in (x, ids, weights, experts.up, experts.down))
    up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (experts.up_bias, experts.down_bias))
    (rows, width), top_k, number, products = x.shape, ids.size(1), up.size(0), options.products
    inner, pairs = down.size(1 if options.transposed else 2), rows * top_k
    out = torch.empty_like(x)
    numbers = (
        *Sizes(rows, top_k, number, width, inner, products, options.transposed),
        *Operands(
            x.data_ptr(), ids.data_ptr(), weights.data_ptr(), up.data_ptr(),
            0 if up_bias is None else up_bias.data_ptr(), down.data_ptr(),
            0 if down_bias is None else down_bias.data_ptr(), out.data_ptr(),
        ),
        *expert_kernels(options, x.dtype),
    )  # fmt: skip
    work = (pairs + READING * min(pairs, number)) * (products + 1) * inner * width // PRODUCTS_AN_ELEMENT
    try:
        _kernel(work, np.array(numbers, np.int64), *constants_of(options), kind_of(x.dtype))
    except IndexError:
        raise refusal_of(ids, number) from None
    return out


def expert_kernels(options: ExpertOptions, dtype: torch.dtype) -> ExpertKernels:
    """Return the kernels that compute these experts on this processor."""
    multiply = _product_at(grouped.kernel_of(dtype), dtype)
    return ExpertKernels(multiply, _activation_at(options, dtype), int(options.form == "gated"))


@cache
def _product_at(kernel: SharedKernel, dtype: torch.dtype) -> int:
    given = Product(0, 0, 0, 0, 0, 0, 0, 0, 0, transposed=False)
    return kernel.address(typeof(given), typeof(kind_of(dtype)))


@cache
def _activation_at(options: ExpertOptions, dtype: torch.dtype) -> int:
    if options.form == "gated":
        return activation.activation_at(options.activation, dtype)
    numbers = (*(types.int64,) * 3, *(types.float32,) * 2, types.int64)
    return kernel_of_form(options).address(*numbers, typeof(kind_of(dtype)))


def _compute(threads: int, sizes: Any, operands: Any, kernels: Any, limit: Any, alpha: Any, kind: Any) -> None:
    """Compute `Sizes` of `Operands` by the kernels `ExpertKernels`.

    What lies between the products is that of a few experts at a time, so it takes little memory, and the same again
    and again: memory that is new to a process costs as much time as a quarter of the products.
    """
    rows, top_k, experts, width = sizes.rows, sizes.top_k, sizes.experts, sizes.width
    pairs, dtype = rows * top_k, np.array(kind).dtype
    row_of, place_of, offsets = (
        np.empty(pairs, np.int32), np.empty((rows, top_k), np.int32), np.zeros(experts + 1, np.int64)
    )  # fmt: skip
    if not sort(table(operands.ids, rows, top_k), row_of, place_of, offsets):
        raise IndexError("an id of no expert")
    most, longest, first = _PAIRS_A_THREAD * threads, 0, 0
    while first < experts:
        last = _end_of_run(offsets, first, most)
        longest, first = max(longest, offsets[last] - offsets[first]), last
    products, hidden = np.empty(longest * sizes.products * sizes.inner, dtype), np.empty(longest * sizes.inner, dtype)
    outputs, run = np.empty((pairs, width), dtype), np.empty(experts + 1, np.int64)
    first = 0
    while first < experts:
        last = _end_of_run(offsets, first, most)
        for expert in range(first, last + 1):
            run[expert - first] = offsets[expert] - offsets[first]
        _compute_run(
            threads, sizes, operands, kernels, first, last - first,
            (row_of[offsets[first] :], run, products, hidden, outputs[offsets[first] :]), (limit, alpha), kind,
        )  # fmt: skip
        first = last
    add_up_rows(
        shared(outputs.size, threads), outputs, place_of, rows_at(operands.weights, rows, top_k, np.float32(0)),
        rows_at(operands.out, rows, width, kind),
    )  # fmt: skip


@inlined_part
def _address(values: Any) -> Any:
    return np.int64(values.ctypes.data)


@inlined_part
def _end_of_run(offsets: Any, first: int, most: int) -> int:
    """Return the end of a run of experts with at most that many pairs, or a single expert that has more."""
    last = first + 1
    while last < len(offsets) - 1 and offsets[last + 1] - offsets[first] <= most:
        last += 1
    return last


@kernel_part
def _compute_run(
    threads: int, sizes: Any, operands: Any, kernels: Any, first: int, experts: int, arrays: Any, constants: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Write the outputs of a run of experts. The caller holds the arrays, whose addresses the kernels are given."""
    row_of, offsets, products, hidden, outputs = arrays
    pairs, width, inner, size = offsets[experts], sizes.width, sizes.inner, products.itemsize
    products_at, hidden_at, wide = _address(products), _address(hidden), sizes.products * inner
    offsets_at, transposed, no = _address(offsets), sizes.transposed > 0, np.int64(0)
    up, down = operands.up + first * wide * width * size, operands.down + first * inner * width * size
    up_bias = operands.up_bias + first * wide * size if operands.up_bias else no
    down_bias = operands.down_bias + first * width * size if operands.down_bias else no
    first_product = Product(
        operands.x, _address(row_of), offsets_at, experts, width, wide, up, up_bias, products_at, transposed
    )  # fmt: skip
    second_product = Product(
        hidden_at, no, offsets_at, experts, inner, width, down, down_bias, _address(outputs), transposed
    )  # fmt: skip
    few = shared(pairs * inner, threads)
    call_at(kernels.multiply, (threads, first_product, kind))
    if kernels.gated:
        up_at = products_at + inner * size
        call_at(kernels.activate, (few, products_at, up_at, kind, pairs, inner, wide, wide, hidden_at))
    else:
        call_at(kernels.activate, (few, products_at, pairs, inner, *constants, hidden_at, kind))
    call_at(kernels.multiply, (threads, second_product, kind))


compute_experts = called_kernel(_compute)


def _run(threads: int, numbers: Any, limit: Any, alpha: Any, kind: Any) -> None:
    """Compute what one array of numbers says: that costs a call from Python less than their tuples do."""
    at, no = _address(numbers), np.int64(0)
    sizes, operands = Sizes(*read(at, SIZES, no)), Operands(*read(at + 8 * SIZES, OPERANDS, no))
    kernels = ExpertKernels(*read(at + 8 * (SIZES + OPERANDS), KERNELS, no))
    compute_experts(threads, sizes, operands, kernels, limit, alpha, kind)


_kernel = SharedKernel(_run)
