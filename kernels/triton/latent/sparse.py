"""Compute attention over chosen latents: a program takes some heads of one row through the list of its tokens.

Invariants:

* A row walks its list in tiles (`keys_of_forward`), through one online-softmax accumulator for each split of `KV_SPLIT`
  places, and one that those are merged into (`splits`), in order: as attention to all latents walks tokens.
* One kernel for decode, prefill and training, also of rows for which all tokens are chosen.

H heads, B tokens a block, R elements of a latent, P of a rotated key, W of both, K places of a list.
"""

import math

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.triton.latent.rows import ROWS, WARPS, heads_together, keys_of_forward, load_rows, padded_sizes
from samebit.kernels.triton.numeric import LOG2E, dot, jit
from samebit.kernels.triton.splits import SPLIT, merged, taken_in


def attend_chosen(
    q: torch.Tensor, pages: torch.Tensor, chosen: torch.Tensor, context: ForwardContext, options: LatentOptions,
    out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Fill ``out``, but for padding rows, and return the log-sum-exp of the scores of each row and head."""
    tokens, heads, _ = q.shape
    layout, together, keys = context.on_device, heads_together(heads), keys_of_forward(q, options)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        _attend_chosen[(tokens, ceil_div(heads, together))](
            q, pages, chosen, layout.sequences, layout.within, layout.starts, layout.tables, out, lse,
            layout.tables.shape[1], context.block_size, chosen.shape[1], options.scale * math.log2(math.e), heads,
            options.rank, options.rope, together, ROWS, keys, *padded_sizes(options), num_warps=WARPS, num_stages=1,
        )  # fmt: skip
    return lse


@jit(do_not_specialize=["table_width", "block_size", "top_k"])
def _attend_chosen(
    q: tensor, pages: tensor, chosen: tensor, sequences: tensor, within: tensor, starts: tensor, tables: tensor,
    out: tensor, lse: tensor, table_width: tensor, block_size: tensor, top_k: tensor, scale: tensor,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, PADDED_RANK: tl.constexpr, PADDED_ROPE: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequences + row).to(tl.int64)
    if sequence < 0:
        return
    count = tl.minimum(tl.load(starts + sequence) + tl.load(within + row) + 1, top_k)
    r, d = tl.arange(0, ROWS), tl.arange(0, PADDED_RANK)
    head = tl.program_id(1) * TOGETHER + r
    real = (r < TOGETHER) & (head < HEADS)
    place = row * HEADS + head
    absorbed, rotated = load_rows(q, place, real, RANK, ROPE, PADDED_RANK, PADDED_ROPE)
    whole = tl.zeros((ROWS, PADDED_RANK), tl.float32)
    whole_total, whole_peak = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    for first in range(0, count, SPLIT):
        acc = tl.zeros((ROWS, PADDED_RANK), tl.float32)
        total, peak = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
        for base in range(first, tl.minimum(first + SPLIT, count), KEYS):
            number = base + tl.arange(0, KEYS)
            there = number < count
            key = tl.load(chosen + row * top_k + number, mask=there, other=0)
            block = tl.load(tables + sequence * table_width + key // block_size, mask=there, other=0).to(tl.int64)
            latents, keys = load_rows(
                pages, block * block_size + key % block_size, there, RANK, ROPE, PADDED_RANK, PADDED_ROPE
            )
            scores = dot(absorbed, tl.trans(latents), tl.zeros((ROWS, KEYS), tl.float32))
            scores = dot(rotated, tl.trans(keys), scores) * scale
            scores = tl.where(there[None, :], scores, float("-inf"))
            weights, fade, total, peak = taken_in(scores, total, peak)
            acc = dot(weights.to(latents.dtype), latents, acc * fade[:, None])
        whole, whole_total, whole_peak = merged(whole, whole_total, whole_peak, acc, total, peak)
    inside = real[:, None] & (d[None, :] < RANK)
    result = whole / whole_total[:, None]
    tl.store(out + place[:, None] * RANK + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + place, (whole_peak + tl.log2(whole_total)) / LOG2E, mask=real)
