"""Compute the gradients of attention over latents of a training call: every sequence starts at position 0.

Two kernels, so that nothing is added to from two programs: one owns some heads of some queries and walks the keys they
saw, the other owns a tile of keys and walks the queries of all heads that saw them. Probabilities are recomputed from
the saved log-sum-exp (Dao et al. 2022). Where rows have lists of chosen tokens, both walk all tokens, and those that
were not chosen weigh 0: the products are those of the dense form.

T tokens, S sequences, H heads, B tokens a block, R elements of a latent, P of a rotated key, W of both.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import LatentOptions, Saved
from samebit.kernels.triton.latent.rows import ROWS, heads_together, keys_of_gradients, load_rows, padded_sizes
from samebit.kernels.triton.numeric import aligned, dot, jit

_OWN_KEYS = 16
"""Keys whose gradients a program owns: 16 x 512 float32 where latents have 512 elements."""

_WARPS = 4


def latent_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: LatentOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `Operations.latent_backward`."""
    q, pages, out, lse, *chosen = saved
    grad = aligned(grad)
    tokens, heads, _ = q.shape
    layout, together = context.on_device, heads_together(heads)
    empty = torch.empty if context.covers_all_rows else torch.zeros
    grad_q = empty(q.shape, dtype=q.dtype, device=q.device)
    grad_latents = empty(tokens, options.width, dtype=q.dtype, device=q.device)
    inward = torch.empty_like(lse)
    where = layout.row_start, layout.lengths, layout.tables
    layer = (
        layout.tables.shape[1], context.block_size, options.scale, heads, options.rank, options.rope, together, ROWS,
    )  # fmt: skip
    masks = _masks(chosen[0], int(context.lengths.max(initial=0))) if chosen else lse
    width = masks.shape[1] if chosen else 0
    padded = padded_sizes(options)
    queries, keys = layout.tiles(ROWS // together), layout.tiles(_OWN_KEYS)
    if len(queries):
        _of_queries[(len(queries), ceil_div(heads, together))](
            q, pages, out, lse, grad, grad_q, inward, queries, masks, *where, width, *layer,
            keys_of_gradients(q, options), *padded, bool(chosen), num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
        _of_keys[(len(keys),)](
            q, pages, lse, grad, inward, grad_latents, keys, masks, *where, width, *layer, _OWN_KEYS, *padded,
            bool(chosen), num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
    return grad_q, grad_latents


def _masks(chosen: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[T, width]`` uint8, 1 where a row attends to the token at a position."""
    masks = torch.zeros(len(chosen), width + 1, dtype=torch.uint8, device=chosen.device)
    places = torch.where(chosen < 0, width, chosen)
    return masks.scatter_(1, places.long(), 1)


@jit()
def _weights_and_slopes(
    absorbed: tensor, rotated: tensor, latents: tensor, keys: tensor, upstream: tensor, level: tensor, inward: tensor,
    seen: tensor, scale: tensor, ROWS: tl.constexpr, KEYS: tl.constexpr,
) -> Any:  # fmt: skip
    """Return the probabilities of a tile of rows and keys, and gradients of the products q . k."""
    turned = tl.trans(latents)
    scores = dot(absorbed, turned, tl.zeros((ROWS, KEYS), tl.float32))
    scores = dot(rotated, tl.trans(keys), scores) * scale
    weights = tl.where(seen, tl.exp(scores - level[:, None]), 0.0)
    wanted = dot(upstream, turned, tl.zeros((ROWS, KEYS), tl.float32))
    return weights, weights * (wanted - inward[:, None]) * scale


@jit(do_not_specialize=["masked", "table_width", "block_size"])
def _of_queries(
    q: tensor, pages: tensor, out: tensor, lse: tensor, grad: tensor, grad_q: tensor, inwards: tensor, tiles: tensor,
    masks: tensor, row_start: tensor, lengths: tensor, tables: tensor, masked: tensor, table_width: tensor,
    block_size: tensor, scale: tensor, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    TOKENS: tl.constexpr = ROWS // TOGETHER
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    length = tl.load(lengths + sequence)
    r = tl.arange(0, ROWS)
    d, p = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    token, head = first + r // TOGETHER, tl.program_id(1) * TOGETHER + r % TOGETHER
    newest = tl.minimum(first + TOKENS, length) - 1
    real = (token < length) & (head < HEADS)
    place = (tl.load(row_start + sequence) + token).to(tl.int64) * HEADS + head
    inside = real[:, None] & (d[None, :] < RANK)
    absorbed, rotated = load_rows(q, place, real, RANK, ROPE, PADDED_RANK, PADDED_ROPE)
    upstream = tl.load(grad + place[:, None] * RANK + d[None, :], mask=inside, other=0.0)
    output = tl.load(out + place[:, None] * RANK + d[None, :], mask=inside, other=0.0)
    level = tl.load(lse + place, mask=real, other=0.0)
    inward = tl.sum(upstream.to(tl.float32) * output.to(tl.float32), axis=1)
    tl.store(inwards + place, inward, mask=real)
    of_absorbed = tl.zeros((ROWS, PADDED_RANK), tl.float32)
    of_rotated = tl.zeros((ROWS, PADDED_ROPE), tl.float32)
    for base in range(0, newest + 1, KEYS):
        key = base + tl.arange(0, KEYS)
        there = key <= newest
        block = tl.load(tables + sequence * table_width + key // block_size, mask=there, other=0).to(tl.int64)
        latents, keys = load_rows(
            pages, block * block_size + key % block_size, there, RANK, ROPE, PADDED_RANK, PADDED_ROPE
        )
        seen = real[:, None] & (key[None, :] <= token[:, None])
        if MASKED:
            at = masks + (place // HEADS)[:, None] * masked + key[None, :]
            seen &= tl.load(at, mask=seen, other=0) > 0
        _, slopes = _weights_and_slopes(
            absorbed, rotated, latents, keys, upstream, level, inward, seen, scale, ROWS, KEYS
        )
        of_absorbed = dot(slopes.to(latents.dtype), latents, of_absorbed)
        of_rotated = dot(slopes.to(keys.dtype), keys, of_rotated)
    at = grad_q + place[:, None] * (RANK + ROPE)
    tl.store(at + d[None, :], of_absorbed.to(grad_q.dtype.element_ty), mask=inside)
    behind = real[:, None] & (p[None, :] < ROPE)
    tl.store(at + RANK + p[None, :], of_rotated.to(grad_q.dtype.element_ty), mask=behind)


@jit(do_not_specialize=["masked", "table_width", "block_size"])
def _of_keys(
    q: tensor, pages: tensor, lse: tensor, grad: tensor, inwards: tensor, grad_latents: tensor, tiles: tensor,
    masks: tensor, row_start: tensor, lengths: tensor, tables: tensor, masked: tensor, table_width: tensor,
    block_size: tensor, scale: tensor, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    TOKENS: tl.constexpr = ROWS // TOGETHER
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    base = tl.load(tiles + 2 * tl.program_id(0) + 1)
    length, row = tl.load(lengths + sequence), tl.load(row_start + sequence)
    r = tl.arange(0, ROWS)
    d, p = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    key = base + tl.arange(0, KEYS)
    there = key < length
    block = tl.load(tables + sequence * table_width + key // block_size, mask=there, other=0).to(tl.int64)
    latents, keys = load_rows(pages, block * block_size + key % block_size, there, RANK, ROPE, PADDED_RANK, PADDED_ROPE)
    of_latents = tl.zeros((KEYS, PADDED_RANK), tl.float32)
    of_keys = tl.zeros((KEYS, PADDED_ROPE), tl.float32)
    for first in range(base, length, TOKENS):
        token = first + r // TOGETHER
        for begin in range(0, HEADS, TOGETHER):
            head = begin + r % TOGETHER
            real = (token < length) & (head < HEADS)
            place = (row + token).to(tl.int64) * HEADS + head
            absorbed, rotated = load_rows(q, place, real, RANK, ROPE, PADDED_RANK, PADDED_ROPE)
            inside = real[:, None] & (d[None, :] < RANK)
            upstream = tl.load(grad + place[:, None] * RANK + d[None, :], mask=inside, other=0.0)
            level = tl.load(lse + place, mask=real, other=0.0)
            inward = tl.load(inwards + place, mask=real, other=0.0)
            seen = real[:, None] & there[None, :] & (key[None, :] <= token[:, None])
            if MASKED:
                at = masks + (place // HEADS)[:, None] * masked + key[None, :]
                seen &= tl.load(at, mask=seen, other=0) > 0
            weights, slopes = _weights_and_slopes(
                absorbed, rotated, latents, keys, upstream, level, inward, seen, scale, ROWS, KEYS
            )
            turned = tl.trans(slopes.to(absorbed.dtype))
            of_latents = dot(tl.trans(weights.to(upstream.dtype)), upstream, of_latents)
            of_latents = dot(turned, absorbed, of_latents)
            of_keys = dot(turned, rotated, of_keys)
    at = grad_latents + (row + key).to(tl.int64)[:, None] * (RANK + ROPE)
    inside = there[:, None] & (d[None, :] < RANK)
    tl.store(at + d[None, :], of_latents.to(grad_latents.dtype.element_ty), mask=inside)
    behind = there[:, None] & (p[None, :] < ROPE)
    tl.store(at + RANK + p[None, :], of_keys.to(grad_latents.dtype.element_ty), mask=behind)
