"""Compute a whole decoder layer of attention and a gated MLP in one call, for the steps of a rollout on the CPU. Of
another MLP its input is in the call.

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

from samebit.kernels.cpu.activation import sigmoid_rows
from samebit.kernels.cpu.attention.forward import attend_part
from samebit.kernels.cpu.attention.write_pages import rotate_and_write
from samebit.kernels.cpu.base.jit import array, compile_kernel
from samebit.kernels.cpu.base.memory import elements, kind_of, pointer, whole_lines
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.dense.mlp import ROW_PARTS, normed, with_mlp
from samebit.kernels.cpu.dense.products import Kernels, product, product_by_tiles, product_of_pairs, shared
from samebit.kernels.cpu.dense.terms import NO_TERMS, add_adapter, add_nothing, terms_of
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.lora.adapters import DenseTerms
from samebit.kernels.layout.options import DenseOptions, DenseWeights
from samebit.kernels.openmp import num_threads

_rotate_and_write, _sigmoid = rotate_and_write.part, sigmoid_rows.part

_ROOMS = 13
"""The most arrays that lie in the room, each from a multiple of sixteen elements on."""

_NO_SINKS = np.empty(0, np.float32)
_NO_LSE = np.empty((0, 0), np.float32)


class Sizes(NamedTuple):
    """Holds T, W, heads of queries and of keys, D, angles, tokens a block, F (0 for another MLP), and whether queries
    have gates."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    angles: int
    block_size: int
    inner: int
    gated: bool


class Numbers(NamedTuple):
    """Holds the eps of each norm, and what is added to its weight."""

    first_eps: Any
    first_offset: Any
    second_eps: Any
    second_offset: Any
    head_eps: Any
    head_offset: Any


class Call(NamedTuple):
    """Holds the addresses of x, of the result, of its norm where another MLP follows, of cos and sin, and of a room for
    what is between the kernels."""

    x: int
    out: int
    normed: int
    cos: int
    sin: int
    room: int


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
        rows, width, dim = sizes.rows, sizes.width, sizes.head_dim
        heads, kv_heads = sizes.heads * dim, sizes.kv_heads * dim
        itemsize, no = pages.itemsize, np.int64(0)
        normed_at = call.room
        q = normed_at + whole_lines(rows * width) * itemsize
        k = q + whole_lines(rows * heads) * itemsize
        v = k + whole_lines(rows * kv_heads) * itemsize
        rotated = v + whole_lines(rows * kv_heads) * itemsize
        both = rotated + whole_lines(rows * heads) * itemsize
        rest = both
        attended = q  # the queries are not read any more
        first, first_heads = q, heads
        if sizes.gated:
            rest = both + whole_lines(2 * rows * heads) * itemsize
            first, first_heads = both, 2 * heads
        normed(threads, call.x, 0, 0, first_norm, numbers.first_offset, numbers.first_eps, rows, width, normed_at, kind)
        multiply(
            threads, normed_at, width, rows, width,
            (q_weight, q_bias, first_heads, first, k_weight, k_bias, kv_heads, k, v_weight, v_bias, kv_heads, v), kind,
        )  # fmt: skip
        add(threads, normed_at, rows, width, terms[0], (first, k, v), kind)
        if sizes.gated:
            share_out(
                _split, ROW_PARTS, shared(rows * heads, threads), (both, q, rows * sizes.heads, dim, kind)
            )  # fmt: skip
        _rotate_and_write(
            threads, (q, k, v, call.cos, call.sin, pages.ctypes.data, rotated),
            (rows, sizes.heads, sizes.kv_heads, dim, sizes.angles, sizes.block_size),
            (q_norm, kind, k_norm, kind, numbers.head_offset, numbers.head_eps), blocks, offsets, kind,
        )  # fmt: skip
        queries = carray(pointer(rotated, kind), (rows, sizes.heads, dim))
        result = carray(pointer(attended, kind), (rows, sizes.heads, dim))
        attend_part(queries, pages, sequences, block_tables, tiles, bunches, scales, no_sinks, result, no_lse, threads)
        if sizes.gated:
            _sigmoid(
                shared(rows * heads, threads), both + dim * itemsize, attended, kind, rows * sizes.heads, dim, 2 * dim,
                dim, rotated,
            )  # fmt: skip
            attended = rotated
        multiply(
            threads, attended, heads, rows, heads,
            (o_weight, o_bias, width, normed_at, no, no, no, no, no, no, no, no), kind,
        )  # fmt: skip
        add(threads, attended, rows, heads, terms[1], (normed_at, no, no), kind)
        finish(
            threads, (call.x, normed_at, call.out, rest, call.normed), (rows, width, sizes.inner),
            (second_norm, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias),
            (numbers.second_eps, numbers.second_offset), (terms[2], terms[3]), itemsize, kind,
        )  # fmt: skip

    made: Callable[..., None] = layer
    return made


_layer = _with_product(product, add_nothing)
_layer_by_pairs = _with_product(product_of_pairs, add_nothing)
_layer_by_tiles = _with_product(product_by_tiles, add_nothing)
_adapted = _with_product(product, add_adapter)
_adapted_by_pairs = _with_product(product_of_pairs, add_adapter)
_adapted_by_tiles = _with_product(product_by_tiles, add_adapter)


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
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Implement `dispatch.dense_layer_of`."""
    if context.pages is None:
        raise ValueError("a context without pages; allowed: a rollout's")
    pages, (cos, sin) = context.pages[options.attention.layer], angles
    x = x.contiguous()
    out, behind = torch.empty_like(x), None if options.inner else torch.empty_like(x)
    sizes = (
        context.num_rows, options.width, options.heads, options.kv_heads, options.head_dim, cos.size(1),
        context.block_size, options.inner, options.gated,
    )  # fmt: skip
    room = _room(context, sizes, x.dtype)
    given = (
        (
            x.data_ptr(), out.data_ptr(), 0 if behind is None else behind.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            room.data_ptr(),
        ),
        weights.addresses, sizes, options.numbers,
    )  # fmt: skip
    groups = tuple(map(terms_of, terms))
    kernels = _kernels if all(group is NO_TERMS for group in groups) else _adapted_kernels
    kernels.of(x.dtype)(
        num_threads(), given, groups, array(pages), (*context.read_by_layers, context.bunches), options.scales,
        _NO_SINKS, _NO_LSE, kind_of(x.dtype),
    )  # fmt: skip
    return out, behind


def _room(context: ForwardContext, sizes: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for what is between the kernels of a layer; the layers of a call share it."""
    rows, width, heads, kv_heads, head_dim, _, _, inner, gated = sizes
    elements_of_row = 2 * width + (2 * heads + 2 * kv_heads + 2 * heads * gated) * head_dim + 3 * inner
    key = "dense layer", elements_of_row, dtype
    if key not in context.worked_out:
        context.worked_out[key] = torch.empty(rows * elements_of_row + _ROOMS * LANES, dtype=dtype)
    room: torch.Tensor = context.worked_out[key]
    return room
