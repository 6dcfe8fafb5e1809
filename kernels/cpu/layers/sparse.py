"""Compute a decoder layer of sparse attention over latents (DSA) in one call, for the steps of a rollout on the CPU: as
in `latent`, but that between its products and its attention it chooses the tokens to read, or reads those that an
earlier layer has chosen.

Invariant: as in `latent`. What is not copied here has the same bits: index keys are normalised and rotated into their
page, the two products of one input are shared out together. Where all tokens are read nothing is chosen, and of the
indexer keys alone are computed.

T rows, W hidden size, H heads and D elements of an index key, K tokens chosen for a row.
"""

from collections.abc import Callable
from struct import Struct, calcsize
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, integers, pointer, read, table, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import NO_LAYER, NO_OTHERS
from samebit.kernels.cpu.latent.index import select_part
from samebit.kernels.cpu.latent.selection import Plan, chosen_of
from samebit.kernels.cpu.layers import latent
from samebit.kernels.cpu.layers.calls import record
from samebit.kernels.cpu.layers.products import ROW_PARTS, Kernels, product, shared, write_widened
from samebit.kernels.cpu.layers.terms import LayerKernels, add_adapter, add_nothing, terms_of
from samebit.kernels.cpu.norm.forward import layer_norm_row
from samebit.kernels.cpu.rope import rotate_to_halves
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.latent import IndexerOptions, LatentLayerOptions, LatentTerms, LatentWeights

_FLOAT = np.float32(0.0)

_ROOMS = 6
"""The arrays that lie in the room, each from a multiple of sixteen elements on."""


class Weights(NamedTuple):
    """Holds the addresses of an indexer's parameters."""

    queries: int
    q_bias: int
    keys: int
    k_bias: int
    norm: int
    norm_bias: int
    factors: int


class Index(NamedTuple):
    """Holds the address of an indexer's pages and their number; H, D, whether neighbours are rotated together, and
    whether the weights of the heads are to be widened."""

    pages: int
    num_blocks: int
    heads: int
    size: int
    neighbours: int
    narrow: int


class Slabs(NamedTuple):
    """Holds the addresses and numbers of slabs, of their pieces and of the rows that have to choose, and the address of
    the scores of a slab and their shape, as `index.select_part` takes them; zeros where nothing is chosen."""

    begins: int
    num_slabs: int
    pieces: int
    num_pieces: int
    rows: int
    counts: int
    num_rows: int
    scores: int
    scored_rows: int
    scored_keys: int


class Numbers(NamedTuple):
    """Holds the eps of the norm of keys, the factor on the weights of the heads, and that on products."""

    eps: Any
    factor: Any
    scale: Any


class Rooms(NamedTuple):
    """Holds the addresses of keys and queries as products give them, of rotated queries, of the weights of the heads
    for each row, and of the layer's input and of what makes these, both as float32."""

    keys: int
    queries: int
    rotated: int
    factors: int
    wide: int
    wide_weight: int


_WEIGHTS, _INDEX, _SLABS = len(Weights._fields), len(Index._fields), len(Slabs._fields)
_NUMBERS = len(Numbers._fields)
_LAYOUT = Struct(latent.RECORD + f"{_WEIGHTS + _INDEX + _SLABS}q" + "f4x" * _NUMBERS)
"""Lays out a layer's record: behind that of `latent` are `Weights`, `Index`, `Slabs` and `Numbers`."""

_WEIGHTS_AT = calcsize(latent.RECORD)
_INDEX_AT = _WEIGHTS_AT + 8 * _WEIGHTS
_SLABS_AT = _INDEX_AT + 8 * _INDEX
_NUMBERS_AT = _SLABS_AT + 8 * _SLABS


@kernel_part
def _place_rows(
    part: int, rooms: Any, weights: Any, index: Any, numbers: Any, chooses: bool, sizes: Any, step: Any, kind: Any
) -> None:
    """Put the index keys of a share of the rows, normalised and rotated, into their pages. If the call
    ``chooses``, rotate the queries, and multiply the weights of the heads."""
    rows, half = step.rows, sizes.rope // 2
    heads, size, neighbours = index.heads, index.size, index.neighbours > 0
    keys, queries = elements(rooms.keys, rows * size, kind), elements(rooms.queries, rows * heads * size, kind)
    rotated, factors = elements(rooms.rotated, rows * heads * size, kind), floats(rooms.factors, rows * heads)
    weight, bias = elements(weights.norm, size, kind), elements(weights.norm_bias, size, kind)
    cos, sin = floats(step.cos, rows * half), floats(step.sin, rows * half)
    memory = elements(index.pages, NO_END, kind)
    block_of_row, offset_of_row = integers(step.blocks, rows), integers(step.offsets, rows)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        at = row * size
        to = (np.int64(block_of_row[row]) * step.block_size + offset_of_row[row]) * size
        along, across = cos[row * half : (row + 1) * half], sin[row * half : (row + 1) * half]
        layer_norm_row(keys[at : at + size], weight, bias, numbers.eps, lanes, keys[at : at + size])
        rotate_to_halves(keys, at, neighbours, along, across, memory, to)
        for d in range(2 * half, size):
            memory[to + d] = keys[at + d]
        for head in range(row * heads, (row + 1) * heads if chooses else row * heads):
            factors[head] *= numbers.factor
            rotate_to_halves(queries, head * size, neighbours, along, across, rotated, head * size)
            for d in range(head * size + 2 * half, (head + 1) * size):
                rotated[d] = queries[d]


@inlined_part
def _indexer_of(call: Any) -> Any:
    """Read `Weights`, `Index` and `Slabs` of a `Call`."""
    at, no = call.record, np.int64(0)
    weights, index = Weights(*read(at + _WEIGHTS_AT, _WEIGHTS, no)), Index(*read(at + _INDEX_AT, _INDEX, no))
    return weights, index, Slabs(*read(at + _SLABS_AT, _SLABS, no))


@inlined_part
def _rooms(index: Any, rows: int, width: int, room: int, itemsize: int) -> Any:
    """Place the arrays of an indexer from an address on."""
    queries = room + whole_lines(rows * index.size) * itemsize
    rotated = queries + whole_lines(rows * index.heads * index.size) * itemsize
    factors = rotated + whole_lines(rows * index.heads * index.size) * itemsize
    wide = factors + whole_lines(rows * index.heads) * 4
    return Rooms(room, queries, rotated, factors, wide, wide + whole_lines(rows * width) * 4)


@inlined_part
def _beside(call: Any, rows: int, room: int, kind: Any) -> Any:
    """Return the layers of keys and of queries; without a choice there are no queries."""
    (weights, index, slabs), no = _indexer_of(call), np.int64(0)
    rooms = _rooms(index, rows, 0, room, elements(no, 0, kind).itemsize)
    of_input = weights.keys, weights.k_bias, index.size, rooms.keys
    if slabs.num_slabs > 0:
        return of_input, (weights.queries, weights.q_bias, index.heads * index.size, rooms.queries)
    return of_input, NO_LAYER


@kernel_part
def _choose(
    threads: int, x: int, call: Any, step: Any, work: Any, sizes: Any, lists: Any, room: int, kind: Any
) -> None:
    """Choose the tokens that rows attend to, and write their keys; ``x`` is the address of the layer's normed input."""
    weights, index, slabs = _indexer_of(call)
    numbers = Numbers(*read(call.record + _NUMBERS_AT, _NUMBERS, _FLOAT))
    rows, width, heads, no, itemsize = step.rows, sizes.width, index.heads, np.int64(0), elements(0, 0, kind).itemsize
    rooms = _rooms(index, rows, width, room, itemsize)
    if slabs.num_slabs > 0:
        source, by = x, weights.factors
        if itemsize < 4:
            source = write_widened(threads, x, rows * width, rooms.wide, kind)
            if index.narrow > 0:
                by = write_widened(threads, weights.factors, heads * width, rooms.wide_weight, kind)
        product(threads, source, width, rows, width, (by, no, heads, rooms.factors, *NO_OTHERS), _FLOAT)
    share_out(
        _place_rows, ROW_PARTS, shared(rows * heads * index.size, threads),
        (rooms, weights, index, numbers, slabs.num_slabs > 0, sizes, step, kind),
    )  # fmt: skip
    if slabs.num_slabs > 0:
        select_part(
            carray(pointer(rooms.rotated, kind), (rows, heads, index.size)),
            carray(pointer(rooms.factors, _FLOAT), (rows, heads)),
            carray(pointer(index.pages, kind), (index.num_blocks, step.block_size, index.size)),
            table(step.sequences, 4, step.num_sequences), table(work.block_tables, work.num_tables, work.table_width),
            (table(slabs.begins, slabs.num_slabs + 1, 2), table(slabs.pieces, slabs.num_pieces, 4),
             integers(slabs.rows, slabs.num_rows), integers(slabs.counts, slabs.num_rows)),
            numbers.scale, carray(pointer(slabs.scores, _FLOAT), (slabs.scored_rows, slabs.scored_keys)), lists,
            threads,
        )  # fmt: skip


def _made(products: latent.Multiply, add: Callable[..., None]) -> Callable[..., None]:
    return latent.with_product(products, add, _beside, _choose)


_layer = _made(latent.PLAIN, add_nothing)
_layer_by_pairs = _made(latent.BY_PAIRS, add_nothing)
_layer_by_tiles = _made(latent.BY_TILES, add_nothing)
_adapted = _made(latent.PLAIN, add_adapter)
_adapted_by_pairs = _made(latent.BY_PAIRS, add_adapter)
_adapted_by_tiles = _made(latent.BY_TILES, add_adapter)


def _run(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an indexer, multiplying in float32."""
    _layer(threads, call_at, kind)


def _run_by_pairs(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an indexer in bfloat16, multiplying in pairs of inputs."""
    _layer_by_pairs(threads, call_at, kind)


def _run_by_tiles(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an indexer in bfloat16, multiplying with tile instructions."""
    _layer_by_tiles(threads, call_at, kind)


def _run_adapted(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an indexer and an adapter, multiplying in float32."""
    _adapted(threads, call_at, kind)


def _run_adapted_by_pairs(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an indexer and an adapter in bfloat16, multiplying in pairs of inputs."""
    _adapted_by_pairs(threads, call_at, kind)


def _run_adapted_by_tiles(threads: int, call_at: int, kind: Any) -> None:
    """Compute a layer with an indexer and an adapter in bfloat16, multiplying with tile instructions."""
    _adapted_by_tiles(threads, call_at, kind)


_kernels = LayerKernels(
    Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles))),
    Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles))),
)


def sparse_call(
    weights: LatentWeights, context: ForwardContext, options: LatentLayerOptions, terms: LatentTerms,
    earlier: torch.Tensor | None,
) -> LayerCall:  # fmt: skip
    """Implement `dispatch.WholeCalls.sparse_call`."""
    groups, index = tuple(map(terms_of, terms)), options.index
    pages = latent.pages_of(context, options.attention.layer)
    of_row, of_layer = latent.room_of(options, pages.dtype)
    if index is not None:
        chosen, plan = chosen_of(context, index.choice)
        numbers = latent.numbers_of_layer(weights, pages, options, groups, chosen)
        kept = record(_LAYOUT, *numbers, *_numbers_of_index(weights, context, index, plan), *index.numbers)
        more_of_row, more = _room_of(index, options.width, pages.dtype)
        room, kernels = (of_row + more_of_row, of_layer + more), _kernels
    elif earlier is not None:
        chosen, room, kernels = earlier, (of_row, of_layer), latent.KERNELS
        kept = latent.record_of(weights, pages, options, groups, chosen)
    else:
        raise TypeError("a layer without an indexer reads what an earlier one has chosen, and there is None")
    return LayerCall(kernels.at(groups, pages.dtype), kept, room, not options.inner, chosen)


def _numbers_of_index(
    weights: LatentWeights, context: ForwardContext, index: IndexerOptions, plan: Plan | None
) -> tuple[int, ...]:
    """Return `Weights`, `Index` and `Slabs`.

    Raises:
        ValueError: the layer has none.
    """
    if weights.index is None:
        raise ValueError("a layer without an indexer; allowed: one that has one")
    choice, pages = index.choice, latent.pages_of(context, index.choice.layer)
    of_plan: tuple[int, ...] = (0,) * _SLABS
    if plan is not None:
        begins, pieces, rows, counts = plan.slabs
        scores = _scores(context, plan)
        of_plan = (
            begins.ctypes.data, len(begins) - 1, pieces.ctypes.data, len(pieces), rows.ctypes.data, counts.ctypes.data,
            len(rows), scores.ctypes.data, *scores.shape,
        )  # fmt: skip
    return (
        *weights.addresses[latent.WEIGHTS :], pages.data_ptr(), len(pages), choice.heads, choice.size,
        index.neighbours, weights.index.factors.dtype != torch.float32, *of_plan,
    )  # fmt: skip


def _scores(context: ForwardContext, plan: Plan) -> Any:
    """Return memory for the scores of a slab; the layers of a call share it."""
    key = "sparse layer's scores", plan.scores
    if key not in context.worked_out:
        context.worked_out[key] = np.empty(plan.scores, np.float32)
    return context.worked_out[key]


def _room_of(index: IndexerOptions, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that an indexer needs for what is between its kernels, of each row and of the layer."""
    heads, size = index.choice.heads, index.choice.size
    of_row = size * (1 + 2 * heads) * dtype.itemsize + 4 * (heads + width)
    return of_row, 4 * heads * width + 4 * _ROOMS * LANES
