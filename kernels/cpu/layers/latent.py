"""Compute a decoder layer of attention over latents in one call, for the steps of a rollout on the CPU: all of it where
a gated MLP follows, and up to the norm before the MLP elsewhere.

Invariant: as in `layer`, an element is computed by the parts that the operations of the layer's modules run, in their
order, and rounded where they round. What is not copied here has the same bits: absorbed queries are written where the
rotated ones are put behind them, latents are normalised into their page.

T rows, W hidden size, H heads; rank, rope, nope and value are sizes as in `LatentLayerOptions`.
"""

from collections.abc import Callable
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, integers, pointer, read, table, whole_lines
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm import heads as products_of_heads
from samebit.kernels.cpu.gemm.layers import NO_LAYER, NO_OTHERS
from samebit.kernels.cpu.latent.forward import attend_part
from samebit.kernels.cpu.latent.operation import most_heads_together
from samebit.kernels.cpu.layers.calls import call_and_step, kept_call, record, work_of
from samebit.kernels.cpu.layers.mlp import ROOMS_OF_MLP, Norm, normed, pre_norm, with_mlp
from samebit.kernels.cpu.layers.products import ROW_PARTS, Kernels, product, product_by_tiles, product_of_pairs, shared
from samebit.kernels.cpu.layers.terms import (
    LAYOUT,
    LayerKernels,
    add_adapter,
    add_nothing,
    numbers_of,
    terms_at,
    terms_of,
)
from samebit.kernels.cpu.norm.forward import rms_norm_row
from samebit.kernels.cpu.rope import rotate_to_halves
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.latent import LatentLayerOptions, LatentTerms, LatentWeights

_heads = products_of_heads.multiply.part
_heads_by_pairs = products_of_heads.multiply_by_pairs.part
_heads_by_tiles = products_of_heads.multiply_by_tiles.part

_FLOAT = np.float32(0)


class Sizes(NamedTuple):
    """Holds W and H, the sizes of heads and latents, and the width of the MLP, 0 where another one follows."""

    width: int
    heads: int
    nope: int
    value: int
    rank: int
    rope: int
    query_rank: int
    inner: int


class Memory(NamedTuple):
    """Holds the address of the layer's pages and their number, that of the tokens that rows read, and how many of each
    row, 0 for all; the most heads of an item of attention, and whether neighbours are rotated together."""

    pages: int
    num_blocks: int
    lists: int
    top_k: int
    together: int
    neighbours: int


class Numbers(NamedTuple):
    """Holds the eps of each norm, and what is added to its weight; the scale of attention."""

    first_eps: Any
    first_offset: Any
    second_eps: Any
    second_offset: Any
    query_eps: Any
    query_offset: Any
    latent_eps: Any
    latent_offset: Any
    scale: Any


class Rooms(NamedTuple):
    """Holds the addresses of what is between the kernels: norms, latents and keys, queries, their latents and the norms
    of these, absorbed queries, what is attended to, and its values; where that of the MLP begins, and what is free."""

    normed: int
    compressed: int
    q: int
    low: int
    low_normed: int
    absorbed: int
    attended: int
    values: int
    of_mlp: int
    free: int


WEIGHTS = 19
"""Counts the parameters of `LatentWeights.flat` that are not an indexer's."""

_SIZES, _MEMORY, _NUMBERS = len(Sizes._fields), len(Memory._fields), len(Numbers._fields)
RECORD = f"={WEIGHTS + _SIZES + _MEMORY}q" + "f4x" * _NUMBERS + LAYOUT * 5
"""Lays out a layer's record: the addresses of its parameters, 0 for what it does not have, `Sizes`, `Memory`,
`Numbers`, and five `Terms`."""

_LAYOUT = Struct(RECORD)
_SIZES_AT = 8 * WEIGHTS
_MEMORY_AT = _SIZES_AT + 8 * _SIZES
_NUMBERS_AT = _MEMORY_AT + 8 * _MEMORY
_TERMS_AT = _NUMBERS_AT + 8 * _NUMBERS


@inlined_part
def _rooms(sizes: Any, rows: int, room: int, itemsize: int) -> Any:
    """Place the arrays of a layer from an address on; `room_of` is the room that they take."""
    count, rank, latent = sizes.heads, sizes.query_rank, sizes.rank + sizes.rope
    compressed = room + whole_lines(rows * sizes.width) * itemsize
    q = compressed + whole_lines(rows * latent) * itemsize
    low = q + whole_lines(rows * count * (sizes.nope + sizes.rope)) * itemsize
    low_normed = low + whole_lines(rows * rank) * itemsize
    absorbed = low_normed + whole_lines(rows * rank) * itemsize
    attended = absorbed + whole_lines(rows * count * latent) * itemsize
    values = attended + whole_lines(rows * count * sizes.rank) * itemsize
    of_mlp = values + whole_lines(rows * count * sizes.value) * itemsize
    free = of_mlp + (3 * whole_lines(rows * sizes.inner) + whole_lines(rows * sizes.width)) * itemsize
    return Rooms(room, compressed, q, low, low_normed, absorbed, attended, values, of_mlp, free)


def room_of(options: LatentLayerOptions, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of `_rooms` up to what is free, those of each row and those of the layer."""
    attention, rank = options.attention, options.query_rank
    of_head = options.nope + attention.rope + attention.width + attention.rank + options.value
    of_mlp = 3 * options.inner + options.width
    of_row = options.width + attention.width + rank + rank + options.heads * of_head + of_mlp
    return of_row * dtype.itemsize, (len(Rooms._fields) - 2 + ROOMS_OF_MLP) * LANES * dtype.itemsize


@kernel_part
def _place_rows(part: int, tensors: Any, rows: int, sizes: Any, memory: Any, norm: Any, step: Any, kind: Any) -> None:
    """Put the rotated parts of a share of the rows behind their absorbed queries, and their latents, normalised, and
    rotated keys into the pages.

    ``tensors``: addresses of queries ``[T, H, nope + rope]``, of latents and keys ``[T, rank + rope]``, of absorbed
    queries ``[T, H, rank + rope]``, of the norm's weight, of cos and sin.
    """
    q_at, given_at, absorbed_at, weight_at, cos_at, sin_at = tensors
    count, rank, half = sizes.heads, sizes.rank, sizes.rope // 2
    width, size = rank + sizes.rope, sizes.nope + sizes.rope
    q, given = elements(q_at, rows * count * size, kind), elements(given_at, rows * width, kind)
    absorbed, weight = elements(absorbed_at, rows * count * width, kind), elements(weight_at, rank, kind)
    cos, sin = floats(cos_at, rows * half), floats(sin_at, rows * half)
    pages, neighbours = elements(memory.pages, NO_END, kind), memory.neighbours > 0
    eps, offset = norm
    block_of_row, offset_of_row = integers(step.blocks, rows), integers(step.offsets, rows)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        at = row * width
        to = (np.int64(block_of_row[row]) * step.block_size + offset_of_row[row]) * width
        along, across = cos[row * half : (row + 1) * half], sin[row * half : (row + 1) * half]
        rms_norm_row(given[at : at + rank], weight, offset, eps, lanes, pages[to : to + rank])
        rotate_to_halves(given, at + rank, neighbours, along, across, pages, to + rank)
        for head in range(row * count, (row + 1) * count):
            rotate_to_halves(
                q, head * size + sizes.nope, neighbours, along, across, absorbed, head * width + rank
            )  # fmt: skip


@inlined_part
def nothing_beside(call: Any, rows: int, room: int, kind: Any) -> Any:
    """Return what a layer that chooses no tokens multiplies besides: no layer more of its input, and none more of the
    queries' latents."""
    return NO_LAYER, NO_LAYER


@kernel_part
def choose_nothing(
    threads: int, x: int, call: Any, step: Any, work: Any, sizes: Any, lists: Any, room: int, kind: Any
) -> None:
    """Choose tokens for a layer that has no indexer."""


class Multiply(NamedTuple):
    """Holds a product of up to three layers of one input, and that of heads."""

    layers: Callable[..., None]
    heads: Callable[..., None]


PLAIN = Multiply(product, _heads)
BY_PAIRS = Multiply(product_of_pairs, _heads_by_pairs)
BY_TILES = Multiply(product_by_tiles, _heads_by_tiles)


def with_product(
    products: Multiply, add: Callable[..., None], beside: Callable[..., Any] = nothing_beside,
    choose: Callable[..., None] = choose_nothing,
) -> Callable[..., None]:  # fmt: skip
    """Make the layer from its products, what adds an adapter's terms to them, and what chooses the tokens to read, with
    the layers that it multiplies ``beside`` others of the same input."""
    multiply, multiply_heads = products
    finish = with_mlp(multiply, add)

    @kernel_part
    def layer(threads: int, call_at: int, kind: Any) -> None:
        """Compute the layer of the `calls.Call` at an address."""
        call, step = call_and_step(call_at)
        work = work_of(call)
        no, at = np.int64(0), call.record
        sizes, memory = Sizes(*read(at + _SIZES_AT, _SIZES, no)), Memory(*read(at + _MEMORY_AT, _MEMORY, no))
        numbers = Numbers(*read(at + _NUMBERS_AT, _NUMBERS, _FLOAT))
        (
            first_norm, second_norm, q_norm, latent_norm, q_weight, q_bias, kv_weight, kv_bias, b_weight, b_bias,
            heads_weight, o_weight, o_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
        ) = read(at, WEIGHTS, no)  # fmt: skip
        rows, width, count, nope, value = step.rows, sizes.width, sizes.heads, sizes.nope, sizes.value
        rank, low, latent, size = sizes.rank, sizes.query_rank, sizes.rank + sizes.rope, nope + sizes.rope
        itemsize = elements(no, 0, kind).itemsize
        rooms = _rooms(sizes, rows, call.room, itemsize)
        of_input, of_low = beside(call, rows, rooms.free, kind)
        before = Norm(first_norm, numbers.first_offset, numbers.first_eps, no)
        normed(threads, call.x, before, rows, width, rooms.normed, kind)
        first, outputs = (rooms.low, low) if low > 0 else (rooms.q, count * size)
        multiply(
            threads, rooms.normed, width, rows, width,
            (q_weight, q_bias, outputs, first, kv_weight, kv_bias, latent, rooms.compressed, *of_input), kind,
        )  # fmt: skip
        add(threads, rooms.normed, rows, width, terms_at(at + _TERMS_AT, 0), (first, rooms.compressed, no), kind)
        if low > 0:
            of_queries = Norm(q_norm, numbers.query_offset, numbers.query_eps, no)
            normed(threads, rooms.low, of_queries, rows, low, rooms.low_normed, kind)
            multiply(
                threads, rooms.low_normed, low, rows, low,
                (b_weight, b_bias, count * size, rooms.q, *of_low, *NO_LAYER), kind,
            )  # fmt: skip
            add(threads, rooms.low_normed, rows, low, terms_at(at + _TERMS_AT, 1), (rooms.q, no, no), kind)
        each = (nope + value) * rank
        multiply_heads(
            shared(rows * count * nope, threads),
            products_of_heads.Product(
                products_of_heads.Rows(rooms.q, count * size, size),
                products_of_heads.Rows(rooms.absorbed, count * latent, latent),
                rows, count, nope, rank, heads_weight, each, True,
            ), kind,
        )  # fmt: skip
        share_out(
            _place_rows, ROW_PARTS, shared(rows * count * latent, threads),
            ((rooms.q, rooms.compressed, rooms.absorbed, latent_norm, step.cos, step.sin), rows, sizes, memory,
             (numbers.latent_eps, numbers.latent_offset), step, kind),
        )  # fmt: skip
        lists = table(memory.lists, rows, memory.top_k)
        choose(threads, rooms.normed, call, step, work, sizes, lists, rooms.free, kind)
        attend_part(
            carray(pointer(rooms.absorbed, kind), (rows, count, latent)),
            carray(pointer(memory.pages, kind), (memory.num_blocks, step.block_size, latent)),
            table(step.sequences, 4, step.num_sequences), table(work.block_tables, work.num_tables, work.table_width),
            table(work.tiles, work.num_tiles, 2), lists,
            memory.together, numbers.scale, carray(pointer(rooms.attended, kind), (rows, count, rank)),
            carray(pointer(no, _FLOAT), (0, 0)), threads,
        )  # fmt: skip
        multiply_heads(
            shared(rows * count * value, threads),
            products_of_heads.Product(
                products_of_heads.Rows(rooms.attended, count * rank, rank),
                products_of_heads.Rows(rooms.values, count * value, value),
                rows, count, rank, value, heads_weight + nope * rank * itemsize, each, False,
            ), kind,
        )  # fmt: skip
        multiply(
            threads, rooms.values, count * value, rows, count * value,
            (o_weight, o_bias, width, rooms.normed, *NO_OTHERS), kind,
        )  # fmt: skip
        add(threads, rooms.values, rows, count * value, terms_at(at + _TERMS_AT, 2), (rooms.normed, no, no), kind)
        finish(
            threads, (call.x, rooms.normed, call.out, rooms.of_mlp, call.normed), (rows, width, sizes.inner),
            (gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias),
            pre_norm(second_norm, numbers.second_offset, numbers.second_eps),
            (terms_at(at + _TERMS_AT, 3), terms_at(at + _TERMS_AT, 4)), itemsize, kind,
        )  # fmt: skip

    made: Callable[..., None] = layer
    return made


_layer = with_product(PLAIN, add_nothing)
_layer_by_pairs = with_product(BY_PAIRS, add_nothing)
_layer_by_tiles = with_product(BY_TILES, add_nothing)
_adapted = with_product(PLAIN, add_adapter)
_adapted_by_pairs = with_product(BY_PAIRS, add_adapter)
_adapted_by_tiles = with_product(BY_TILES, add_adapter)


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


KERNELS = LayerKernels(
    Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles))),
    Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles))),
)


def latent_call(
    weights: LatentWeights, context: ForwardContext, options: LatentLayerOptions, terms: LatentTerms
) -> LayerCall:
    """Implement `dispatch.WholeCalls.latent_call`."""
    pages = pages_of(context, options.attention.layer)
    places = pages.data_ptr(), len(pages)

    def call() -> LayerCall:
        groups = tuple(map(terms_of, terms))
        kept, room = record_of(weights, pages, options, groups, None), room_of(options, pages.dtype)
        return LayerCall(KERNELS.at(groups, pages.dtype), kept, room, not options.inner)

    return kept_call(weights, places, terms, call)


def pages_of(context: ForwardContext, layer: int) -> torch.Tensor:
    """Return the pages of a layer.

    Raises:
        ValueError: there are none, as the context is not a rollout's.
    """
    if context.pages is None:
        raise ValueError("a context without pages; allowed: a rollout's")
    return context.pages[layer]


def record_of(
    weights: LatentWeights, pages: torch.Tensor, options: LatentLayerOptions, groups: tuple[Any, ...],
    chosen: torch.Tensor | None,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Return a layer's record."""
    return record(_LAYOUT, *numbers_of_layer(weights, pages, options, groups, chosen))


def numbers_of_layer(
    weights: LatentWeights, pages: torch.Tensor, options: LatentLayerOptions, groups: tuple[Any, ...],
    chosen: torch.Tensor | None,
) -> tuple[object, ...]:  # fmt: skip
    """Return what stands in a layer's `RECORD`; ``chosen``: tokens that its rows read, ``[T, K]``, None for all."""
    attention = options.attention
    lists = (0, 0) if chosen is None else (chosen.data_ptr(), chosen.shape[1])
    return (
        *weights.addresses[:WEIGHTS], options.width, options.heads, options.nope, options.value, attention.rank,
        attention.rope, options.query_rank, options.inner, pages.data_ptr(), len(pages), *lists,
        most_heads_together(options.heads), options.neighbours, *options.numbers, attention.scale,
        *chain.from_iterable(map(numbers_of, groups)),
    )  # fmt: skip
