"""Compute the second half of a decoder layer inside of a kernel that computes all of it: residual sum, norm, gated MLP.
Where another MLP follows behind the kernel, it is the sum and the norm.

T rows, W hidden size, F width of the MLP.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from samebit.kernels.cpu.activation import silu_rows
from samebit.kernels.cpu.base.memory import elements, whole_lines
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import NO_LAYER, NO_OTHERS
from samebit.kernels.cpu.layers.products import ROW_PARTS, shared
from samebit.kernels.cpu.norm.forward import rms_norm_row
from samebit.kernels.layout.grids import LANES

_silu = silu_rows.part

ROOMS_OF_MLP = 4
"""Counts the arrays that lie in the room of the half, each from a multiple of sixteen elements on."""


@kernel_part
def _norm_part(
    part: int, x_at: int, added_at: int, total_at: int, weight_at: int, offset: Any, eps: Any, rows: int, width: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    x, out = elements(x_at, rows * width, kind), elements(out_at, rows * width, kind)
    added, total = elements(added_at, rows * width, kind), elements(total_at, rows * width, kind)
    weight = elements(weight_at, width, kind)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        first, last = row * width, (row + 1) * width
        source = x[first:last]
        if added_at:
            one, other, source = x[first:last], added[first:last], total[first:last]
            for i in range(width):
                source[i] = narrow(widen(one[i]) + widen(other[i]), source[i])
        if weight_at:
            rms_norm_row(source, weight, offset, eps, lanes, out[first:last])


@inlined_part
def normed(
    threads: int, x_at: int, added_at: int, total_at: int, weight_at: int, offset: Any, eps: Any, rows: int, width: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    """Write ``total = x + added`` and its norm to ``out``; without what is added, the norm of x; without a weight, the
    sum alone."""
    share_out(
        _norm_part, ROW_PARTS, shared(rows * width, threads),
        (x_at, added_at, total_at, weight_at, offset, eps, rows, width, out_at, kind),
    )  # fmt: skip


def with_gated(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make a gated MLP from a product of up to three layers of one input, and what adds an adapter's terms to it."""

    @kernel_part
    def gated(
        threads: int, places: Any, sizes: Any, weights: Any, terms: Any, itemsize: int, kind: Any
    ) -> None:  # fmt: skip
        """Multiply, activate and multiply.

        Args:
            threads: take shares of each kernel.
            places: addresses of x, of the result, which may be x, and of a room for ``whole_lines`` of three times T F
                elements.
            sizes: T, W and F.
            weights: addresses of weight and bias of gate, up and down.
            terms: `terms.Terms` of gate and up, and of down.
            itemsize: bytes of an element.
            kind: a number of the elements' type.
        """
        x, out, gate = places
        rows, width, inner = sizes
        gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias = weights
        no = np.int64(0)
        up = gate + whole_lines(rows * inner) * itemsize
        activated = up + whole_lines(rows * inner) * itemsize
        multiply(
            threads, x, width, rows, width,
            (gate_weight, gate_bias, inner, gate, up_weight, up_bias, inner, up, *NO_LAYER), kind,
        )  # fmt: skip
        add(threads, x, rows, width, terms[0], (gate, up, no), kind)
        _silu(shared(rows * inner, threads), gate, up, kind, rows, inner, inner, inner, activated)
        multiply(threads, activated, inner, rows, inner, (down_weight, down_bias, width, out, *NO_OTHERS), kind)
        add(threads, activated, rows, inner, terms[1], (out, no, no), kind)

    made: Callable[..., None] = gated
    return made


def with_mlp(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the half from a product of up to three layers of one input, and what adds an adapter's terms to it."""
    compute = with_gated(multiply, add)

    @kernel_part
    def mlp(
        threads: int, places: Any, sizes: Any, weights: Any, norm: Any, terms: Any, itemsize: int, kind: Any
    ) -> None:
        """Add and normalise; of a gated MLP multiply, and add.

        Args:
            threads: take shares of each kernel.
            places: addresses of the layer's input; of what attention adds to it, overwritten by its norm and then by
                what the MLP adds; of the result; of a room for ``whole_lines`` of three times T F, and of T W elements;
                of the norm for another MLP, beside the sum as the result.
            sizes: T, W and F, 0 for another MLP.
            weights: addresses of the norm's weight, and of weight and bias of gate, up and down.
            norm: eps and offset.
            terms: `terms.Terms` of gate and up, and of down.
            itemsize: bytes of an element.
            kind: a number of the elements' type.
        """
        x, normed_at, out, room, behind = places
        (rows, width, inner), norm_weight, (eps, offset) = sizes, weights[0], norm
        if inner == 0:
            normed(threads, x, normed_at, out, norm_weight, offset, eps, rows, width, behind, kind)
            return
        middle = room + 3 * whole_lines(rows * inner) * itemsize
        normed(threads, x, normed_at, middle, norm_weight, offset, eps, rows, width, normed_at, kind)
        compute(threads, (normed_at, normed_at, room), sizes, weights[1:], terms, itemsize, kind)
        normed(threads, middle, normed_at, out, 0, offset, eps, rows, width, normed_at, kind)

    made: Callable[..., None] = mlp
    return made
