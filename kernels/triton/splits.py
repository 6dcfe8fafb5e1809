"""Merge the softmaxes of a row's splits of keys, in order.

Invariants:

* A split is `KV_SPLIT` keys of a sequence, from position 0 on. Each is a softmax of its own: a sum of weighted values,
  the sum of the weights, and the peak, which is subtracted from the scores before exponentials of base 2.
* Which product is rounded stands in the source, so merged by whichever item, a row has the same bits.
* Merged into nothing (sums 0, peak -inf), a softmax stays what it is: its factor is 1. So one that was stored can be
  merged again, and one without keys changes nothing.

A work item of attention (`attention_work`) walks its keys in steps of a split. It ends a row (it then begins with what
items of an earlier launch have kept of that row, one kept softmax a step), or it keeps what it has for the item that
does.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.attention_work import room_for_slots
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import KV_SPLIT
from samebit.kernels.triton.numeric import jit

SPLIT = tl.constexpr(KV_SPLIT)


def room_for_kept(context: ForwardContext, lse: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make room for what items keep: weighted sums of values; then the sums of the weights, and the peaks."""
    layout = context.on_device
    slots = room_for_slots(len(layout.lengths), layout.tables.shape[1] * context.block_size)
    sizes = (slots, lse.shape[1], width), (slots, lse.shape[1], 2)
    sums, levels = (torch.empty(size, dtype=torch.float32, device=lse.device) for size in sizes)
    return sums, levels


@jit()
def taken_in(scores: tensor, total: tensor, peak: tensor) -> Any:
    """Take scores ``[ROWS, KEYS]`` into a softmax; return their weights, the factor of its sums, its total and peak."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(peak - level)
    return weights, fade, total * fade + tl.sum(weights, axis=1), higher


@jit()
def load_kept(
    sums: tensor, levels: tensor, at: tensor, real: tensor, inside: tensor, WIDTH: tl.constexpr, PADDED: tl.constexpr
) -> Any:
    """Return the softmaxes that are kept ``at`` ``[ROWS]``; one without keys where they are not real."""
    acc = tl.load(sums + at[:, None] * WIDTH + tl.arange(0, PADDED)[None, :], mask=inside & real[:, None], other=0.0)
    total = tl.load(levels + 2 * at, mask=real, other=0.0)
    return acc, total, tl.load(levels + 2 * at + 1, mask=real, other=float("-inf"))


@jit()
def keep(
    sums: tensor, levels: tensor, at: tensor, real: tensor, inside: tensor, acc: tensor, total: tensor, peak: tensor,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Keep softmaxes ``at`` ``[ROWS]``."""
    tl.store(sums + at[:, None] * WIDTH + tl.arange(0, PADDED)[None, :], acc, mask=inside)
    tl.store(levels + 2 * at, total, mask=real)
    tl.store(levels + 2 * at + 1, peak, mask=real)


@jit()
def merged(whole: tensor, whole_total: tensor, whole_peak: tensor, acc: tensor, total: tensor, peak: tensor) -> Any:
    """Merge the softmax of the next keys into that of all before: ``[ROWS, D]``, ``[ROWS]`` and ``[ROWS]`` each."""
    higher = tl.maximum(whole_peak, peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    old, new = tl.exp2(whole_peak - level), tl.exp2(peak - level)
    factor = tl.broadcast_to(new[:, None], acc.shape)
    return tl.fma(acc, factor, whole * old[:, None]), tl.fma(total, new, whole_total * old), higher
