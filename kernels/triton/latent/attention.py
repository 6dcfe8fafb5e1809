"""Compute paged causal attention over latents: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* A query row walks its keys in tiles (`keys_of_forward`) anchored at position 0 of its own sequence, in order: through
  one online-softmax accumulator for each split of `KV_SPLIT` tokens, and one that those are merged into (`splits`). A
  tile in which it sees nothing leaves the accumulator as it is.
* Some heads of some tokens are the rows of one tile product; so are rows of several sequences that compute one token
  each, over the blocks they have in common (`attention_work`). What items of the first launch keep waits in memory, in
  float32, for those that end the rows.
* One tile for all calls: decode, prefill and training run one compiled kernel a layer.
* Keys beyond the newest token of an item are not loaded: their pages may hold anything.

A page is ``[B, W]``: a token's latent ``[R]`` and its rotated key ``[P]`` behind it. The latents of a tile are loaded
once, as keys and as values.

T tokens, S sequences, H heads, B tokens a block, R elements of a latent, P of a rotated key, W of both.
"""

import math

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.attention_work import ITEM
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import LatentOptions, Saved
from samebit.kernels.triton.latent.rows import (
    ROWS,
    WARPS,
    heads_together,
    keys_of_forward,
    load_rows,
    padded_sizes,
    write_pages,
)
from samebit.kernels.triton.latent.sparse import attend_chosen
from samebit.kernels.triton.numeric import LOG2E, aligned, dot, jit
from samebit.kernels.triton.splits import SPLIT, keep, load_kept, merged, room_for_kept, taken_in

_ITEM = tl.constexpr(ITEM)


def latent_forward(
    q: torch.Tensor,
    latents: torch.Tensor,
    context: ForwardContext,
    options: LatentOptions,
    chosen: torch.Tensor | None,
) -> tuple[torch.Tensor, Saved]:
    """Implement `Operations.latent_forward`."""
    q = aligned(q)
    pages = None if context.pages is None else context.pages[options.layer]
    if pages is None:
        shape = context.num_blocks, context.block_size, options.width
        pages = torch.empty(shape, dtype=latents.dtype, device=latents.device)
    out = q.new_empty(*q.shape[:2], options.rank)
    write_pages(latents, pages, context, out)
    if chosen is None:
        lse = _attend(q, pages, context, options, out)
    else:
        lse = attend_chosen(q, pages, chosen, context, options, out)
    if context.pages is not None:
        return out, ()
    return out, (q, pages, out, lse) if chosen is None else (q, pages, out, lse, chosen)


def _attend(
    q: torch.Tensor, pages: torch.Tensor, context: ForwardContext, options: LatentOptions, out: torch.Tensor
) -> torch.Tensor:
    """Fill ``out``, but for padding rows, and return the log-sum-exp of the scores of each row and head."""
    tokens, heads, _ = q.shape
    layout, together, keys = context.on_device, heads_together(heads), keys_of_forward(q, options)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    items = layout.items(ROWS // together)
    sums, levels = room_for_kept(context, lse, options.rank) if len(items.kept) else (lse, lse)
    for some in (items.kept, items.pieces):
        if len(some):
            _attend_items[(len(some), ceil_div(heads, together))](
                q, pages, some, layout.queries, layout.tables, out, lse, sums, levels, layout.tables.shape[1],
                context.block_size, options.scale * math.log2(math.e), heads, options.rank, options.rope, together,
                ROWS, keys, *padded_sizes(options), num_warps=WARPS, num_stages=1,
            )  # fmt: skip
    return lse


@jit(do_not_specialize=["table_width", "block_size"])
def _attend_items(
    q: tensor, pages: tensor, items: tensor, queries: tensor, tables: tensor, out: tensor, lse: tensor, sums: tensor,
    levels: tensor, table_width: tensor, block_size: tensor, scale: tensor, HEADS: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
) -> None:  # fmt: skip
    item = items + _ITEM * tl.program_id(0)
    sequence = tl.load(item).to(tl.int64)
    query_at, count, oldest = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    since, until = tl.load(item + 4), tl.load(item + 5)
    slot, number = tl.load(item + 6), tl.load(item + 7)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_RANK)
    query_at, head = query_at + r // TOGETHER, tl.program_id(1) * TOGETHER + r % TOGETHER
    real = (r // TOGETHER < count) & (head < HEADS)
    row = tl.load(queries + 2 * query_at, mask=real, other=0).to(tl.int64)
    position = tl.load(queries + 2 * query_at + 1, mask=real, other=oldest)
    place = row * HEADS + head
    inside = real[:, None] & (d[None, :] < RANK)
    absorbed, rotated = load_rows(q, place, real, RANK, ROPE, PADDED_RANK, PADDED_ROPE)
    held = tl.where(until > oldest, number, 0)
    done = tl.cdiv(since, SPLIT) * SPLIT  # of splits before this, ``held`` softmaxes are kept
    origin = done - held * SPLIT
    slot -= origin // SPLIT
    whole = tl.zeros((ROWS, PADDED_RANK), tl.float32)
    whole_total, whole_peak = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    for first in range(origin, until, SPLIT):
        begun = real & (first < done) & (held > 0)
        at = (slot + first // SPLIT) * HEADS + head
        acc, total, peak = load_kept(sums, levels, at, begun, inside, RANK, PADDED_RANK)
        for base in range(tl.maximum(first, since), tl.minimum(first + SPLIT, until), KEYS):
            key = base + tl.arange(0, KEYS)
            there = key < until
            block = tl.load(tables + sequence * table_width + key // block_size, mask=there, other=0).to(tl.int64)
            latents, keys = load_rows(
                pages, block * block_size + key % block_size, there, RANK, ROPE, PADDED_RANK, PADDED_ROPE
            )
            scores = dot(absorbed, tl.trans(latents), tl.zeros((ROWS, KEYS), tl.float32))
            scores = dot(rotated, tl.trans(keys), scores) * scale
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            weights, fade, total, peak = taken_in(scores, total, peak)
            acc = dot(weights.to(latents.dtype), latents, acc * fade[:, None])
        whole, whole_total, whole_peak = merged(whole, whole_total, whole_peak, acc, total, peak)
    if until > oldest:
        result = whole / whole_total[:, None]
        tl.store(out + place[:, None] * RANK + d[None, :], result.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + place, (whole_peak + tl.log2(whole_total)) / LOG2E, mask=real)
    else:
        at = (tl.load(item + 6) + r // TOGETHER * number) * HEADS + head
        keep(sums, levels, at, real, inside, whole, whole_total, whole_peak, RANK, PADDED_RANK)
