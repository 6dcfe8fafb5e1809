"""Compute a whole decoder layer of attention and a gated MLP in one call, for the steps of a rollout on the CPU.

Invariant: an element is computed by the parts that the operations of the layer's modules run, in their order, and
rounded where they round. So a layer has the bits of its modules' own calls, which training makes.

What it spares is Python between some fifteen kernels, which took half of a decode step of a small model, and the waking
of threads: they are still awake from the kernel before. T rows, W hidden size, F width of the MLP, D head size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from samebit.kernels.cpu.activation import silu_rows
from samebit.kernels.cpu.attention.forward import attend_part
from samebit.kernels.cpu.attention.write_pages import rotate_and_write
from samebit.kernels.cpu.base.jit import array, compile_kernel
from samebit.kernels.cpu.base.memory import elements, kind_of, pointer, whole_lines
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.dense.products import Kernels, product, product_by_tiles, product_of_pairs, shared
from samebit.kernels.cpu.gemm.layers import MOST_LAYERS
from samebit.kernels.cpu.low_rank import PRODUCTS, Matrices, add_terms
from samebit.kernels.cpu.norm import rms_norm_row
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.lora.adapters import DenseTerms, PlacedTerms
from samebit.kernels.layout.options import DenseOptions, DenseWeights
from samebit.kernels.openmp import num_threads

_rotate_and_write = rotate_and_write.part
_silu = silu_rows.part
_add_terms = add_terms.part

_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""

_ROOMS = 12
"""The most arrays that lie in the room, each from a multiple of sixteen elements on."""

_NO_TERMS = ((0,) * 12, 0, (0.0,) * MOST_LAYERS, (0,) * MOST_LAYERS, 0)
"""Stands for what an adapter does not add: `Terms` as a kernel takes them."""

_NO_SINKS = np.empty(0, np.float32)
_NO_LSE = np.empty((0, 0), np.float32)


class Sizes(NamedTuple):
    """Holds T, W, heads of queries and of keys, D, angles, tokens a block and F."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    angles: int
    block_size: int
    inner: int


class Numbers(NamedTuple):
    """Holds the eps of each norm, and what is added to its weight."""

    first_eps: Any
    first_offset: Any
    second_eps: Any
    second_offset: Any
    head_eps: Any
    head_offset: Any


class Call(NamedTuple):
    """Holds the addresses of x, of the result, of cos and sin, and of a room for what is between the kernels."""

    x: int
    out: int
    cos: int
    sin: int
    room: int


class Terms(NamedTuple):
    """Holds what an adapter adds to layers that share an input: `low_rank.Matrices`, the places of their layers, and
    products a row; without products nothing is added."""

    layers: Any
    panel: int
    scales: Any
    places: Any
    work: int


@kernel_part
def _norm_part(
    part: int, x_at: int, added_at: int, total_at: int, weight_at: int, offset: Any, eps: Any, rows: int, width: int,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    """Write ``total = x + added`` and its norm to ``out`` for a share of the rows; without what is added, the norm of
    x; without a weight, the sum alone."""
    x, out = elements(x_at, rows * width, kind), elements(out_at, rows * width, kind)
    added, total = elements(added_at, rows * width, kind), elements(total_at, rows * width, kind)
    weight = elements(weight_at, width, kind)
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // _PARTS, rows * (part + 1) // _PARTS):
        first, last = row * width, (row + 1) * width
        source = x[first:last]
        if added_at:
            one, other, source = x[first:last], added[first:last], total[first:last]
            for i in range(width):
                source[i] = narrow(widen(one[i]) + widen(other[i]), source[i])
        if weight_at:
            rms_norm_row(source, weight, offset, eps, lanes, out[first:last])


@inlined_part
def _normed(
    threads: int, x_at: int, added_at: int, total_at: int, weight_at: int, offset: Any, eps: Any, sizes: Any,
    out_at: int, kind: Any,
) -> None:  # fmt: skip
    share_out(
        _norm_part, _PARTS, shared(sizes.rows * sizes.width, threads),
        (x_at, added_at, total_at, weight_at, offset, eps, sizes.rows, sizes.width, out_at, kind),
    )  # fmt: skip


@kernel_part
def _add_nothing(threads: int, x: int, rows: int, inputs: int, terms: Any, outs: Any, kind: Any) -> None:
    """Add what no adapter adds."""


@kernel_part
def _add_adapter(threads: int, x: int, rows: int, inputs: int, terms: Any, outs: Any, kind: Any) -> None:
    """Add the terms of an adapter to the results ``outs`` of up to three layers."""
    group = Terms(*terms)
    if group.work > 0:
        first, second, third = group.places
        _add_terms(
            shared(rows * group.work // PRODUCTS, threads), x, inputs, rows, inputs, group.layers, group.panel,
            group.scales, (outs[first], outs[second], outs[third]), kind,
        )  # fmt: skip


def _with_product(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the layer from a product of up to three layers of one input, and what adds an adapter's terms to it."""

    @kernel_part
    def layer(
        threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any,
        kind: Any,
    ) -> None:  # fmt: skip
        """Compute the layer; ``given``: `Call`, the addresses of `DenseWeights.flat` (0 for what the layer does not
        have), `Sizes` and `Numbers`; ``terms``: four `Terms`; ``layout``: blocks and offsets of rows, then what
        `attention.forward` reads."""
        call, sizes, numbers = Call(*given[0]), Sizes(*given[2]), Numbers(*given[3])
        (
            first_norm, second_norm, q_norm, k_norm, q_weight, q_bias, k_weight, k_bias, v_weight, v_bias,
            o_weight, o_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
        ) = given[1]  # fmt: skip
        blocks, offsets, sequences, block_tables, tiles, bunches = layout
        rows, width, inner, dim = sizes.rows, sizes.width, sizes.inner, sizes.head_dim
        heads, kv_heads = sizes.heads * dim, sizes.kv_heads * dim
        itemsize, no = pages.itemsize, np.int64(0)
        normed = call.room
        q = normed + whole_lines(rows * width) * itemsize
        k = q + whole_lines(rows * heads) * itemsize
        v = k + whole_lines(rows * kv_heads) * itemsize
        rotated = v + whole_lines(rows * kv_heads) * itemsize
        gate = rotated + whole_lines(rows * heads) * itemsize
        up = gate + whole_lines(rows * inner) * itemsize
        activated = up + whole_lines(rows * inner) * itemsize
        middle = activated + whole_lines(rows * inner) * itemsize
        attended = q  # the queries are not read any more
        _normed(threads, call.x, 0, 0, first_norm, numbers.first_offset, numbers.first_eps, sizes, normed, kind)
        multiply(
            threads, normed, width, rows, width,
            (q_weight, q_bias, heads, q, k_weight, k_bias, kv_heads, k, v_weight, v_bias, kv_heads, v), kind,
        )  # fmt: skip
        add(threads, normed, rows, width, terms[0], (q, k, v), kind)
        _rotate_and_write(
            threads, (q, k, v, call.cos, call.sin, pages.ctypes.data, rotated),
            (rows, sizes.heads, sizes.kv_heads, dim, sizes.angles, sizes.block_size),
            (q_norm, kind, k_norm, kind, numbers.head_offset, numbers.head_eps), blocks, offsets, kind,
        )  # fmt: skip
        queries = carray(pointer(rotated, kind), (rows, sizes.heads, dim))
        result = carray(pointer(attended, kind), (rows, sizes.heads, dim))
        attend_part(queries, pages, sequences, block_tables, tiles, bunches, scales, no_sinks, result, no_lse, threads)
        multiply(
            threads, attended, heads, rows, heads,
            (o_weight, o_bias, width, normed, no, no, no, no, no, no, no, no), kind,
        )  # fmt: skip
        add(threads, attended, rows, heads, terms[1], (normed, no, no), kind)
        _normed(
            threads, call.x, normed, middle, second_norm, numbers.second_offset, numbers.second_eps, sizes,
            normed, kind,
        )  # fmt: skip
        multiply(
            threads, normed, width, rows, width,
            (gate_weight, gate_bias, inner, gate, up_weight, up_bias, inner, up, no, no, no, no), kind,
        )  # fmt: skip
        add(threads, normed, rows, width, terms[2], (gate, up, no), kind)
        _silu(shared(rows * inner, threads), gate, up, kind, rows, inner, inner, inner, activated)
        multiply(
            threads, activated, inner, rows, inner,
            (down_weight, down_bias, width, normed, no, no, no, no, no, no, no, no), kind,
        )  # fmt: skip
        add(threads, activated, rows, inner, terms[3], (normed, no, no), kind)
        _normed(threads, middle, normed, call.out, 0, numbers.first_offset, numbers.first_eps, sizes, normed, kind)

    made: Callable[..., None] = layer
    return made


_layer = _with_product(product, _add_nothing)
_layer_by_pairs = _with_product(product_of_pairs, _add_nothing)
_layer_by_tiles = _with_product(product_by_tiles, _add_nothing)
_adapted = _with_product(product, _add_adapter)
_adapted_by_pairs = _with_product(product_of_pairs, _add_adapter)
_adapted_by_tiles = _with_product(product_by_tiles, _add_adapter)


def _run(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any, kind: Any
) -> None:
    """Compute a layer, multiplying in float32."""
    _layer(threads, given, terms, pages, layout, scales, no_sinks, no_lse, kind)


def _run_by_pairs(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any, kind: Any
) -> None:
    """Compute a layer in bfloat16, multiplying in pairs of inputs."""
    _layer_by_pairs(threads, given, terms, pages, layout, scales, no_sinks, no_lse, kind)


def _run_by_tiles(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any, kind: Any
) -> None:
    """Compute a layer in bfloat16, multiplying with tile instructions."""
    _layer_by_tiles(threads, given, terms, pages, layout, scales, no_sinks, no_lse, kind)


def _run_adapted(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any, kind: Any
) -> None:
    """Compute a layer with an adapter, multiplying in float32."""
    _adapted(threads, given, terms, pages, layout, scales, no_sinks, no_lse, kind)


def _run_adapted_by_pairs(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any, kind: Any
) -> None:
    """Compute a layer with an adapter in bfloat16, multiplying in pairs of inputs."""
    _adapted_by_pairs(threads, given, terms, pages, layout, scales, no_sinks, no_lse, kind)


def _run_adapted_by_tiles(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, scales: Any, no_sinks: Any, no_lse: Any, kind: Any
) -> None:
    """Compute a layer with an adapter in bfloat16, multiplying with tile instructions."""
    _adapted_by_tiles(threads, given, terms, pages, layout, scales, no_sinks, no_lse, kind)


_kernels = Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles)))
_adapted_kernels = Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles)))


def dense_layer(
    x: torch.Tensor, weights: DenseWeights, angles: tuple[torch.Tensor, torch.Tensor], context: ForwardContext,
    options: DenseOptions, terms: DenseTerms,
) -> torch.Tensor:  # fmt: skip
    """Implement `dispatch.dense_layer_of`."""
    if context.pages is None:
        raise ValueError("a context without pages; allowed: a rollout's")
    pages, (cos, sin) = context.pages[options.attention.layer], angles
    x = x.contiguous()
    out = torch.empty_like(x)
    sizes = (
        context.num_rows, options.width, options.heads, options.kv_heads, options.head_dim, cos.size(1),
        context.block_size, options.inner,
    )  # fmt: skip
    room = _room(context, sizes, x.dtype)
    given = (
        (x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), room.data_ptr()),
        tuple(0 if weight is None else weight.data_ptr() for weight in weights.flat()), sizes, options.numbers,
    )  # fmt: skip
    groups = tuple(map(_terms_of, terms))
    kernels = _kernels if all(group is _NO_TERMS for group in groups) else _adapted_kernels
    layout = (
        *context.blocks_and_offsets, context.layout.numpy(), context.block_tables, context.tiles, context.bunches
    )  # fmt: skip
    kernels.of(x.dtype)(
        num_threads(), given, groups, array(pages), layout, options.scales, _NO_SINKS, _NO_LSE, kind_of(x.dtype)
    )  # fmt: skip
    return out


def _terms_of(placed: PlacedTerms | None) -> tuple[Any, ...]:
    """Return `Terms` as a kernel takes them; ``placed`` has float32 matrices."""
    if placed is None:
        return _NO_TERMS
    places, terms = placed
    matrices = Matrices.of(terms)
    if matrices is None:
        raise TypeError("an adapter's matrices are not float32; allowed in a layer's one call: torch.float32")
    padded = (*places, *(0,) * (MOST_LAYERS - len(places)))
    return matrices.layers, matrices.panel, matrices.scales, padded, matrices.work


def _room(context: ForwardContext, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for what is between the kernels of a layer; the layers of a call share it."""
    rows, width, heads, kv_heads, head_dim, _, _, inner = sizes
    elements_of_row = 2 * width + (2 * heads + 2 * kv_heads) * head_dim + 3 * inner
    key = "dense layer", elements_of_row, dtype
    if key not in context.worked_out:
        context.worked_out[key] = torch.empty(rows * elements_of_row + _ROOMS * LANES, dtype=dtype)
    room: torch.Tensor = context.worked_out[key]
    return room
