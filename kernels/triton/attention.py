"""Compute paged causal attention: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in tiles of `KV_CHUNK` tokens anchored at position 0 of its own sequence, in order: through
  one online-softmax accumulator for each split of `KV_SPLIT` tokens, and one that those are merged into (`splits`). A
  tile in which it sees nothing leaves the accumulator as it is.
* Tokens and the query heads that share a KV head are the rows of one tile product. So are rows of several sequences
  that compute one token each, over the blocks they have in common (`attention_work`). Items of a first launch keep
  their accumulators in memory, in float32, for the one of the second that ends the row: each row does the same
  operations in the same order, grouped or not, split or not.
* All numbers that tell calls apart (block size, table width, lengths, items) are read at run time: there is one
  compiled kernel a layer.
* A page holds a whole number of tiles, and tiles begin where pages do: a tile of keys lies in one piece.
* Scores, peaks and the log-sum-exp are logarithms to base 2, as the hardware's exponential is.
* A sink is merged at a row's end, as a split of one score that has no value.
* Keys beyond the newest token of an item are not loaded: their pages may hold anything.

A page holds ``block_size`` tokens of one layer: ``pages[block, kv_head, 0]`` the keys as ``[B, D]``,
``pages[block, kv_head, 1]`` the values as ``[B, D]``: on a GPU a token's key lies in one piece.

T tokens, S sequences, H heads, G query heads a KV head, D head size, B tokens a block, C tokens a chunk.
"""

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.attention_work import ITEM
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import KV_CHUNK
from samebit.kernels.layout.options import AttentionOptions, Saved
from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.triton.numeric import LOG2E, aligned, clear_if_idle, dot, jit, tanh
from samebit.kernels.triton.splits import SPLIT, keep, load_kept, merged, room_for_kept, taken_in
from samebit.kernels.triton.tiles.table import attention_tiles, power_of_two

_ITEM = tl.constexpr(ITEM)


@dataclass(frozen=True)
class Places:
    """Says where keys and values of each row go: ``[T]`` each as in `DeviceLayout`, and the tokens of a block."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    sequences: torch.Tensor
    block_size: int

    @staticmethod
    def of(context: ForwardContext) -> "Places":
        """Return the places of a call's rows."""
        layout = context.on_device
        return Places(layout.blocks, layout.offsets, layout.sequences, context.block_size)


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Implement `Operations.attention_forward`."""
    q, pages, places = aligned(q), pages_of(k, context, options), Places.of(context)
    out = torch.empty_like(q)
    write(k, v, pages, out, places)
    return attended(q, pages, context, options, sinks, out)


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Implement `Operations.segment_attention`."""
    options = AttentionOptions(0, scale)
    q, pages, places = aligned(q), pages_of(k, segments.keys, options), Places.of(segments.keys)
    out = torch.empty_like(q)
    write(k, v, pages, out, places)
    return attend(q, pages, segments.rows, options, None, out)[0]


def pages_of(k: torch.Tensor, context: ForwardContext, options: AttentionOptions) -> torch.Tensor:
    """Return the layer's pages: the context's, or in training new ones, for the keys of this call."""
    if context.pages is not None:
        return context.pages[options.layer]
    _, kv_heads, head_dim = k.shape
    return k.new_empty(context.num_blocks, kv_heads, 2, head_dim * context.block_size)


def attended(
    q: torch.Tensor, pages: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None, out: torch.Tensor,
) -> tuple[torch.Tensor, Saved]:  # fmt: skip
    """Do as `attend`; return the output, and what the backward of a training call reads."""
    out, lse = attend(q, pages, context, options, sinks, out)
    if context.pages is not None:
        return out, ()
    return out, (q, pages, out, lse) if sinks is None else (q, pages, out, lse, sinks)


def write(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, places: Places) -> None:
    """Put keys and values of each row into their pages, and zeros into padding rows of ``out``, room for attention."""
    tokens, kv_heads, head_dim = k.shape
    if tokens:
        _write[(tokens,)](
            aligned(k), aligned(v), pages, out, places.blocks, places.offsets, places.sequences, places.block_size,
            kv_heads, head_dim, out.shape[1] * head_dim, power_of_two(kv_heads), power_of_two(head_dim),
        )  # fmt: skip


@jit(do_not_specialize=["block_size"])
def _write(
    k: tensor, v: tensor, pages: tensor, out: tensor, blocks: tensor, offsets: tensor, sequences: tensor,
    block_size: tensor, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
    real = (head < KV_HEADS) & (d < HEAD_DIM)
    source = row * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM + d
    page = put(blocks, offsets, row, head, True, block_size, KV_HEADS)
    tl.store(pages + page * HEAD_DIM + d, tl.load(k + source, mask=real), mask=real)
    tl.store(pages + (page + block_size) * HEAD_DIM + d, tl.load(v + source, mask=real), mask=real)
    clear_if_idle(out, sequences, row, WIDTH)


@jit()
def put(
    blocks: tensor, offsets: tensor, token: tensor, head: tensor, real: tensor, block_size: tensor,
    KV_HEADS: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return where a token's key goes, counted in heads of the pages; its value goes ``block_size`` further on."""
    block = tl.load(blocks + token, mask=real, other=0).to(tl.int64)
    return (block * KV_HEADS + head) * 2 * block_size + tl.load(offsets + token, mask=real, other=0)


def attend(
    q: torch.Tensor, pages: torch.Tensor, context: ForwardContext, options: AttentionOptions,
    sinks: torch.Tensor | None, out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``out``, and the log-sum-exp of the scores of each row and head, to base 2.

    ``out``: room for the output, like ``q``, in which padding rows are zeros already.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, group = pages.shape[1], heads // pages.shape[1]
    layout = context.on_device
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    tile = attention_tiles(q.device, head_dim, q.dtype).tile
    rows = max(tile.rows, power_of_two(group))
    items = layout.items(rows // group)
    sums, levels = room_for_kept(context, lse, head_dim) if len(items.kept) else (lse, lse)
    for some in (items.kept, items.pieces):
        if len(some):
            _attend_items[(len(some), kv_heads)](
                q, pages, some, layout.queries, layout.tables, out, lse, sums, levels,
                lse if sinks is None else aligned(sinks), layout.tables.shape[1], block_bits(context),
                *score_factors(options), heads, kv_heads, head_dim, options.window, options.softcap > 0,
                sinks is not None, rows, KV_CHUNK, power_of_two(max(head_dim, 16)), num_warps=tile.warps,
                num_stages=tile.stages,
            )  # fmt: skip
    return out, lse


def score_factors(options: AttentionOptions) -> tuple[float, float]:
    """Return what the products q . k, and behind a cap their tanh, are multiplied with to be scores, to base 2."""
    if options.softcap > 0:
        return options.scale / options.softcap, options.softcap * math.log2(math.e)
    return options.scale * math.log2(math.e), 1.0


def block_bits(context: ForwardContext) -> int:
    """Return the logarithm of the block size, a power of two: kernels shift instead of dividing."""
    return context.block_size.bit_length() - 1


@jit()
def tile_of_keys(
    pages: tensor, table: tensor, base: tensor, block_bits: tensor, kv_head: tensor, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return where the key at ``base`` lies, those of its tile behind it, and its value a page's keys further on."""
    page = tl.load(table + (base >> block_bits)).to(tl.int64) * KV_HEADS + kv_head
    return pages + ((page << block_bits + 1) + (base & (1 << block_bits) - 1)) * HEAD_DIM


@jit(do_not_specialize=["table_width", "block_bits"])
def _attend_items(
    q: tensor, pages: tensor, items: tensor, queries: tensor, tables: tensor, out: tensor, lse: tensor, sums: tensor,
    levels: tensor, sinks: tensor, table_width: tensor, block_bits: tensor, inner: tensor, outer: tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> None:  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    item = items + _ITEM * tl.program_id(0)
    sequence = tl.load(item).to(tl.int64)
    query_at, count, oldest = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    since, until = tl.load(item + 4), tl.load(item + 5)
    slot, number = tl.load(item + 6), tl.load(item + 7)
    kv_head = tl.program_id(1)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_DIM)
    query_at += r // GROUP
    real = r // GROUP < count
    row = tl.load(queries + 2 * query_at, mask=real, other=0).to(tl.int64)
    position = tl.load(queries + 2 * query_at + 1, mask=real, other=oldest)
    head = kv_head * GROUP + r % GROUP
    place = row * HEADS + head
    inside = real[:, None] & (d[None, :] < HEAD_DIM)
    query = tl.load(q + place[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0) // KEYS * KEYS
    held = tl.where(until > oldest, number, 0)
    done = tl.cdiv(since, SPLIT) * SPLIT  # of splits before this, ``held`` softmaxes are kept
    origin = done - held * SPLIT
    slot -= origin // SPLIT
    walked = tl.maximum(begin, since)
    whole = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    whole_total, whole_peak = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    for first in range(tl.maximum(origin, begin // SPLIT * SPLIT), until, SPLIT):
        begun = real & (first < done) & (held > 0)
        at = (slot + first // SPLIT) * HEADS + head
        acc, total, peak = load_kept(sums, levels, at, begun, inside, HEAD_DIM, PADDED_DIM)
        for base in range(tl.maximum(first, walked), tl.minimum(first + SPLIT, until), KEYS):
            key = base + tl.arange(0, KEYS)
            there = key < until
            tile = tile_of_keys(pages, tables + sequence * table_width, base, block_bits, kv_head, KV_HEADS, HEAD_DIM)
            held_keys = there[None, :] & (d[:, None] < HEAD_DIM)
            keys = tl.load(tile + tl.arange(0, KEYS)[None, :] * HEAD_DIM + d[:, None], mask=held_keys, other=0.0)
            scores = dot(query, keys, tl.zeros((ROWS, KEYS), tl.float32)) * inner
            if CAPPED:
                scores = tanh(scores) * outer
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            weights, fade, total, peak = taken_in(scores, total, peak)
            held_values = there[:, None] & (d[None, :] < HEAD_DIM)
            tile += HEAD_DIM << block_bits
            values = tl.load(tile + tl.arange(0, KEYS)[:, None] * HEAD_DIM + d[None, :], mask=held_values, other=0.0)
            acc = dot(weights.to(values.dtype), values, acc * fade[:, None])
        whole, whole_total, whole_peak = merged(whole, whole_total, whole_peak, acc, total, peak)
    if until > oldest:
        if SINKS:
            nothing, one = tl.zeros((ROWS, PADDED_DIM), tl.float32), tl.full((ROWS,), 1.0, tl.float32)
            sink = tl.load(sinks + head) * LOG2E
            whole, whole_total, whole_peak = merged(whole, whole_total, whole_peak, nothing, one, sink)
        row = tl.load(queries + 2 * query_at, mask=real, other=0).to(tl.int64)  # again: registers are full until here
        place = row * HEADS + head
        result = whole / whole_total[:, None]
        tl.store(out + place[:, None] * HEAD_DIM + d[None, :], result.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + place, whole_peak + tl.log2(whole_total), mask=real)
    else:
        at = (tl.load(item + 6) + r // GROUP * number) * HEADS + head
        keep(sums, levels, at, real, inside, whole, whole_total, whole_peak, HEAD_DIM, PADDED_DIM)
