"""Normalise and rotate queries and keys, and put keys and values into pages, in one launch, for attention.

Invariants:

* An element has the operations of the launches of their own (`norm`, `rope`, `attention.write`), in their order,
  rounded where they round: a head is one row of `norm`'s tile, whatever rows are beside it.
* That these are the same bits is compared on the device, once a layer's sizes; where they are not, each is a launch.

T tokens, H heads, D head size, R angles.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import ceil_div
from samebit.kernels.layout.options import AttentionOptions, HeadNorms, Saved
from samebit.kernels.triton.attention import Places, attended, attention_forward, pages_of, put, write
from samebit.kernels.triton.norm import rms_norm_forward, statistics
from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.rope import rotate, turned
from samebit.kernels.triton.tiles.table import power_of_two, row_tile

logger = logging.getLogger(__name__)

_TOKENS = 67
"""Tokens that are compared."""


def attention_of_unrotated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
    context: ForwardContext, options: AttentionOptions, sinks: torch.Tensor | None, norms: HeadNorms | None,
) -> tuple[torch.Tensor, tuple[Saved, Saved, Saved]]:  # fmt: skip
    """Implement `Operations.attention_of_unrotated`."""
    of_norms: tuple[Saved, Saved] = ((), ()) if norms is None else ((q, norms.queries), (k, norms.keys))
    if not joins(Heads.of(q, k, angles, norms)):
        out, saved = attention_forward(*turned_each(q, k, angles, norms), v, context, options, sinks)
        return out, (saved, *of_norms)
    pages = pages_of(k, context, options)
    rotated, room = turn_and_write(q, k, v, angles, norms, pages, Places.of(context))
    out, saved = attended(rotated, pages, context, options, sinks, room)
    return out, (saved, *of_norms)


@dataclass(frozen=True)
class Heads:
    """Holds what decides which kernels the heads of a layer compile to.

    Attributes:
        weights: the dtypes of the norms' weights; None without norms.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    weights: tuple[torch.dtype, torch.dtype] | None

    @staticmethod
    def of(
        q: torch.Tensor, k: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], norms: HeadNorms | None
    ) -> "Heads":
        """Return the sizes and dtypes of a call."""
        weights = None if norms is None else (norms.queries.dtype, norms.keys.dtype)
        return Heads(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], angles[0].shape[1], weights)


@cache
def joins(heads: Heads) -> bool:
    """Return whether one launch has the bits of a launch each. The first call of a layer's sizes compares them.

    Raises:
        RuntimeError: the first call is one of those that a CUDA graph records.
    """
    if proved_equal(heads):
        return True
    logger.warning("%s: norms, rotation and pages in one launch do not have the bits of a launch each", heads)
    return False


@torch.no_grad()
def proved_equal(heads: Heads) -> bool:
    """Compare one launch with a launch each, on the device.

    Raises:
        RuntimeError: the device is recording a CUDA graph.
    """
    if heads.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"the first call of {heads} came while a CUDA graph was recorded; allowed: any call before")
    generator = torch.Generator(heads.device).manual_seed(heads.head_dim)

    def random(*shape: int, dtype: torch.dtype = heads.dtype) -> torch.Tensor:
        floats = torch.empty(shape, dtype=torch.float32, device=heads.device)
        return floats.normal_(generator=generator).to(dtype)

    q, k, v = (random(_TOKENS, number, heads.head_dim) for number in (heads.heads, heads.kv_heads, heads.kv_heads))
    turns = random(_TOKENS, heads.rotated, dtype=torch.float32)
    angles, norms = (turns.cos(), turns.sin()), None
    if heads.weights is not None:
        queries, keys = (random(heads.head_dim, dtype=dtype) for dtype in heads.weights)
        norms = HeadNorms(queries, keys, 1e-6, 1.0)
    tokens = torch.arange(_TOKENS, dtype=torch.int32, device=heads.device)
    size = 64
    places = Places(1 + tokens // size, tokens % size, tokens, size)
    shape = 2 + _TOKENS // size, heads.kv_heads, 2, heads.head_dim * size
    one, each = (torch.zeros(shape, dtype=heads.dtype, device=heads.device) for _ in range(2))
    rotated, _ = turn_and_write(q, k, v, angles, norms, one, places)
    expected, turned_keys = turned_each(q, k, angles, norms)
    write(turned_keys, v, each, torch.empty_like(q), places)
    return torch.equal(rotated, expected) and torch.equal(one, each)


def turned_each(
    q: torch.Tensor, k: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and rotate queries and keys, a launch each."""
    if norms is not None:
        q = rms_norm_forward(q, norms.queries, norms.eps, norms.offset)[0]
        k = rms_norm_forward(k, norms.keys, norms.eps, norms.offset)[0]
    return rotate(q, *angles, 1.0), rotate(k, *angles, 1.0)


def turn_and_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
    norms: HeadNorms | None, pages: torch.Tensor, places: Places,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Put keys and values into pages; return the rotated queries, and room for attention with zeros in padding rows."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    tokens, heads, head_dim = q.shape
    kv_heads, half = k.shape[1], angles[0].shape[1]
    rotated, out = torch.empty_like(q), torch.empty_like(q)
    rows, padded, warps = row_tile(head_dim)
    query_tiles, key_tiles = ceil_div(tokens * heads, rows), ceil_div(tokens * kv_heads, rows)
    weights = (q, k) if norms is None else (aligned(norms.queries), aligned(norms.keys))
    eps, offset = (0.0, 0.0) if norms is None else (norms.eps, norms.offset)
    if tokens:
        _turn_and_write[(query_tiles + 2 * key_tiles,)](
            q, k, v, *weights, *map(aligned, angles), places.blocks, places.offsets, places.sequences, rotated, out,
            pages, tokens, query_tiles, key_tiles, places.block_size, eps, offset, heads, kv_heads, head_dim, half,
            norms is not None, rows, padded, power_of_two(half), power_of_two(max(1, head_dim - 2 * half)),
            num_warps=warps,
        )  # fmt: skip
    return rotated, out


@jit(do_not_specialize=["tokens", "query_tiles", "key_tiles", "block_size", "eps", "offset"])
def _turn_and_write(
    q: tensor, k: tensor, v: tensor, query_weight: tensor, key_weight: tensor, cos: tensor, sin: tensor,
    blocks: tensor, offsets: tensor, sequences: tensor, rotated: tensor, out: tensor, pages: tensor, tokens: tensor,
    query_tiles: tensor, key_tiles: tensor, block_size: tensor, eps: tensor, offset: tensor, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr,
) -> None:  # fmt: skip
    """Take a tile of the heads of all tokens: of queries first, then of keys, then of values."""
    tile = tl.program_id(0)
    d = tl.arange(0, PADDED)[None, :]
    if tile < query_tiles:
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        real, token = row < tokens * HEADS, row // HEADS
        _turn(
            q, query_weight, cos, sin, rotated + row[:, None] * HEAD_DIM, row, token, real, eps, offset, HEAD_DIM, HALF,
            NORMED, PADDED, PADDED_HALF, PADDED_REST,
        )  # fmt: skip
        idle = real & (tl.load(sequences + token, mask=real, other=0) < 0)
        zeros = tl.zeros((ROWS, PADDED), out.dtype.element_ty)
        tl.store(out + row[:, None] * HEAD_DIM + d, zeros, mask=idle[:, None] & (d < HEAD_DIM))
    else:
        tile -= query_tiles
        of_keys = tile < key_tiles
        row = tl.where(of_keys, tile, tile - key_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        real, token = row < tokens * KV_HEADS, row // KV_HEADS
        page = put(blocks, offsets, token, row % KV_HEADS, real, block_size, KV_HEADS)
        if of_keys:
            _turn(
                k, key_weight, cos, sin, pages + page[:, None] * HEAD_DIM, row, token, real, eps, offset, HEAD_DIM,
                HALF, NORMED, PADDED, PADDED_HALF, PADDED_REST,
            )  # fmt: skip
        else:
            inside = real[:, None] & (d < HEAD_DIM)
            value = tl.load(v + row[:, None] * HEAD_DIM + d, mask=inside)
            tl.store(pages + (page + block_size)[:, None] * HEAD_DIM + d, value, mask=inside)


@jit()
def _turn(
    x: tensor, weight: tensor, cos: tensor, sin: tensor, target: tensor, row: tensor, token: tensor, real: tensor,
    eps: tensor, offset: tensor, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    PADDED: tl.constexpr, PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr,
) -> None:  # fmt: skip
    """Normalise heads, rotate their first ``2 * HALF`` elements, and write them from ``target`` ``[ROWS, 1]`` on.

    A head is read once for its sum, as `norm` reads it, and again where its elements are rotated.
    """
    at = x + row[:, None] * HEAD_DIM
    scale = real.to(tl.float32)
    if NORMED:
        d = tl.arange(0, PADDED)[None, :]
        inside = real[:, None] & (d < HEAD_DIM)
        value = tl.load(at + d, mask=inside, other=0.0).to(tl.float32)
        _, scale = statistics(value, inside, eps, HEAD_DIM, False)
    pair = tl.arange(0, PADDED_HALF)
    held = pair < HALF
    angle = real[:, None] & held[None, :]
    first = _normed(at, weight, scale, pair, held, real, offset, NORMED)
    second = _normed(at, weight, scale, HALF + pair, held, real, offset, NORMED)
    c = tl.load(cos + token[:, None] * HALF + pair[None, :], mask=angle, other=0.0)
    s = tl.load(sin + token[:, None] * HALF + pair[None, :], mask=angle, other=0.0)
    left, right = turned(first.to(tl.float32), second.to(tl.float32), c, s)
    tl.store(target + pair[None, :], left.to(target.dtype.element_ty), mask=angle)
    tl.store(target + HALF + pair[None, :], right.to(target.dtype.element_ty), mask=angle)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, PADDED_REST)
        held = rest < HEAD_DIM
        kept = _normed(at, weight, scale, rest, held, real, offset, NORMED)
        tl.store(target + rest[None, :], kept, mask=real[:, None] & held[None, :])


@jit()
def _normed(
    at: tensor, weight: tensor, scale: tensor, column: tensor, held: tensor, real: tensor, offset: tensor,
    NORMED: tl.constexpr,
) -> Any:  # fmt: skip
    """Return some columns of the heads at ``at`` ``[ROWS, 1]``, rounded as `norm` rounds them."""
    value = tl.load(at + column[None, :], mask=real[:, None] & held[None, :], other=0.0)
    if NORMED:
        factor = tl.load(weight + column, mask=held, other=0.0).to(tl.float32) + offset
        value = (value.to(tl.float32) * scale[:, None] * factor[None, :]).to(value.dtype)
    return value
