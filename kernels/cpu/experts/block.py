"""Compute a block of routed experts in one call, behind that of a decoder layer, for the steps of a rollout on the CPU:
router, choice, experts, the experts that compute every row with their gate, a factor, and the sum with the residual.

Invariant: an element is computed by the parts and kernels that the operations of the block's modules run, in their
order, and rounded where they round. So a block has the bits of its modules' own calls, which training makes.

T rows, W hidden size; E experts, k the chosen ones; F width of the experts that compute every row.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import elements, floats, read, rows_at, table, whole_lines
from samebit.kernels.cpu.base.numeric import narrow, sigmoid, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.experts.forms import constants_of
from samebit.kernels.cpu.experts.one_call import (
    KERNELS,
    SIZES,
    ExpertKernels,
    Operands,
    Sizes,
    compute_experts,
    expert_kernels,
    is_one_call,
)
from samebit.kernels.cpu.experts.routing import RULE, Rule, choose_rows, rule_of
from samebit.kernels.cpu.gemm.layers import NO_OTHERS
from samebit.kernels.cpu.layers.calls import call_and_step, kept_call, kernel_at, record
from samebit.kernels.cpu.layers.mlp import SILU, with_gated
from samebit.kernels.cpu.layers.products import (
    ROW_PARTS,
    Kernels,
    product,
    product_by_tiles,
    product_of_pairs,
    shared,
    write_widened,
)
from samebit.kernels.cpu.layers.terms import add_nothing
from samebit.kernels.layout.grids import CACHE_LINE
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.experts import BlockOptions, BlockWeights

_FLOAT = np.float32(0)
_ONE = np.float32(1)

_ROOMS = 13
"""Counts the arrays in the scratch buffer (``inside`` is three); each begins at a multiple of sixteen elements."""


class Rooms(NamedTuple):
    """Holds the addresses of the intermediate results, which lie in one scratch buffer.

    In float32: logits, weights of the chosen experts, the correction; the input and the router's parameters, widened
    where they have another dtype. In int32: ids of the chosen experts. In the elements' dtype: the output of these, and
    of the experts that compute every row the output, the gates and what is inside them.
    """

    logits: int
    weights: int
    ids: int
    correction: int
    routed: int
    every_row: int
    gates: int
    inside: int
    x: int
    router: int
    router_bias: int


_WEIGHTS = 15
_OTHER_SIZES = SIZES - 1
_NUMBERS = 5
_LAYOUT = Struct(f"={_WEIGHTS + _OTHER_SIZES + KERNELS + 2 + RULE}q" + "f4x" * _NUMBERS)
"""Lays out a block's record: the addresses of `BlockWeights.flat`, 0 for what it does not have, `one_call.Sizes` but
for the rows, `one_call.ExpertKernels`, F, whether the router is float32, `routing.Rule` but for scale and floor; these,
limit and alpha, and the factor on the sum."""

_SIZES_AT = 8 * _WEIGHTS
_KERNELS_AT = _SIZES_AT + 8 * _OTHER_SIZES
_SHARED_AT = _KERNELS_AT + 8 * KERNELS
_RULE_AT = _SHARED_AT + 16
_NUMBERS_AT = _RULE_AT + 8 * RULE


@inlined_part
def _rooms(sizes: Any, of_every_row: int, itemsize: int, room: int) -> Any:
    """Lay the arrays out from an address on."""
    chosen, outputs = whole_lines(sizes.rows * sizes.top_k), whole_lines(sizes.rows * sizes.width)
    weights = room + whole_lines(sizes.rows * sizes.experts) * 4
    ids = weights + chosen * 4
    correction = ids + chosen * 4
    routed = correction + whole_lines(sizes.experts) * 4
    every_row = routed + outputs * itemsize
    gates = every_row + outputs * itemsize
    inside = gates + whole_lines(sizes.rows) * itemsize
    x = inside + 3 * whole_lines(sizes.rows * of_every_row) * itemsize
    router = x + outputs * 4
    router_bias = router + whole_lines(sizes.experts * sizes.width) * 4
    return Rooms(room, weights, ids, correction, routed, every_row, gates, inside, x, router, router_bias)


@kernel_part
def _route(
    threads: int, x: int, weights: Any, in_float32: int, sizes: Any, rule: Any, rooms: Any, kind: Any
) -> None:  # fmt: skip
    """Write ids and weights of the experts that each row chooses, all in float32.

    Args:
        threads: take shares of each kernel.
        x: address of the rows.
        weights: addresses of the router's weight, its bias and the correction.
        in_float32: above 0 where the router's are float32, whatever the rows are.
        sizes: `Sizes`.
        rule: `Rule`.
        rooms: `Rooms`.
        kind: a number of the elements' type.
    """
    rows, width, experts, no = sizes.rows, sizes.width, sizes.experts, np.int64(0)
    router, bias, correction_at = weights
    if elements(no, 0, kind).itemsize < 4:
        x = write_widened(threads, x, rows * width, rooms.x, kind)
        if not in_float32:
            router = write_widened(threads, router, experts * width, rooms.router, kind)
        if bias and not in_float32:
            bias = write_widened(threads, bias, experts, rooms.router_bias, kind)
    product(threads, x, width, rows, width, (router, bias, experts, rooms.logits, *NO_OTHERS), _FLOAT)
    correction = floats(correction_at if correction_at else rooms.correction, experts)
    if not correction_at:
        correction[:] = _FLOAT
    choose_rows(
        shared(4 * rows * experts, threads), rows_at(rooms.logits, rows, experts, _FLOAT), correction, rule,
        table(rooms.ids, rows, sizes.top_k), rows_at(rooms.weights, rows, sizes.top_k, _FLOAT),
    )  # fmt: skip


@kernel_part
def _add_part(
    part: int, x_at: int, routed_at: int, every_row_at: int, gates_at: int, factor: Any, rows: int, width: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    """Write a share of the sums: what experts give, what those of every row give, weighted, and, times a factor, the
    residual."""
    x, out = elements(x_at, rows * width, kind), elements(out_at, rows * width, kind)
    routed, every_row = elements(routed_at, rows * width, kind), elements(every_row_at, rows * width, kind)
    gates = elements(gates_at, rows, kind)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        first, last = row * width, (row + 1) * width
        residual, total, to = x[first:last], routed[first:last], out[first:last]
        if every_row_at:
            added, gate = every_row[first:last], sigmoid(widen(gates[row])) if gates_at else _ONE
            for i in range(width):
                other = narrow(gate * widen(added[i]), total[i])
                total[i] = narrow(widen(total[i]) + widen(other), total[i])
        if factor != _ONE:
            for i in range(width):
                total[i] = narrow(widen(total[i]) * factor, total[i])
        for i in range(width):
            to[i] = narrow(widen(residual[i]) + widen(total[i]), to[i])


def _with_product(multiply: Callable[..., None]) -> Callable[..., None]:
    """Make the block from a product of up to three layers of one input."""
    compute_every_row = with_gated(multiply, add_nothing)

    @kernel_part
    def block(threads: int, call_at: int, kind: Any) -> None:
        """Compute the block of the `calls.Call` at an address: of its norm, added to its x."""
        call, step = call_and_step(call_at)
        no, at, rows, x = np.int64(0), call.record, step.rows, call.normed
        itemsize = elements(no, 0, kind).itemsize
        weights, kernels = read(at, _WEIGHTS, no), ExpertKernels(*read(at + _KERNELS_AT, KERNELS, no))
        (up, up_bias, down, down_bias), (gate, gate_bias) = weights[0:4], weights[10:12]
        sizes = Sizes(rows, *read(at + _SIZES_AT, _OTHER_SIZES, no))
        (inner, in_float32), width = read(at + _SHARED_AT, 2, no), sizes.width
        scale, floor, limit, alpha, factor = read(at + _NUMBERS_AT, _NUMBERS, _FLOAT)
        rooms = _rooms(sizes, inner, itemsize, call.room)
        _route(
            threads, x, weights[12:15], in_float32, sizes, Rule(scale, floor, *read(at + _RULE_AT, RULE, no)), rooms,
            kind,
        )  # fmt: skip
        operands = Operands(x, rooms.ids, rooms.weights, up, up_bias, down, down_bias, rooms.routed)
        compute_experts(threads, sizes, operands, kernels, limit, alpha, kind)
        every_row = gates = no
        if inner > 0:
            every_row = rooms.every_row
            compute_every_row(
                threads, (x, every_row, rooms.inside), (rows, width, inner),
                weights[4:10], SILU, (no, no), itemsize, kind,
            )  # fmt: skip
        if gate:
            gates = rooms.gates
            multiply(threads, x, width, rows, width, (gate, gate_bias, 1, gates, *NO_OTHERS), kind)
        share_out(
            _add_part, ROW_PARTS, shared(rows * width, threads),
            (call.x, rooms.routed, every_row, gates, factor, rows, width, call.out, kind),
        )  # fmt: skip

    made: Callable[..., None] = block
    return made


_block = _with_product(product)
_block_by_pairs = _with_product(product_of_pairs)
_block_by_tiles = _with_product(product_by_tiles)


def _run(threads: int, call_at: int, kind: Any) -> None:
    """Compute a block, multiplying in float32."""
    _block(threads, call_at, kind)


def _run_by_pairs(threads: int, call_at: int, kind: Any) -> None:
    """Compute a block in bfloat16, multiplying in pairs of inputs."""
    _block_by_pairs(threads, call_at, kind)


def _run_by_tiles(threads: int, call_at: int, kind: Any) -> None:
    """Compute a block in bfloat16, multiplying with tile instructions."""
    _block_by_tiles(threads, call_at, kind)


_kernels = Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles)))


def block_call(weights: BlockWeights, options: BlockOptions, dtype: torch.dtype) -> LayerCall | None:
    """Implement `dispatch.WholeCalls.block_call`."""
    if not is_one_call(options.experts):
        return None
    return kept_call(weights, (), (), lambda: _call(weights, options, dtype))


def _call(weights: BlockWeights, options: BlockOptions, dtype: torch.dtype) -> LayerCall:
    routing, experts, number, width = options.routing, options.experts, options.number, options.width
    sizes = Sizes(0, routing.top_k, number, width, options.inner, experts.products, experts.transposed)
    scale, floor, *rule = rule_of(routing, weights.correction is not None)
    numbers = (
        *weights.addresses, *sizes[1:], *expert_kernels(experts, dtype), options.shared,
        weights.router[0].dtype is torch.float32, *rule, scale, floor, *constants_of(experts),
        np.float32(options.factor),
    )  # fmt: skip
    itemsize = dtype.itemsize
    of_row = 4 * (number + 2 * routing.top_k + width) + (2 * width + 1 + 3 * options.shared) * itemsize
    of_block = 4 * (2 * number + number * width) + _ROOMS * CACHE_LINE
    return LayerCall(kernel_at(_kernels.of(dtype), dtype), record(_LAYOUT, *numbers), (of_row, of_block), apart=False)
