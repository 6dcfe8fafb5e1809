"""Compute a decoder layer of attention in one call, for the steps of a rollout on the CPU.

The layer is ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; a gated MLP is in the call, of another one its input
is. A norm may be missing there, or be of what attention or the MLP gives, which may also be multiplied with a factor.

Invariant: an element is computed by the parts that the operations of the layer's modules run, in their order, and
rounded where they round. So a layer has the bits of its modules' own calls, which training makes.

What it spares is Python between some fifteen kernels, which took half of a decode step of a small model, and the waking
of threads: they are still awake from the kernel before. T rows, W hidden size, F width of the MLP, D head size.
"""

from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from samebit.kernels.cpu.activation import activation_at, sigmoid_rows
from samebit.kernels.cpu.attention.forward import attend_part
from samebit.kernels.cpu.attention.write_pages import rotate_and_write
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import elements, floats, integers, pointer, read, table, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import NO_OTHERS
from samebit.kernels.cpu.layers.calls import call_and_step, kept_call, record, work_of
from samebit.kernels.cpu.layers.mlp import ROOMS_OF_MLP, Gated, Half, Norm, normed, with_mlp
from samebit.kernels.cpu.layers.products import (
    ROW_PARTS,
    Kernels,
    product,
    product_by_tiles,
    product_of_pairs,
    shared,
    write_widened,
)
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
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.layers.attention import HEAD_NORMS, AttentionLayerOptions, AttentionTerms, AttentionWeights
from samebit.kernels.layout.layers.call import LayerCall

_rotate_and_write, _sigmoid = rotate_and_write.part, sigmoid_rows.part

_FLOAT = np.float32(0)
_FULL, _ROTATED = HEAD_NORMS.index("full"), HEAD_NORMS.index("rotated")


class Sizes(NamedTuple):
    """Holds the address of the layer's pages and their number, W, heads of queries and of keys, D, F (0 for another
    MLP), whether queries have gates, how many tokens a token sees (0 for all), whether queries and keys are
    rotated, whether elements that are rotated together stand side by side, and the place of what the norms of queries
    and keys are among `HEAD_NORMS`."""

    pages: int
    num_blocks: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    gated: int
    window: int
    rotated: int
    neighbours: int
    head_norms: int


class Numbers(NamedTuple):
    """Holds the factor on what is added to a residual; the scale and the softcap of attention."""

    factor: Any
    scale: Any
    softcap: Any


class Rooms(NamedTuple):
    """Holds the addresses of what is between the kernels: norms, queries, keys, values, rotated queries, queries with
    their gates, or keys before a norm of all heads; sinks as float32; and where that of the MLP begins."""

    normed: int
    q: int
    k: int
    v: int
    rotated: int
    raw: int
    sinks: int
    of_mlp: int


_WEIGHTS, _SIZES, _GATED = 23, len(Sizes._fields), len(Gated._fields)
_NORMS, _NUMBERS = 2 * 5, len(Numbers._fields)
_LAYOUT = Struct(f"={_WEIGHTS + _SIZES + _GATED}q" + "f4x" * (_NORMS + _NUMBERS) + LAYOUT * 4)
"""Lays out a layer's record: the addresses of `AttentionWeights.flat`, 0 for what it does not have, `Sizes`,
`mlp.Gated`, eps and offset of each norm, those of heads last, `Numbers`, and four `Terms`."""

_SIZES_AT = 8 * _WEIGHTS
_GATED_AT = _SIZES_AT + 8 * _SIZES
_NORMS_AT = _GATED_AT + 8 * _GATED
_NUMBERS_AT = _NORMS_AT + 8 * _NORMS
_TERMS_AT = _NUMBERS_AT + 8 * _NUMBERS


@inlined_part
def _norm(weight: int, bias: int, record_at: int, place: int) -> Any:
    """Return the norm of weight and bias whose numbers are at this place among those of a record."""
    eps, offset = read(record_at + _NORMS_AT + 16 * place, 2, _FLOAT)
    return Norm(weight, offset, eps, bias)


@inlined_part
def _rooms(sizes: Any, rows: int, room: int, itemsize: int) -> Any:
    """Place the arrays of a layer from an address on; `_room_of` is the room that they take."""
    heads, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    q = room + whole_lines(rows * sizes.width) * itemsize
    k = q + whole_lines(rows * heads) * itemsize
    v = k + whole_lines(rows * keys) * itemsize
    rotated = v + whole_lines(rows * keys) * itemsize
    raw = rotated + whole_lines(rows * heads) * itemsize
    sinks = raw + whole_lines(rows * (2 * heads * sizes.gated + keys * (sizes.head_norms == _FULL))) * itemsize
    of_mlp = sinks + whole_lines(sizes.heads) * 4
    return Rooms(room, q, k, v, rotated, raw, sinks, of_mlp)


def _room_of(options: AttentionLayerOptions, itemsize: int) -> tuple[int, int]:
    """Return the bytes of `_rooms` and of the MLP's, those of each row and those of the layer."""
    heads, keys = options.heads * options.head_dim, options.kv_heads * options.head_dim
    raw = 2 * heads * options.gated + keys * (options.head_norms == "full")
    of_row = options.width + heads + keys + keys + heads + raw  # in the order of `Rooms`
    of_mlp = 3 * options.inner + options.width
    of_layer = (len(Rooms._fields) - 2 + ROOMS_OF_MLP) * LANES * itemsize + (options.heads + LANES) * 4
    return (of_row + of_mlp) * itemsize, of_layer


@kernel_part
def _split(part: int, both_at: int, q_at: int, heads: int, dim: int, kind: Any) -> None:
    """Copy a share of the queries from before their gates, for ``heads`` of all rows together."""
    both, q = elements(both_at, 2 * heads * dim, kind), elements(q_at, heads * dim, kind)
    for head in range(heads * part // ROW_PARTS, heads * (part + 1) // ROW_PARTS):
        source, target = both[2 * head * dim : (2 * head + 1) * dim], q[head * dim : (head + 1) * dim]
        for i in range(dim):
            target[i] = source[i]


def _with_product(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the layer from a product of up to three layers of one input, and what adds an adapter's terms to it."""

    finish = with_mlp(multiply, add)

    @kernel_part
    def layer(threads: int, call_at: int, kind: Any) -> None:
        """Compute the layer of the `calls.Call` at an address."""
        call, step = call_and_step(call_at)
        work = work_of(call)
        no, at = np.int64(0), call.record
        sizes, numbers = Sizes(*read(at + _SIZES_AT, _SIZES, no)), Numbers(*read(at + _NUMBERS_AT, _NUMBERS, _FLOAT))
        (
            first_norm, of_attended, second_norm, of_mlp, first_bias, second_bias, q_norm, k_norm, q_weight, q_bias,
            k_weight, k_bias, v_weight, v_bias, o_weight, o_bias, gate_weight, gate_bias, up_weight, up_bias,
            down_weight, down_bias, sinks,
        ) = read(at, _WEIGHTS, no)  # fmt: skip
        rows, width, dim, itemsize = step.rows, sizes.width, sizes.head_dim, elements(no, 0, kind).itemsize
        heads, kv_heads = sizes.heads * dim, sizes.kv_heads * dim
        rooms = _rooms(sizes, rows, call.room, itemsize)
        first, first_heads = (rooms.raw, 2 * heads) if sizes.gated > 0 else (rooms.q, heads)
        keys, source = rooms.k, call.x
        if sizes.head_norms == _FULL:
            first, keys = rooms.rotated, rooms.raw
        if first_norm:
            source = rooms.normed
            normed(threads, call.x, _norm(first_norm, first_bias, at, 0), rows, width, source, kind)
        multiply(
            threads, source, width, rows, width,
            (q_weight, q_bias, first_heads, first, k_weight, k_bias, kv_heads, keys, v_weight, v_bias, kv_heads,
             rooms.v), kind,
        )  # fmt: skip
        add(threads, source, rows, width, terms_at(at + _TERMS_AT, 0), (first, keys, rooms.v), kind)
        if sizes.gated > 0:
            share_out(
                _split, ROW_PARTS, shared(rows * heads, threads), (rooms.raw, rooms.q, rows * sizes.heads, dim, kind)
            )  # fmt: skip
        if sizes.head_norms == _FULL:
            normed(threads, first, _norm(q_norm, no, at, 4), rows, heads, rooms.q, kind)
            normed(threads, keys, _norm(k_norm, no, at, 4), rows, kv_heads, rooms.k, kind)
            q_norm = k_norm = no
        of_heads = _norm(no, no, at, 4)
        _rotate_and_write(
            threads, (rooms.q, rooms.k, rooms.v, step.cos, step.sin, sizes.pages, rooms.rotated),
            (rows, sizes.heads, sizes.kv_heads, dim, step.angles * sizes.rotated, step.block_size, sizes.neighbours),
            (q_norm, kind, k_norm, kind, of_heads.offset, of_heads.eps, np.int64(sizes.head_norms == _ROTATED)),
            integers(step.blocks, rows), integers(step.offsets, rows), kind,
        )  # fmt: skip
        of_sinks = floats(sinks, sizes.heads if sinks else 0)
        if sinks and itemsize < 4:
            of_sinks = floats(write_widened(threads, sinks, sizes.heads, rooms.sinks, kind), sizes.heads)
        attended = rooms.q  # the queries are not read any more
        attend_part(
            carray(pointer(rooms.rotated, kind), (rows, sizes.heads, dim)),
            carray(pointer(sizes.pages, kind), (sizes.num_blocks, sizes.kv_heads, 2, dim * step.block_size)),
            table(step.sequences, 4, step.num_sequences),
            table(work.block_tables, work.num_tables, work.table_width), table(work.tiles, work.num_tiles, 2),
            table(work.bunches, work.num_bunches, 2), (numbers.scale, numbers.softcap, sizes.window), of_sinks,
            carray(pointer(attended, kind), (rows, sizes.heads, dim)), carray(pointer(no, _FLOAT), (0, 0)), threads,
        )  # fmt: skip
        if sizes.gated > 0:
            _sigmoid(
                shared(rows * heads, threads), rooms.raw + dim * itemsize, attended, kind, rows * sizes.heads,
                dim, 2 * dim, dim, rooms.rotated,
            )  # fmt: skip
            attended = rooms.rotated
        multiply(threads, attended, heads, rows, heads, (o_weight, o_bias, width, rooms.normed, *NO_OTHERS), kind)
        add(threads, attended, rows, heads, terms_at(at + _TERMS_AT, 1), (rooms.normed, no, no), kind)
        half = Half(
            _norm(of_attended, no, at, 1), _norm(second_norm, second_bias, at, 2), _norm(of_mlp, no, at, 3),
            numbers.factor, Gated(*read(at + _GATED_AT, _GATED, no)),
        )  # fmt: skip
        finish(
            threads, (call.x, rooms.normed, call.out, rooms.of_mlp, call.normed), (rows, width, sizes.inner),
            (gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias), half,
            (terms_at(at + _TERMS_AT, 2), terms_at(at + _TERMS_AT, 3)), itemsize, kind,
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


def attention_call(
    weights: AttentionWeights, context: ForwardContext, options: AttentionLayerOptions, terms: AttentionTerms
) -> LayerCall:
    """Implement `dispatch.WholeCalls.attention_call`."""
    if context.pages is None:
        raise ValueError("a context without pages; allowed: a rollout's")
    pages = context.pages[options.attention.layer]
    places = pages.data_ptr(), len(pages)
    return kept_call(weights, places, terms, lambda: _call(weights, places, options, terms, pages.dtype))


def _call(
    weights: AttentionWeights, places: tuple[int, int], options: AttentionLayerOptions, terms: AttentionTerms,
    dtype: torch.dtype,
) -> LayerCall:  # fmt: skip
    groups = tuple(map(terms_of, terms))
    numbers = (
        *weights.addresses, *places, options.width, options.heads, options.kv_heads, options.head_dim, options.inner,
        options.gated, options.attention.window, options.rotated, options.neighbours,
        HEAD_NORMS.index(options.head_norms), activation_at(options.mlp.activation, dtype), options.mlp.fused,
        *options.numbers, *chain.from_iterable(map(numbers_of, groups)),
    )  # fmt: skip
    room = _room_of(options, dtype.itemsize)
    return LayerCall(_kernels.at(groups, dtype), record(_LAYOUT, *numbers), room, not options.inner)
