"""Compute the second half of a decoder layer inside of a kernel that computes all of it: residual sum, norm, gated MLP.
Where another MLP follows behind the kernel, it is the sum and the norm.

What is added to a residual is normalised first in some families, or multiplied with a factor; then there may be no norm
before the MLP. Which of it a layer has is among the numbers that the kernel reads.

T rows, W hidden size, F width of the MLP.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.activation import silu_rows
from samebit.kernels.cpu.base.callee import call_at
from samebit.kernels.cpu.base.memory import elements, whole_lines
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import NO_LAYER, NO_OTHERS
from samebit.kernels.cpu.layers.products import ROW_PARTS, shared
from samebit.kernels.cpu.norm.forward import add_rms_norm_row, layer_norm_row, rms_norm_row
from samebit.kernels.layout.grids import LANES

_silu = silu_rows.part

ROOMS_OF_MLP = 4
"""Counts the arrays that lie in the room of the half, each from a multiple of sixteen elements on."""


class Norm(NamedTuple):
    """Holds the address of a norm's weight, 0 for no norm, what is added to the weight, eps, and the address of the
    bias of a LayerNorm, 0 for an RMSNorm."""

    weight: int
    offset: Any
    eps: Any
    bias: int


class Half(NamedTuple):
    """Tells the second half of one decoder layer from that of another.

    Attributes:
        after_attention: norm of what attention gives.
        before_mlp: norm of the sum.
        after_mlp: norm of what the MLP gives.
        factor: on what is added to a residual, where no norm is of it.
        gated: `Gated`.
    """

    after_attention: Norm
    before_mlp: Norm
    after_mlp: Norm
    factor: Any
    gated: Any


class Gated(NamedTuple):
    """Holds the address of the kernel that activates, 0 for silu, and whether one layer gives gate and up."""

    activation: int
    fused: int


_NO = np.int64(0)
_NO_NORM = Norm(_NO, np.float32(0), np.float32(0), _NO)
_ONE = np.float32(1)
SILU = Gated(_NO, _NO)
"""Stands for an MLP of three layers with silu."""


@inlined_part
def pre_norm(weight: int, offset: Any, eps: Any) -> Any:
    """Return the `Half` of a layer with an RMSNorm before its MLP, and silu."""
    return Half(_NO_NORM, Norm(weight, offset, eps, _NO), _NO_NORM, _ONE, SILU)


@kernel_part
def _norm_part(
    part: int, x_at: int, added_at: int, of_added: Any, factor: Any, total_at: int, norm: Any, rows: int, width: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    x, out = elements(x_at, rows * width, kind), elements(out_at, rows * width, kind)
    added, total = elements(added_at, rows * width, kind), elements(total_at, rows * width, kind)
    weight, weight_of_added = elements(norm.weight, width, kind), elements(of_added.weight, width, kind)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        first, last = row * width, (row + 1) * width
        source = x[first:last]
        if added_at:
            one, other, source = x[first:last], added[first:last], total[first:last]
            if of_added.weight:
                add_rms_norm_row(one, other, weight_of_added, of_added.offset, of_added.eps, lanes, source)
            elif factor != _ONE:
                for i in range(width):
                    scaled = narrow(widen(other[i]) * factor, source[i])
                    source[i] = narrow(widen(one[i]) + widen(scaled), source[i])
            else:
                for i in range(width):
                    source[i] = narrow(widen(one[i]) + widen(other[i]), source[i])
        if norm.bias:
            layer_norm_row(source, weight, elements(norm.bias, width, kind), norm.eps, lanes, out[first:last])
        elif norm.weight:
            rms_norm_row(source, weight, norm.offset, norm.eps, lanes, out[first:last])


@inlined_part
def normed(threads: int, x_at: int, norm: Any, rows: int, width: int, out_at: int, kind: Any) -> None:
    """Write the `Norm` of x to ``out``."""
    _add_and_norm(threads, x_at, _NO, _NO_NORM, _ONE, _NO, norm, rows, width, out_at, kind)


@inlined_part
def _add_and_norm(
    threads: int, x_at: int, added_at: int, of_added: Any, factor: Any, total_at: int, norm: Any, rows: int, width: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    """Write ``total = x + factor * added``, or of what is added the norm, and the norm of this to ``out``; without a
    norm's weight, the sum alone. ``out`` may be what is added."""
    share_out(
        _norm_part, ROW_PARTS, shared(rows * width, threads),
        (x_at, added_at, of_added, factor, total_at, norm, rows, width, out_at, kind),
    )  # fmt: skip


def with_gated(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make a gated MLP from a product of up to three layers of one input, and what adds an adapter's terms to it."""

    @kernel_part
    def gated(
        threads: int, places: Any, sizes: Any, weights: Any, form: Any, terms: Any, itemsize: int, kind: Any
    ) -> None:  # fmt: skip
        """Multiply, activate and multiply.

        Args:
            threads: take shares of each kernel.
            places: addresses of x, of the result, which may be x, and of a room for ``whole_lines`` of three times T F
                elements.
            sizes: T, W and F.
            weights: addresses of weight and bias of gate, up and down; of gate and up together, 0 and down.
            form: `Gated`.
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
        stride, of_up, up_at = inner, inner, up
        if form.fused > 0:
            stride, of_up, up_at = 2 * inner, no, gate + inner * itemsize
        multiply(
            threads, x, width, rows, width,
            (gate_weight, gate_bias, stride, gate, up_weight, up_bias, of_up, up, *NO_LAYER), kind,
        )  # fmt: skip
        add(threads, x, rows, width, terms[0], (gate, up, no), kind)
        few = shared(rows * inner, threads)
        if form.activation:
            call_at(form.activation, (few, gate, up_at, kind, rows, inner, stride, stride, activated))
        else:
            _silu(few, gate, up_at, kind, rows, inner, stride, stride, activated)
        multiply(threads, activated, inner, rows, inner, (down_weight, down_bias, width, out, *NO_OTHERS), kind)
        add(threads, activated, rows, inner, terms[1], (out, no, no), kind)

    made: Callable[..., None] = gated
    return made


def with_mlp(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the half from a product of up to three layers of one input, and what adds an adapter's terms to it."""
    compute = with_gated(multiply, add)

    @kernel_part
    def mlp(
        threads: int, places: Any, sizes: Any, weights: Any, half: Any, terms: Any, itemsize: int, kind: Any
    ) -> None:
        """Add and normalise; of a gated MLP multiply, and add.

        Args:
            threads: take shares of each kernel.
            places: addresses of the layer's input; of what attention adds to it, overwritten by its norm and then by
                what the MLP adds; of the result; of a room for ``whole_lines`` of three times T F, and of T W elements;
                of the norm for another MLP, beside the sum as the result.
            sizes: T, W and F, 0 for another MLP.
            weights: addresses of weight and bias of gate, up and down.
            half: `Half`.
            terms: `terms.Terms` of gate and up, and of down.
            itemsize: bytes of an element.
            kind: a number of the elements' type.
        """
        x, normed_at, out, room, behind = places
        rows, width, inner = sizes
        middle, to = room + 3 * whole_lines(rows * inner) * itemsize, normed_at
        if inner == 0:
            middle, to = out, behind
        _add_and_norm(
            threads, x, normed_at, half.after_attention, half.factor, middle, half.before_mlp, rows, width, to, kind
        )  # fmt: skip
        if inner > 0:
            source = normed_at if half.before_mlp.weight else middle
            compute(threads, (source, normed_at, room), sizes, weights, half.gated, terms, itemsize, kind)
            _add_and_norm(
                threads, middle, normed_at, half.after_mlp, half.factor, out, _NO_NORM, rows, width, normed_at, kind
            )  # fmt: skip

    made: Callable[..., None] = mlp
    return made
