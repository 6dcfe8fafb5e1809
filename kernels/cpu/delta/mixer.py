"""Compute a Gated DeltaNet mixer inside of a kernel that computes a whole decoder layer.

Invariant: an element is computed by the parts that the mixer's operations run one by one, in their order, and rounded
where they round. So it has the bits of these operations, which training makes.

Each kernel goes over all rows before the next begins: convolving and normalising with each item of the rule was slower,
because nothing asks for its state meanwhile. T rows, W hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from samebit.kernels.cpu.base.memory import elements, floats, whole_lines
from samebit.kernels.cpu.base.numeric import widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.conv import convolve_rows
from samebit.kernels.cpu.delta.gates import gates_of_rows
from samebit.kernels.cpu.delta.operation import WORK_AN_ELEMENT
from samebit.kernels.cpu.delta.projections import with_projections
from samebit.kernels.cpu.delta.rule import rule
from samebit.kernels.cpu.gemm.layers import NO_OTHERS
from samebit.kernels.cpu.layers.products import shared
from samebit.kernels.cpu.layers.terms import terms_at
from samebit.kernels.cpu.norm.forward import gated_rms_norm_rows
from samebit.kernels.layout.grids import CACHE_LINE
from samebit.kernels.layout.layers.delta import MixerOptions

_convolve, _gates, _rule = convolve_rows.part, gates_of_rows.part, rule.part
_norm = gated_rms_norm_rows.part

_HEAD_WORK = int(1 / WORK_AN_ELEMENT)


class Sizes(NamedTuple):
    """Holds W, taps of the convolution, Hk, Hv, K and V; F, 0 for another MLP; whether the norm's gate is a sigmoid,
    whether projections stand together per key head, and whether the gates' parameters are float32."""

    width: int
    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    inner: int
    by_sigmoid: int
    by_key_head: int
    gates_in_float32: int


class Memory(NamedTuple):
    """Holds where the addresses of the rule's memory lie, the rows of a window, and the addresses of windows, now and
    of a block, and of the checkpoints' states and windows."""

    states: int
    window_rows: int
    windows: int
    block_windows: int
    captured_states: int
    captured_windows: int


class Rooms(NamedTuple):
    """Holds the addresses of what is between the kernels.

    In float32: decay and beta; the gates' parameters, widened where they have another dtype; a bias of zeros. In the
    elements' dtype: queries, keys and values, the gate, b and a as they are multiplied; the first of these convolved;
    what the rule gives, and in its place that normed.
    """

    decay: int
    beta: int
    a_log: int
    dt_bias: int
    qkv: int
    gate: int
    b: int
    a: int
    convolved: int
    mixed: int
    no_bias: int


@inlined_part
def _rooms(sizes: Any, rows: int, room: int, itemsize: int) -> Any:
    """Place the arrays of a mixer from an address on; `room_of_mixer` is the room that they take."""
    heads = sizes.value_heads
    inner = heads * sizes.value_dim
    channels = 2 * sizes.key_heads * sizes.key_dim + inner
    beta = room + whole_lines(rows * heads) * 4
    a_log = beta + whole_lines(rows * heads) * 4
    dt_bias = a_log + whole_lines(heads) * 4
    qkv = dt_bias + whole_lines(heads) * 4
    gate = qkv + whole_lines(rows * channels) * itemsize
    b = gate + whole_lines(rows * inner) * itemsize
    a = b + whole_lines(rows * heads) * itemsize
    convolved = a + whole_lines(rows * heads) * itemsize
    mixed = convolved + whole_lines(rows * channels) * itemsize
    no_bias = mixed + whole_lines(rows * inner) * itemsize
    return Rooms(room, beta, a_log, dt_bias, qkv, gate, b, a, convolved, mixed, no_bias)


def room_of_mixer(options: MixerOptions, itemsize: int) -> tuple[int, int]:
    """Return the bytes of `_rooms`, those of each row and those of the mixer."""
    heads, inner, channels = options.rule.value_heads, options.rule.inner, options.rule.width
    of_row = 4 * (heads + heads) + (channels + inner + heads + heads + channels + inner) * itemsize  # as in `Rooms`
    return of_row, 4 * (heads + heads + channels) + len(Rooms._fields) * CACHE_LINE


@inlined_part
def _widened(source_at: int, count: int, kind: Any, target_at: int) -> int:
    """Write elements as float32; return where."""
    source, target = elements(source_at, count, kind), floats(target_at, count)
    for i in range(count):
        target[i] = widen(source[i])
    return target_at


def with_mixer(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the mixer from a product of up to three layers of one input, and what adds an adapter's terms to it."""
    project = with_projections(multiply, add)

    @kernel_part
    def mixer(
        threads: int, places: Any, weights: Any, sizes: Any, memory: Any, step: Any, numbers: Any, terms: int, kind: Any
    ) -> None:
        """Compute the mixer.

        Args:
            threads: take shares of each kernel.
            places: addresses of x, of the result, which may be x, and of a room for what is between the kernels.
            weights: the addresses of the linear layers of x, of that of the result (0 for a bias that one does not
                have), and of taps, norm and gates.
            sizes: `Sizes`.
            memory: `Memory`.
            step: `calls.Step`.
            numbers: eps of the norm, and the most of beta.
            terms: where the `terms.Terms` of the two groups of layers of x, and of that of the result lie.
            kind: a number of the elements' type.
        """
        x, out, room = places
        inputs, (out_weight, out_bias), (taps, norm_weight, a_log, dt_bias) = weights
        rows, width, heads, itemsize = step.rows, sizes.width, sizes.value_heads, elements(x, 0, kind).itemsize
        inner = heads * sizes.value_dim
        channels = 2 * sizes.key_heads * sizes.key_dim + inner
        layout, captures = (step.sequences, step.num_sequences), (step.captures, step.num_captures)
        eps, scale = numbers
        rooms, no = _rooms(sizes, rows, room, itemsize), np.int64(0)
        zeros = floats(rooms.no_bias, channels)
        zeros[:] = 0.0
        # Per key head, the outputs lie where convolution and rule will write, side by side, and where the gates will.
        project(
            threads, x, inputs, sizes, rows, (rooms.qkv, rooms.gate, rooms.b, rooms.a, rooms.convolved, rooms.decay),
            terms, kind,
        )  # fmt: skip
        _convolve(
            shared(rows * channels * sizes.taps, threads), (rooms.qkv, channels, taps, rooms.no_bias, rooms.convolved),
            (rows, channels, sizes.taps, 1), layout,
            (step.block_size, memory.window_rows, memory.windows, memory.block_windows),
            (*captures, memory.captured_windows), (kind, kind, kind),
        )  # fmt: skip
        if sizes.gates_in_float32 > 0:
            log_at, bias_at = a_log, dt_bias
        else:
            log_at, bias_at = _widened(a_log, heads, kind, rooms.a_log), _widened(dt_bias, heads, kind, rooms.dt_bias)
        _gates(
            shared(rows * heads, threads),
            (rooms.a, heads, rooms.b, heads, log_at, bias_at, rooms.decay, rooms.beta), (rows, heads, 1), scale, kind,
        )  # fmt: skip
        _rule(
            shared(rows * inner * sizes.key_dim // _HEAD_WORK, threads),
            (rooms.convolved, channels, rooms.decay, rooms.beta, rooms.mixed),
            (sizes.key_heads, heads, sizes.key_dim, sizes.value_dim, False), layout,
            (step.block_size, memory.states), (*captures, memory.captured_states), kind,
        )  # fmt: skip
        normed = rooms.mixed  # a head is read before it is written
        _norm(
            shared(rows * inner, threads), (rooms.mixed, rooms.gate, norm_weight, normed), inner,
            (rows, inner, heads, sizes.value_dim), eps, False, sizes.by_sigmoid > 0, kind, kind,
        )  # fmt: skip
        multiply(threads, normed, inner, rows, inner, (out_weight, out_bias, width, out, *NO_OTHERS), kind)
        add(threads, normed, rows, inner, terms_at(terms, 2), (out, no, no), kind)

    made: Callable[..., None] = mixer
    return made
