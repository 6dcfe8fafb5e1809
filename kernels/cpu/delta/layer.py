"""Compute a decoder layer of a Gated DeltaNet mixer in one call, for the steps of a rollout on the CPU.

The layer is ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; a gated MLP is in the call, of another one its input is.

Invariant: an element is computed by the parts that the operations of the layer's modules run, in their order, and
rounded where they round. So a layer has the bits of its modules' own calls, which training makes.

T rows, W hidden size, F width of the MLP.
"""

from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import elements, read, whole_lines
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.delta.mixer import Memory, Sizes, room_of_mixer, with_mixer
from samebit.kernels.cpu.layers.calls import call_and_step, kept_call, record
from samebit.kernels.cpu.layers.mlp import Norm, normed, pre_norm, with_mlp
from samebit.kernels.cpu.layers.products import Kernels, product, product_by_tiles, product_of_pairs
from samebit.kernels.cpu.layers.terms import (
    LAYOUT,
    LayerKernels,
    add_adapter,
    add_nothing,
    numbers_of,
    terms_at,
    terms_of,
)
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import CACHE_LINE
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.delta import DeltaLayerOptions, DeltaTerms, DeltaWeights
from samebit.kernels.layout.states.delta import DeltaStates

_FLOAT = np.float32(0)

_OF_MLP = 5
"""The arrays of the MLP that lie in the room, each from a cache line on, and the norm before them."""


class Numbers(NamedTuple):
    """Holds eps and offset of the norms before the mixer and before the MLP, and the mixer's numbers."""

    first_eps: Any
    first_offset: Any
    second_eps: Any
    second_offset: Any
    mixer_eps: Any
    most_of_beta: Any


_WEIGHTS, _SIZES, _MEMORY, _NUMBERS = 22, len(Sizes._fields), len(Memory._fields), len(Numbers._fields)
_LAYOUT = Struct(f"={_WEIGHTS + _SIZES + _MEMORY}q" + "f4x" * _NUMBERS + LAYOUT * 5)
"""Lays out a layer's record: the addresses of `DeltaWeights.flat`, 0 for what it does not have, `mixer.Sizes`,
`mixer.Memory`, `Numbers`, and five `Terms`."""

_SIZES_AT = 8 * _WEIGHTS
_MEMORY_AT = _SIZES_AT + 8 * _SIZES
_NUMBERS_AT = _MEMORY_AT + 8 * _MEMORY
_TERMS_AT = _NUMBERS_AT + 8 * _NUMBERS


def _with_product(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the layer from a product of up to three layers of one input, and what adds an adapter's terms to it."""
    mix, finish = with_mixer(multiply, add), with_mlp(multiply, add)

    @kernel_part
    def layer(threads: int, call_at: int, kind: Any) -> None:
        """Compute the layer of the `calls.Call` at an address."""
        call, step = call_and_step(call_at)
        no, at = np.int64(0), call.record
        sizes, numbers = Sizes(*read(at + _SIZES_AT, _SIZES, no)), Numbers(*read(at + _NUMBERS_AT, _NUMBERS, _FLOAT))
        weights = read(at, _WEIGHTS, no)
        rows, width, itemsize = step.rows, sizes.width, elements(no, 0, kind).itemsize
        normed_at = call.room
        rest = normed_at + whole_lines(rows * width) * itemsize
        first = Norm(weights[0], numbers.first_offset, numbers.first_eps, no)
        normed(threads, call.x, first, rows, width, normed_at, kind)
        mix(
            threads, (normed_at, normed_at, rest), (weights[2:10], weights[10:12], weights[18:]), sizes,
            Memory(*read(at + _MEMORY_AT, _MEMORY, no)), step, (numbers.mixer_eps, numbers.most_of_beta),
            at + _TERMS_AT, kind,
        )  # fmt: skip
        finish(
            threads, (call.x, normed_at, call.out, rest, call.normed), (rows, width, sizes.inner),
            weights[12:18], pre_norm(weights[1], numbers.second_offset, numbers.second_eps),
            (terms_at(at + _TERMS_AT, 3), terms_at(at + _TERMS_AT, 4)), itemsize, kind,
        )  # fmt: skip

    made: Callable[..., None] = layer
    return made


_layer = _with_product(product, add_nothing)
_layer_by_pairs = _with_product(product_of_pairs, add_nothing)
_layer_by_tiles = _with_product(product_by_tiles, add_nothing)
_adapted = _with_product(product, add_adapter)
_adapted_by_pairs = _with_product(product_of_pairs, add_adapter)
_adapted_by_tiles = _with_product(product_by_tiles, add_adapter)


def _run(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer, multiplying in float32."""
    _layer(threads, call_at, kind)


def _run_by_pairs(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer in bfloat16, multiplying in pairs of inputs."""
    _layer_by_pairs(threads, call_at, kind)


def _run_by_tiles(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer in bfloat16, multiplying with tile instructions."""
    _layer_by_tiles(threads, call_at, kind)


def _run_adapted(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an adapter, multiplying in float32."""
    _adapted(threads, call_at, kind)


def _run_adapted_by_pairs(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an adapter in bfloat16, multiplying in pairs of inputs."""
    _adapted_by_pairs(threads, call_at, kind)


def _run_adapted_by_tiles(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an adapter in bfloat16, multiplying with tile instructions."""
    _adapted_by_tiles(threads, call_at, kind)


_kernels = LayerKernels(
    Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles))),
    Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles))),
)


def delta_call(
    weights: DeltaWeights, context: ForwardContext, options: DeltaLayerOptions, terms: DeltaTerms
) -> LayerCall:
    """Implement `dispatch.WholeCalls.delta_call`."""
    if context.states is None:
        raise ValueError("a context without states; allowed: a rollout's")
    layer = options.mixer.rule.layer
    memory, kept = context.states.layer(layer, DeltaStates), context.states.checkpoints[layer]
    tensors = memory.window, memory.block_window, kept.state, kept.window
    places = memory.addresses.data_ptr(), memory.windows[1], *(part.data_ptr() for part in tensors)
    return kept_call(weights, places, terms, lambda: _call(weights, places, options, terms, memory.dtype))


def _call(
    weights: DeltaWeights, places: tuple[int, ...], options: DeltaLayerOptions, terms: DeltaTerms, dtype: torch.dtype
) -> LayerCall:
    mixer, groups = options.mixer, tuple(map(terms_of, terms))
    numbers = (
        *weights.addresses, mixer.width, mixer.taps, *mixer.rule.sizes, options.inner, mixer.norm.sigmoid,
        mixer.by_key_head, weights.mixer.a_log.dtype is torch.float32, *places, *options.numbers,
        *chain.from_iterable(map(numbers_of, groups)),
    )  # fmt: skip
    of_mlp, itemsize = (3 * options.inner + mixer.width) * dtype.itemsize, dtype.itemsize
    of_row, of_layer = room_of_mixer(mixer, itemsize)
    room = mixer.width * itemsize + max(of_mlp, of_row), of_layer + _OF_MLP * CACHE_LINE  # one after the other
    return LayerCall(_kernels.at(groups, dtype), record(_LAYOUT, *numbers), room, not options.inner)
