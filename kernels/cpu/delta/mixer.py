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
_ROOMS = 11
"""The arrays that lie in the room, each from a cache line on."""


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
    """Holds where the addresses of the rule's memory lie, and the addresses of windows, now and of a block, and of the
    checkpoints' states and windows."""

    states: int
    windows: int
    block_windows: int
    captured_states: int
    captured_windows: int


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
        decay = room
        beta = decay + whole_lines(rows * heads) * 4
        log_at = beta + whole_lines(rows * heads) * 4
        bias_at = log_at + whole_lines(heads) * 4
        qkv = bias_at + whole_lines(heads) * 4
        gate = qkv + whole_lines(rows * channels) * itemsize
        b = gate + whole_lines(rows * inner) * itemsize
        a = b + whole_lines(rows * heads) * itemsize
        convolved = a + whole_lines(rows * heads) * itemsize
        mixed = convolved + whole_lines(rows * channels) * itemsize
        no_bias = mixed + whole_lines(rows * inner) * itemsize
        no = np.int64(0)
        normed = mixed  # a head is read before it is written
        zeros = floats(no_bias, channels)
        zeros[:] = 0.0
        # Per key head, the outputs lie where convolution and rule will write, side by side, and where the gates will.
        project(threads, x, inputs, sizes, rows, (qkv, gate, b, a, convolved, decay), terms, kind)
        _convolve(
            shared(rows * channels * sizes.taps, threads), (qkv, channels, taps, no_bias, convolved),
            (rows, channels, sizes.taps), layout, (step.block_size, memory.windows, memory.block_windows),
            (*captures, memory.captured_windows), (kind, kind, kind),
        )  # fmt: skip
        if sizes.gates_in_float32 > 0:
            log_at, bias_at = a_log, dt_bias
        else:
            log_at, bias_at = _widened(a_log, heads, kind, log_at), _widened(dt_bias, heads, kind, bias_at)
        _gates(
            shared(rows * heads, threads), (a, heads, b, heads, log_at, bias_at, decay, beta), (rows, heads, 1), scale,
            kind,
        )  # fmt: skip
        _rule(
            shared(rows * inner * sizes.key_dim // _HEAD_WORK, threads), (convolved, channels, decay, beta, mixed),
            (sizes.key_heads, heads, sizes.key_dim, sizes.value_dim, False), layout,
            (step.block_size, memory.states), (*captures, memory.captured_states), kind,
        )  # fmt: skip
        _norm(
            shared(rows * inner, threads), (mixed, gate, norm_weight, normed), inner,
            (rows, inner, heads, sizes.value_dim), eps, False, sizes.by_sigmoid > 0, kind, kind,
        )  # fmt: skip
        multiply(threads, normed, inner, rows, inner, (out_weight, out_bias, width, out, *NO_OTHERS), kind)
        add(threads, normed, rows, inner, terms_at(terms, 2), (out, no, no), kind)

    made: Callable[..., None] = mixer
    return made


def room_of_mixer(options: MixerOptions, itemsize: int) -> tuple[int, int]:
    """Return the bytes, of each row and of the layer, that a mixer needs for what is between its kernels."""
    rule = options.rule
    elements_of_row = 2 * rule.width + 2 * rule.inner + 2 * rule.value_heads
    floats_of_row, floats_of_layer = 2 * rule.value_heads, 2 * rule.value_heads + rule.width
    return elements_of_row * itemsize + 4 * floats_of_row, 4 * floats_of_layer + _ROOMS * CACHE_LINE
