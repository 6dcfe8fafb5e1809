"""Score the tokens before a row by their index keys, a program a row and tile of keys; then choose, a program a row.

Invariants:

* A score is a sum over the heads of one tile product of a row's queries and `_KEYS` keys; what tile that is depends on
  the position of the key alone. Scores stay on the device, for some rows at a time; how many depends on shapes alone.
* Scores are compared as numbers from 0 to 2**32 - 1 in the same order; 0 and -0 are equal. Of equal ones the lowest
  positions are chosen.
* Every row has its list, also one that all tokens are chosen for: one kernel attends in training, prefill and decode.

Selection by the digits of the scores' bits, most significant first (radix select). T rows, H heads, D elements of a
key, B tokens a block.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.triton.latent.rows import write_pages
from samebit.kernels.triton.numeric import aligned, dot, jit
from samebit.kernels.triton.tiles.table import power_of_two

_KEYS = 64
"""Keys of a program that scores."""

_MOST_HEADS = 64
"""Heads that meet them at once."""

_SCORES = 1 << 26
"""Scores that are kept at a time, at most, if those of one row are not more."""

_SPAN = 1024
"""Scores that a program that chooses looks at together."""

_DIGIT, _DIGITS = tl.constexpr(4), tl.constexpr(16)
"""Bits of a digit, and its values."""


def choose_keys(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, context: ForwardContext, options: IndexOptions
) -> torch.Tensor:
    """Implement `Operations.choose_keys`."""
    pages = None if context.pages is None else context.pages[options.layer]
    if pages is None:
        pages = torch.empty(
            context.num_blocks, context.block_size, options.size, dtype=keys.dtype, device=keys.device
        )  # fmt: skip
    write_pages(keys, pages, context)
    queries, weights = aligned(queries), aligned(weights)
    rows, layout = context.num_rows, context.on_device
    capacity = layout.tables.shape[1] * context.block_size
    top_k = min(options.top_k, capacity)
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=keys.device)
    width = ceil_div(max(capacity, 1), _SPAN) * _SPAN
    together = max(1, min(rows, _SCORES // width))
    scores = torch.empty(together, width, dtype=torch.float32, device=keys.device)
    where = layout.sequences, layout.within, layout.starts
    heads = min(_MOST_HEADS, power_of_two(max(options.heads, 16)))
    for first in range(0, rows, together):
        count = min(together, rows - first)
        _score_keys[(count, ceil_div(max(capacity, 1), _KEYS))](
            queries, weights, pages, *where, layout.tables, scores, first, layout.tables.shape[1], context.block_size,
            width, top_k, options.scale, options.heads, options.size, heads, _KEYS,
            power_of_two(max(options.size, 16)), num_warps=4, num_stages=1,
        )  # fmt: skip
        _choose_row[(count,)](scores, *where, chosen, first, width, top_k, _SPAN, num_warps=4)
    return chosen


@jit(do_not_specialize=["first", "table_width", "block_size", "width", "top_k"])
def _score_keys(
    queries: tensor, weights: tensor, pages: tensor, sequences: tensor, within: tensor, starts: tensor, tables: tensor,
    scores: tensor, first: tensor, table_width: tensor, block_size: tensor, width: tensor, top_k: tensor,
    scale: tensor, HEADS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr, KEYS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    row = (first + tl.program_id(0)).to(tl.int64)
    sequence = tl.load(sequences + row).to(tl.int64)
    if sequence < 0:
        return
    position = tl.load(starts + sequence) + tl.load(within + row)
    base = tl.program_id(1) * KEYS
    if position < top_k or base > position:
        return
    d, key, h = tl.arange(0, PADDED), base + tl.arange(0, KEYS), tl.arange(0, TOGETHER)
    there = key <= position
    block = tl.load(tables + sequence * table_width + key // block_size, mask=there, other=0).to(tl.int64)
    at = (block * block_size + key % block_size)[:, None] * SIZE + d[None, :]
    own = tl.load(pages + at, mask=there[:, None] & (d[None, :] < SIZE), other=0.0)
    total = tl.zeros((KEYS,), tl.float32)
    for begin in range(0, HEADS, TOGETHER):
        head = begin + h
        real = head < HEADS
        place = row * HEADS + head
        query = tl.load(
            queries + place[:, None] * SIZE + d[None, :], mask=real[:, None] & (d[None, :] < SIZE), other=0.0
        )
        weight = tl.load(weights + place, mask=real, other=0.0)
        products = dot(query, tl.trans(own), tl.zeros((TOGETHER, KEYS), tl.float32)) * scale
        total += tl.sum(weight[:, None] * tl.maximum(products, 0.0), axis=0)
    tl.store(scores + tl.program_id(0).to(tl.int64) * width + key, total, mask=there)


@jit()
def _ordered(score: tensor) -> Any:
    """Return a number that compares, without a sign, as the score does."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@jit(do_not_specialize=["first", "width", "top_k"])
def _choose_row(
    scores: tensor, sequences: tensor, within: tensor, starts: tensor, chosen: tensor, first: tensor, width: tensor,
    top_k: tensor, SPAN: tl.constexpr,
) -> None:  # fmt: skip
    row = (first + tl.program_id(0)).to(tl.int64)
    sequence = tl.load(sequences + row).to(tl.int64)
    count = 0
    if sequence >= 0:
        count = tl.load(starts + sequence) + tl.load(within + row) + 1
    out, own = chosen + row * top_k, scores + tl.program_id(0).to(tl.int64) * width
    span = tl.arange(0, SPAN)
    if count <= top_k:
        for base in range(0, top_k, SPAN):
            token = base + span
            tl.store(out + token, tl.where(token < count, token, -1), mask=token < top_k)
        return
    digits = tl.arange(0, _DIGITS)
    least, left = tl.zeros((), tl.uint32), top_k
    for level in range(32 // _DIGIT):
        shift = 32 - _DIGIT * (level + 1)
        numbers = tl.zeros((_DIGITS,), tl.int32)
        for base in range(0, count, SPAN):
            token = base + span
            key = _ordered(tl.load(own + token, mask=token < count, other=0.0))
            # Of a shift by all bits nothing is said: two shifts instead of one.
            alike = (token < count) & ((key >> shift) >> _DIGIT == (least >> shift) >> _DIGIT)
            digit = ((key >> shift) & (_DIGITS - 1)).to(tl.int32)
            numbers += tl.sum((alike[None, :] & (digit[None, :] == digits[:, None])).to(tl.int32), axis=1)
        above = tl.sum(numbers, axis=0) - tl.cumsum(numbers, axis=0)  # with a greater digit
        found = tl.max(tl.where(above + numbers >= left, digits, 0), axis=0)
        left -= tl.sum(tl.where(digits == found, above, 0), axis=0)
        least |= found.to(tl.uint32) << shift
    filled, equals = 0, 0
    for base in range(0, count, SPAN):
        token = base + span
        key = _ordered(tl.load(own + token, mask=token < count, other=0.0))
        equal = ((token < count) & (key == least)).to(tl.int32)
        before = equals + tl.cumsum(equal, axis=0) - equal
        taken = ((token < count) & ((key > least) | ((equal > 0) & (before < left)))).to(tl.int32)
        tl.store(out + filled + tl.cumsum(taken, axis=0) - taken, token, mask=taken > 0)
        filled += tl.sum(taken, axis=0)
        equals += tl.sum(equal, axis=0)
