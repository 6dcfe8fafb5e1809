"""Compute what an expert does between its two products, elementwise in float32, rounded once; with its gradients.

P pairs, I the width of an expert; products are ``[P, 2 I]``, of plain experts ``[P, I]``.
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.activation import gated_backward, gated_forward
from samebit.kernels.cpu.base.jit import SharedKernel, array
from samebit.kernels.cpu.base.memory import kind_of, rows_at
from samebit.kernels.cpu.base.numeric import narrow, sigmoid, widen
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.options import ExpertOptions

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)


def activate(products: torch.Tensor, options: ExpertOptions) -> torch.Tensor:
    """Return what goes into the second product, ``[P, I]``."""
    if options.form == "gated":
        return gated_forward(options.activation, *products.chunk(2, dim=-1))[0]
    pairs, width = len(products), products.shape[1] // options.products
    out = products.new_empty(pairs, width)
    kernel_of_form(options)(
        products.numel(), products.data_ptr(), pairs, width, *constants_of(options), out.data_ptr(),
        kind_of(products.dtype),
    )  # fmt: skip
    return out


def kernel_of_form(options: ExpertOptions) -> SharedKernel:
    """Return the kernel of experts that are not gated: of the address of the products, P, I, `constants_of`, the
    address of the result, and a number of the elements' type."""
    return _square if options.form == "plain" else _clamped


def constants_of(options: ExpertOptions) -> tuple[Any, Any]:
    """Return limit and alpha, 0 for none."""
    return np.float32(options.limit or 0), np.float32(options.alpha or 0)


def activate_backward(products: torch.Tensor, grad: torch.Tensor, options: ExpertOptions) -> torch.Tensor:
    """Return the gradient of the first product."""
    if options.form == "gated":
        return torch.cat(gated_backward(options.activation, tuple(products.chunk(2, dim=-1)), grad), dim=-1)
    out = torch.empty_like(products)
    if options.form == "plain":
        _square_backward(products.numel(), array(products), array(grad), array(out))
    else:
        _clamped_backward(products.numel(), array(products), array(grad), *constants_of(options), array(out))
    return out


def _square_rows(
    threads: int, products_at: int, pairs: int, width: int, limit: Any, alpha: Any, out_at: int, kind: Any
) -> None:
    products, out = rows_at(products_at, pairs, width, kind), rows_at(out_at, pairs, width, kind)
    share_out(_square_row, pairs, threads, (products, out))


@kernel_part
def _square_row(row: int, products: Any, out: Any) -> None:
    given, to = products[row], out[row]
    for i in range(len(to)):
        x = widen(given[i])
        x = _ZERO if x < _ZERO else x
        to[i] = narrow(x * x, to[i])


def _square_rows_backward(threads: int, products: Any, grad: Any, out: Any) -> None:
    share_out(_square_row_backward, len(out), threads, (products, grad, out))


@kernel_part
def _square_row_backward(row: int, products: Any, grad: Any, out: Any) -> None:
    given, upstream, to = products[row], grad[row], out[row]
    for i in range(len(to)):
        x = widen(given[i])
        x = _ZERO if x < _ZERO else x
        to[i] = narrow(_TWO * x * widen(upstream[i]), to[i])


def _clamped_rows(
    threads: int, products_at: int, pairs: int, width: int, limit: Any, alpha: Any, out_at: int, kind: Any
) -> None:
    products, out = rows_at(products_at, pairs, 2 * width, kind), rows_at(out_at, pairs, width, kind)
    share_out(_clamped_row, pairs, threads, (products, limit, alpha, out))


@kernel_part
def _clamped_row(row: int, products: Any, limit: Any, alpha: Any, out: Any) -> None:
    given, to = products[row], out[row]
    for i in range(len(to)):
        gate, up = widen(given[2 * i]), widen(given[2 * i + 1])
        gate = limit if gate > limit else gate
        up = limit if up > limit else up
        up = -limit if up < -limit else up
        to[i] = narrow((up + _ONE) * (gate * sigmoid(alpha * gate)), to[i])


def _clamped_rows_backward(threads: int, products: Any, grad: Any, limit: Any, alpha: Any, out: Any) -> None:
    share_out(_clamped_row_backward, len(out), threads, (products, grad, limit, alpha, out))


@kernel_part
def _clamped_row_backward(row: int, products: Any, grad: Any, limit: Any, alpha: Any, out: Any) -> None:
    given, upstream, to = products[row], grad[row], out[row]
    for i in range(len(upstream)):
        gate, up, d = widen(given[2 * i]), widen(given[2 * i + 1]), widen(upstream[i])
        g = limit if gate > limit else gate
        u = limit if up > limit else up
        u = -limit if u < -limit else u
        s = sigmoid(alpha * g)
        of_gate = d * (u + _ONE) * s * (_ONE + alpha * g * (_ONE - s))
        of_up = d * g * s
        to[2 * i] = narrow(_ZERO if gate > limit else of_gate, to[2 * i])
        to[2 * i + 1] = narrow(_ZERO if up > limit or up < -limit else of_up, to[2 * i + 1])


_square = SharedKernel(_square_rows)
_square_backward = SharedKernel(_square_rows_backward)
_clamped = SharedKernel(_clamped_rows)
_clamped_backward = SharedKernel(_clamped_rows_backward)
