"""Compute a decoder layer of sparse attention over latents (DSA) in one call, for the steps of a rollout on the CPU: as
in `latent`, but that between its products and its attention it chooses the tokens to read, or reads those that an
earlier layer has chosen.

Invariant: as in `latent`. What is not copied here has the same bits: index keys are normalised and rotated into their
page, the two products of one input are shared out together. Where all tokens are read nothing is chosen, and of the
indexer keys alone are computed.

T rows, W hidden size, H heads and D elements of an index key, K tokens chosen for a row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray

from samebit.kernels.cpu.base.jit import array, compile_kernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, pointer, whole_lines
from samebit.kernels.cpu.base.numeric import widen
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.dense import latent
from samebit.kernels.cpu.dense.mlp import ROW_PARTS
from samebit.kernels.cpu.dense.products import Kernels, product, shared
from samebit.kernels.cpu.dense.terms import NO_TERMS, add_adapter, add_nothing, terms_of
from samebit.kernels.cpu.latent.index import select_part
from samebit.kernels.cpu.latent.selection import Plan, chosen_of
from samebit.kernels.cpu.norm import layer_norm_row
from samebit.kernels.cpu.rope import rotate_to_halves
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.layers.latent import IndexerOptions, LatentLayerOptions, LatentTerms, LatentWeights

_FLOAT = np.float32(0.0)

_ROOMS = 6
"""The arrays that lie in the room, each from a multiple of sixteen elements on."""

_NO_PLAN = (
    np.zeros((1, 2), np.int32), np.empty((0, 4), np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
)  # fmt: skip
_NO_SCORES = np.empty((0, 0), np.float32)


@kernel_part
def _widen_part(part: int, source_at: int, count: int, out_at: int, kind: Any) -> None:
    """Write a share of ``count`` elements as float32."""
    source, out = elements(source_at, count, kind), floats(out_at, count)
    for i in range(count * part // ROW_PARTS, count * (part + 1) // ROW_PARTS):
        out[i] = widen(source[i])


@kernel_part
def _place_rows(
    part: int, tensors: Any, sizes: Any, norm: Any, chooses: bool, factor: Any, neighbours: bool, pages: Any,
    places: Any, kind: Any,
) -> None:  # fmt: skip
    """Put the index keys of a share of the rows, normalised and rotated, into their pages. If the call ``chooses``,
    rotate the queries, and multiply the weights of the heads.

    ``tensors``: addresses of keys ``[T, D]``, queries ``[T, H, D]`` before and behind their rotation, weights
    ``[T, H]``, weight and bias of the norm, cos and sin.
    """
    keys_at, queries_at, rotated_at, factors_at, weight_at, bias_at, cos_at, sin_at = tensors
    rows, heads, size, half = sizes
    keys, queries = elements(keys_at, rows * size, kind), elements(queries_at, rows * heads * size, kind)
    rotated, factors = elements(rotated_at, rows * heads * size, kind), floats(factors_at, rows * heads)
    weight, bias = elements(weight_at, size, kind), elements(bias_at, size, kind)
    cos, sin = floats(cos_at, rows * half), floats(sin_at, rows * half)
    memory = elements(pages.ctypes.data, NO_END, kind)
    block_of_row, offset_of_row = places
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        at = row * size
        to = (np.int64(block_of_row[row]) * pages.shape[1] + offset_of_row[row]) * size
        along, across = cos[row * half : (row + 1) * half], sin[row * half : (row + 1) * half]
        layer_norm_row(keys[at : at + size], weight, bias, norm, lanes, keys[at : at + size])
        rotate_to_halves(keys, at, neighbours, along, across, memory, to)
        for d in range(2 * half, size):
            memory[to + d] = keys[at + d]
        for head in range(row * heads, (row + 1) * heads if chooses else row * heads):
            factors[head] *= factor
            rotate_to_halves(queries, head * size, neighbours, along, across, rotated, head * size)
            for d in range(head * size + 2 * half, (head + 1) * size):
                rotated[d] = queries[d]


@kernel_part
def _choose(threads: int, x: int, sizes: Any, angles: Any, indexer: Any, layout: Any, lists: Any, kind: Any) -> None:
    """Choose the tokens that rows attend to, and write their keys; ``x`` is the address of the layer's normed input.

    ``indexer``: addresses of keys and queries as products gave them, and of a room; of the norm's weight and bias and
    of the weights of the heads; H, D, whether neighbours are rotated together, and whether those weights are to be
    widened; `IndexerOptions.numbers`; pages; slabs and scores as `index.select_part` takes them.
    """
    (keys, queries, room), (weight, bias, of_factors), (heads, size, neighbours, narrow), numbers = indexer[:4]
    pages, slabs, scores = indexer[4:]
    eps, factor, scale = numbers
    blocks, offsets, sequences, block_tables, _ = layout
    rows, width, half, no = sizes.rows, sizes.width, sizes.rope // 2, np.int64(0)
    rotated = room
    factors = rotated + whole_lines(rows * heads * size) * pages.itemsize
    wide = factors + whole_lines(rows * heads) * 4
    wide_weight = wide + whole_lines(rows * width) * 4
    chooses = lists.shape[1] > 0
    if chooses:
        source, by = x, of_factors
        if pages.itemsize < 4:
            source = wide
            share_out(_widen_part, ROW_PARTS, shared(rows * width, threads), (x, rows * width, wide, kind))
            if narrow:
                by = wide_weight
                share_out(
                    _widen_part, ROW_PARTS, shared(heads * width, threads), (of_factors, heads * width, by, kind)
                )  # fmt: skip
        product(
            threads, source, width, rows, width, (by, no, heads, factors, no, no, no, no, no, no, no, no), _FLOAT
        )  # fmt: skip
    share_out(
        _place_rows, ROW_PARTS, shared(rows * heads * size, threads),
        ((keys, queries, rotated, factors, weight, bias, *angles), (rows, heads, size, half), eps, chooses, factor,
         neighbours, pages, (blocks, offsets), kind),
    )  # fmt: skip
    if chooses:
        select_part(
            carray(pointer(rotated, kind), (rows, heads, size)), carray(pointer(factors, _FLOAT), (rows, heads)),
            pages, sequences, block_tables, slabs, scale, scores, lists, threads,
        )  # fmt: skip


def _made(products: latent.Multiply, add: Callable[..., None]) -> Callable[..., None]:
    return latent.with_product(products, add, _choose)


_layer = _made(latent.PLAIN, add_nothing)
_layer_by_pairs = _made(latent.BY_PAIRS, add_nothing)
_layer_by_tiles = _made(latent.BY_TILES, add_nothing)
_adapted = _made(latent.PLAIN, add_adapter)
_adapted_by_pairs = _made(latent.BY_PAIRS, add_adapter)
_adapted_by_tiles = _made(latent.BY_TILES, add_adapter)


def _run(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an indexer, multiplying in float32."""
    _layer(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_by_pairs(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an indexer in bfloat16, multiplying in pairs of inputs."""
    _layer_by_pairs(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_by_tiles(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an indexer in bfloat16, multiplying with tile instructions."""
    _layer_by_tiles(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_adapted(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an indexer with an adapter, multiplying in float32."""
    _adapted(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_adapted_by_pairs(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an indexer with an adapter in bfloat16, multiplying in pairs of inputs."""
    _adapted_by_pairs(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_adapted_by_tiles(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an indexer with an adapter in bfloat16, multiplying with tile instructions."""
    _adapted_by_tiles(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


_kernels = Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles)))
_adapted_kernels = Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles)))


def sparse_call(
    x: torch.Tensor, weights: LatentWeights, angles: tuple[torch.Tensor, torch.Tensor], context: ForwardContext,
    options: LatentLayerOptions, terms: LatentTerms, earlier: torch.Tensor | None,
) -> latent.ReadyLayer:  # fmt: skip
    """Implement `dispatch.sparse_call_of`."""
    groups = tuple(map(terms_of, terms))
    adapted = any(group is not NO_TERMS for group in groups)
    given = x, weights, angles, context, options, groups
    if options.index is not None:
        chosen, plan = chosen_of(context, options.index.choice)
        index = _index_of(x, weights, context, options, options.index, plan)
        return latent.prepare(_adapted_kernels if adapted else _kernels, *given, index, chosen)
    if earlier is None:
        raise TypeError("a layer without an indexer reads what an earlier one has chosen, and there is None")
    return latent.prepare(latent.ADAPTED_KERNELS if adapted else latent.KERNELS, *given, latent.NO_INDEX, earlier)


def _index_of(
    x: torch.Tensor, weights: LatentWeights, context: ForwardContext, options: LatentLayerOptions,
    index: IndexerOptions, plan: Plan | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the index of a layer as its kernel takes it (`latent.with_product`)."""
    if context.pages is None or weights.index is None:
        raise ValueError("a layer without pages or without an indexer; allowed: a rollout's that has one")
    choice, rows = index.choice, context.num_rows
    q_weight, q_bias, k_weight, k_bias, *others = latent.addresses_of_index(weights)
    outputs = choice.heads * choice.size
    keys = _room(context, options, choice.heads, choice.size, x.dtype).data_ptr()
    queries = keys + _lines(rows * choice.size) * x.itemsize
    room = queries + _lines(rows * outputs) * x.itemsize
    narrow = weights.index.factors.dtype != torch.float32
    of_low = (0, 0, 0, 0) if plan is None else (q_weight, q_bias, outputs, queries)
    indexer = (
        (keys, queries, room), tuple(others), (choice.heads, choice.size, index.neighbours, narrow), index.numbers,
        array(context.pages[choice.layer]), _NO_PLAN if plan is None else plan.slabs,
        _NO_SCORES if plan is None else _scores(context, plan),
    )  # fmt: skip
    return (k_weight, k_bias, choice.size, keys), of_low, indexer


def _scores(context: ForwardContext, plan: Plan) -> Any:
    """Return memory for the scores of a slab; the layers of a call share it."""
    key = "sparse layer's scores", plan.scores
    if key not in context.worked_out:
        context.worked_out[key] = np.empty(plan.scores, np.float32)
    return context.worked_out[key]


def _lines(count: int) -> int:
    return -(-count // LANES) * LANES


def _room(
    context: ForwardContext, options: LatentLayerOptions, heads: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return memory for what is between the kernels of an indexer; the layers of a call share it."""
    key, rows = ("sparse layer", heads, size, options.width, dtype), context.num_rows
    if key not in context.worked_out:
        of_dtype = rows * size * (1 + 2 * heads)
        in_float32 = rows * (heads + options.width) + heads * options.width
        bytes_of = of_dtype * dtype.itemsize + 4 * in_float32 + 4 * _ROOMS * LANES
        context.worked_out[key] = torch.empty(bytes_of, dtype=torch.uint8)
    room: torch.Tensor = context.worked_out[key]
    return room
