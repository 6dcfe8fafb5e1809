"""Compute the gradients of the paged causal attention of a training call: every sequence starts at position 0.

Two kernels, so that nothing is added to from two programs: one owns a tile of queries and walks the keys they saw, the
other owns a tile of keys and walks the queries that saw them. Probabilities are recomputed from the saved log-sum-exp
(Dao et al. 2022). That and the scores are logarithms to base 2, as in the forward.

T tokens, S sequences, H heads, G query heads a KV head, D head size, B tokens a block, C tokens a chunk.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import KV_CHUNK
from samebit.kernels.layout.options import AttentionOptions, Saved
from samebit.kernels.triton.attention import block_bits, score_factors, tile_of_keys
from samebit.kernels.triton.numeric import LOG2E, aligned, dot, jit, tanh
from samebit.kernels.triton.tiles.table import attention_tiles, power_of_two

_SINK_ROWS = 1024
"""Rows whose share of a sink's gradient is added at once."""


def attention_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Implement `Operations.attention_backward`."""
    q, pages, out, lse, *sinks = saved
    grad = aligned(grad)
    tokens, heads, head_dim = q.shape
    kv_heads, group = pages.shape[1], heads // pages.shape[1]
    layout = context.on_device
    empty = torch.empty if context.covers_all_rows else torch.zeros
    grad_q = empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = (empty(tokens, kv_heads, head_dim, dtype=q.dtype, device=q.device) for _ in range(2))
    inward = torch.empty_like(lse)
    entry = attention_tiles(q.device, head_dim, q.dtype)
    tile, of_keys = entry.gradients, entry.keys or entry.gradients
    rows, rows_of_keys = (max(one.rows, power_of_two(group)) for one in (tile, of_keys))
    layer = (
        layout.row_start, layout.lengths, layout.tables, layout.tables.shape[1], block_bits(context),
        *score_factors(options), options.scale, heads, kv_heads, head_dim, options.window, options.softcap > 0,
    )  # fmt: skip
    sizes = KV_CHUNK, power_of_two(max(head_dim, 16))
    queries, keys = layout.tiles(rows // group), layout.tiles(KV_CHUNK)
    if len(queries):
        _of_queries[(len(queries), kv_heads)](
            q, pages, out, lse, grad, grad_q, inward, queries, *layer, rows, *sizes, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        _of_keys[(len(keys), kv_heads)](
            q, pages, lse, grad, inward, grad_k, grad_v, keys, *layer, rows_of_keys, *sizes, num_warps=of_keys.warps,
            num_stages=of_keys.stages,
        )  # fmt: skip
    return grad_q, grad_k, grad_v, _gradient_of_sinks(sinks[0], lse, inward, layout.queries) if sinks else None


def _gradient_of_sinks(
    sinks: torch.Tensor, lse: torch.Tensor, inward: torch.Tensor, queries: torch.Tensor
) -> torch.Tensor:
    """Return what all rows together gain from a lower share of the sink, ``[H]``: a head's is one program's.

    ``inward``: ``[T, H]``, the product of each row's output and the gradient of it.
    """
    out = torch.empty_like(sinks)
    _of_sinks[(len(sinks),)](aligned(sinks), lse, inward, queries, out, len(queries), len(sinks), _SINK_ROWS)
    return out


@jit()
def _weights_and_slopes(
    query: tensor, keys: tensor, upstream: tensor, values: tensor, level: tensor, inward: tensor, seen: tensor,
    inner: tensor, outer: tensor, scale: tensor, CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the probabilities of a tile of rows and keys ``[D, KEYS]``, and gradients of the products q . k."""
    scores = dot(query, keys, tl.zeros((ROWS, KEYS), tl.float32)) * inner
    bend = scale
    if CAPPED:
        t = tanh(scores)
        scores, bend = t * outer, (1.0 - t * t) * scale
    weights = tl.where(seen, tl.exp2(scores - level[:, None]), 0.0)
    wanted = dot(upstream, values, tl.zeros((ROWS, KEYS), tl.float32))
    return weights, weights * (wanted - inward[:, None]) * bend


@jit(do_not_specialize=["table_width", "block_bits"])
def _of_queries(
    q: tensor, pages: tensor, out: tensor, lse: tensor, grad: tensor, grad_q: tensor, inwards: tensor, tiles: tensor,
    row_start: tensor, lengths: tensor, tables: tensor, table_width: tensor, block_bits: tensor, inner: tensor,
    outer: tensor, scale: tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    length = tl.load(lengths + sequence)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_DIM)
    token = first + r // GROUP
    newest = tl.minimum(first + TOKENS, length) - 1
    real = (r < TOKENS * GROUP) & (token < length)
    place = (tl.load(row_start + sequence) + token).to(tl.int64) * HEADS + kv_head * GROUP + r % GROUP
    inside = real[:, None] & (d[None, :] < HEAD_DIM)
    at = place[:, None] * HEAD_DIM + d[None, :]
    query = tl.load(q + at, mask=inside, other=0.0)
    upstream = tl.load(grad + at, mask=inside, other=0.0)
    level = tl.load(lse + place, mask=real, other=0.0)
    output = tl.load(out + at, mask=inside, other=0.0)
    inward = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), axis=1)
    tl.store(inwards + place, inward, mask=real)
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
    for base in range(begin, newest + 1, KEYS):
        key = base + tl.arange(0, KEYS)
        there = key <= newest
        at_keys = tile_of_keys(pages, tables + sequence * table_width, base, block_bits, kv_head, KV_HEADS, HEAD_DIM)
        at_keys += tl.arange(0, KEYS)[None, :] * HEAD_DIM + d[:, None]
        held = there[None, :] & (d[:, None] < HEAD_DIM)
        keys = tl.load(at_keys, mask=held, other=0.0)
        values = tl.load(at_keys + (HEAD_DIM << block_bits), mask=held, other=0.0)
        seen = real[:, None] & (key[None, :] <= token[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > token[:, None] - WINDOW
        _, slopes = _weights_and_slopes(
            query, keys, upstream, values, level, inward, seen, inner, outer, scale, CAPPED, ROWS, KEYS
        )
        acc = dot(slopes.to(keys.dtype), tl.trans(keys), acc)
    tl.store(grad_q + at, acc.to(grad_q.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["table_width", "block_bits"])
def _of_keys(
    q: tensor, pages: tensor, lse: tensor, grad: tensor, inwards: tensor, grad_k: tensor, grad_v: tensor, tiles: tensor,
    row_start: tensor, lengths: tensor, tables: tensor, table_width: tensor, block_bits: tensor, inner: tensor,
    outer: tensor, scale: tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    base = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    length, row = tl.load(lengths + sequence), tl.load(row_start + sequence)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_DIM)
    key = base + tl.arange(0, KEYS)
    there = key < length
    at_keys = tile_of_keys(pages, tables + sequence * table_width, base, block_bits, kv_head, KV_HEADS, HEAD_DIM)
    at_keys += tl.arange(0, KEYS)[None, :] * HEAD_DIM + d[:, None]
    held = there[None, :] & (d[:, None] < HEAD_DIM)
    keys = tl.load(at_keys, mask=held, other=0.0)
    values = tl.load(at_keys + (HEAD_DIM << block_bits), mask=held, other=0.0)
    of_keys = tl.zeros((KEYS, PADDED_DIM), tl.float32)
    of_values = tl.zeros((KEYS, PADDED_DIM), tl.float32)
    last = length
    if WINDOW > 0:
        last = tl.minimum(length, base + KEYS - 1 + WINDOW)
    place = r // GROUP * HEADS + kv_head * GROUP + r % GROUP
    at = place[:, None] * HEAD_DIM + d[None, :]
    for first in range(base, last, TOKENS):
        token = first + r // GROUP
        real = (r < TOKENS * GROUP) & (token < last)
        inside = real[:, None] & (d[None, :] < HEAD_DIM)
        before = (row + first).to(tl.int64) * HEADS
        query = tl.load(q + before * HEAD_DIM + at, mask=inside, other=0.0)
        upstream = tl.load(grad + before * HEAD_DIM + at, mask=inside, other=0.0)
        level = tl.load(lse + before + place, mask=real, other=0.0)
        inward = tl.load(inwards + before + place, mask=real, other=0.0)
        seen = real[:, None] & there[None, :] & (key[None, :] <= token[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > token[:, None] - WINDOW
        weights, slopes = _weights_and_slopes(
            query, keys, upstream, values, level, inward, seen, inner, outer, scale, CAPPED, ROWS, KEYS
        )
        of_values = dot(tl.trans(weights.to(upstream.dtype)), upstream, of_values)
        of_keys = dot(tl.trans(slopes.to(query.dtype)), query, of_keys)
    at = ((row + key).to(tl.int64) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
    inside = there[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(grad_k + at, of_keys.to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + at, of_values.to(grad_v.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["count"])
def _of_sinks(
    sinks: tensor, lse: tensor, inwards: tensor, queries: tensor, out: tensor, count: tensor, HEADS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(0)
    sink = tl.load(sinks + head) * LOG2E
    acc = tl.zeros((ROWS,), tl.float32)
    for first in range(0, count, ROWS):
        query = first + tl.arange(0, ROWS)
        real = query < count
        place = tl.load(queries + 2 * query, mask=real, other=0).to(tl.int64) * HEADS + head
        level = tl.load(lse + place, mask=real, other=float("inf"))
        acc -= tl.exp2(sink - level) * tl.load(inwards + place, mask=real, other=0.0)
    tl.store(out + head, tl.sum(acc, axis=0))
