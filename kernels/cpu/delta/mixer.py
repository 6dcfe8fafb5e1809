"""Compute a whole Gated DeltaNet layer in one call, from hidden states to hidden states, for the steps of a rollout.

Invariant: an element is computed by the parts that the layer's operations run one by one, in their order, and rounded
where they round. So the layer has the bits of these operations, which training makes.

What it spares is Python between seven kernels, and the waking of threads. Each kernel goes over all rows before the
next begins: convolving and normalising with each item of the rule was slower, because nothing asks for its state
meanwhile. T rows, W hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import floats, kind_of, whole_lines
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.conv import convolve_rows
from samebit.kernels.cpu.delta.gates import gates_of_rows
from samebit.kernels.cpu.delta.operation import WORK_AN_ELEMENT
from samebit.kernels.cpu.delta.rule import rule
from samebit.kernels.cpu.dense.products import Kernels, product, product_by_tiles, product_of_pairs, shared
from samebit.kernels.cpu.norm import gated_rms_norm_rows
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import CACHE_LINE
from samebit.kernels.layout.options import MixerOptions, MixerWeights
from samebit.kernels.layout.states.delta import DeltaStates
from samebit.kernels.openmp import num_threads

_convolve, _gates, _rule = convolve_rows.part, gates_of_rows.part, rule.part
_norm = gated_rms_norm_rows.part

_HEAD_WORK = int(1 / WORK_AN_ELEMENT)
_PRODUCTS = 16
"""Products that take the time of one element of a row-wise kernel."""

_ROOMS = 9
"""The arrays that lie in the room, each from a cache line on."""


class Sizes(NamedTuple):
    """Holds T, W, taps of the convolution, Hk, Hv, K and V."""

    rows: int
    width: int
    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def _with_product(multiply: Callable[..., None]) -> Callable[..., None]:
    """Make the layer from a product of up to three layers of one input."""

    @kernel_part
    def mixer(
        threads: int, call: Any, given: Any, sizes_given: Any, numbers: Any, layout: Any, memory: Any, captures: Any,
        kind: Any,
    ) -> None:  # fmt: skip
        """Compute the layer.

        Args:
            threads: take shares of each kernel.
            call: addresses of x, of the result and of a room for what is between the kernels; bytes of an element.
            given: the addresses of `MixerWeights.flat`, 0 for a bias that a layer does not have.
            sizes_given: `Sizes`.
            numbers: eps of the norm, whether its gate is a sigmoid, the most of beta.
            layout: as `rule` and the convolution take it.
            memory: the grid; where the addresses of the rule's memory lie; addresses of windows, now and of a block.
            captures: address and number of them, addresses of the checkpoints' states and windows.
            kind: a number of the elements' type.
        """
        x, out, room, itemsize = call
        sizes = Sizes(*sizes_given)
        (
            qkv_weight, qkv_bias, gate_weight, gate_bias, b_weight, b_bias, a_weight, a_bias, out_weight, out_bias,
            taps, norm_weight, a_log, dt_bias,
        ) = given  # fmt: skip
        rows, width, heads = sizes.rows, sizes.width, sizes.value_heads
        inner = heads * sizes.value_dim
        channels = 2 * sizes.key_heads * sizes.key_dim + inner
        grid, states, windows, block_windows = memory
        captures_at, num_captures, captured_states, captured_windows = captures
        eps, by_sigmoid, scale = numbers
        decay = room
        beta = decay + whole_lines(rows * heads) * 4
        qkv = beta + whole_lines(rows * heads) * 4
        convolved = qkv + whole_lines(rows * channels) * itemsize
        gate = convolved + whole_lines(rows * channels) * itemsize
        b = gate + whole_lines(rows * inner) * itemsize
        a = b + whole_lines(rows * heads) * itemsize
        mixed = a + whole_lines(rows * heads) * itemsize
        no_bias = mixed + whole_lines(rows * inner) * itemsize
        no = np.int64(0)
        normed = qkv  # what was convolved is not read any more
        zeros = floats(no_bias, channels)
        zeros[:] = 0.0
        multiply(
            threads, x, width, rows, width,
            (qkv_weight, qkv_bias, channels, qkv, gate_weight, gate_bias, inner, gate, b_weight, b_bias, heads, b),
            kind,
        )  # fmt: skip
        multiply(
            shared(rows * width * heads // _PRODUCTS, threads), x, width, rows, width,
            (a_weight, a_bias, heads, a, no, no, no, no, no, no, no, no), kind,
        )  # fmt: skip
        _convolve(
            shared(rows * channels * sizes.taps, threads), (qkv, channels, taps, no_bias, convolved),
            (rows, channels, sizes.taps), layout, (grid, windows, block_windows),
            (captures_at, num_captures, captured_windows), (kind, kind, kind),
        )  # fmt: skip
        _gates(
            shared(rows * heads, threads), (a, heads, b, heads, a_log, dt_bias, decay, beta),
            (rows, heads, 1), scale, kind,
        )  # fmt: skip
        _rule(
            shared(rows * inner * sizes.key_dim // _HEAD_WORK, threads), (convolved, channels, decay, beta, mixed),
            (sizes.key_heads, heads, sizes.key_dim, sizes.value_dim, False), layout, (grid, states),
            (captures_at, num_captures, captured_states), kind,
        )  # fmt: skip
        _norm(
            shared(rows * inner, threads), (mixed, gate, norm_weight, normed), inner,
            (rows, inner, heads, sizes.value_dim), eps, False, by_sigmoid, kind, kind,
        )  # fmt: skip
        multiply(
            threads, normed, inner, rows, inner,
            (out_weight, out_bias, width, out, no, no, no, no, no, no, no, no), kind,
        )  # fmt: skip

    made: Callable[..., None] = mixer
    return made


_mixer = _with_product(product)
_mixer_by_pairs = _with_product(product_of_pairs)
_mixer_by_tiles = _with_product(product_by_tiles)


def _mix(
    threads: int, call: Any, weights: Any, sizes: Any, numbers: Any, layout: Any, memory: Any, captures: Any, kind: Any
) -> None:
    """Compute a layer, multiplying in float32."""
    _mixer(threads, call, weights, sizes, numbers, layout, memory, captures, kind)


def _mix_by_pairs(
    threads: int, call: Any, weights: Any, sizes: Any, numbers: Any, layout: Any, memory: Any, captures: Any, kind: Any
) -> None:
    """Compute a layer in bfloat16, multiplying in pairs of inputs."""
    _mixer_by_pairs(threads, call, weights, sizes, numbers, layout, memory, captures, kind)


def _mix_by_tiles(
    threads: int, call: Any, weights: Any, sizes: Any, numbers: Any, layout: Any, memory: Any, captures: Any, kind: Any
) -> None:
    """Compute a layer in bfloat16, multiplying with tile instructions."""
    _mixer_by_tiles(threads, call, weights, sizes, numbers, layout, memory, captures, kind)


_kernels = Kernels(*map(compile_kernel, (_mix, _mix_by_pairs, _mix_by_tiles)))


def delta_mixer(x: torch.Tensor, weights: MixerWeights, context: ForwardContext, options: MixerOptions) -> torch.Tensor:
    """Implement `dispatch.delta_mixer_of`."""
    if context.states is None:
        raise ValueError("a context without states; allowed: a rollout's")
    x, layer = x.contiguous(), options.rule.layer
    out = torch.empty_like(x)
    memory, rows = context.states.layer(layer, DeltaStates), context.num_rows
    room, count = _room(context, options, x.dtype), len(context.captures)
    captures = 0, 0, 0, 0
    if count:
        kept = context.states.checkpoints[layer]
        captures = context.captured.data_ptr(), count, kept.state.data_ptr(), kept.window.data_ptr()
    _kernels.of(x.dtype)(
        num_threads(), (x.data_ptr(), out.data_ptr(), room.data_ptr(), x.element_size()),
        tuple(0 if weight is None else weight.data_ptr() for weight in weights.flat()),
        (rows, options.width, options.taps, *options.rule.sizes), options.numbers,
        (context.layout.data_ptr(), len(context.lengths)),
        (context.block_size, memory.addresses.data_ptr(), memory.window.data_ptr(), memory.block_window.data_ptr()),
        captures, kind_of(x.dtype),
    )  # fmt: skip
    return out


def _room(context: ForwardContext, options: MixerOptions, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for what is between the kernels of a layer; the layers of a call share it."""
    rule = options.rule
    key = "delta mixer", rule.sizes, dtype
    if key not in context.worked_out:
        elements = 2 * rule.width + 2 * rule.inner + 2 * rule.value_heads
        size = context.num_rows * (elements * dtype.itemsize + 8 * rule.value_heads)
        context.worked_out[key] = torch.empty(size + 4 * rule.width + _ROOMS * CACHE_LINE, dtype=torch.uint8)
    room: torch.Tensor = context.worked_out[key]
    return room
