"""Hold what the kernels of latent attention have in common: how rows lie, and how many a program takes.

R elements of a latent, P of a rotated key, W of both, B tokens a block.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import KV_CHUNK
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.triton.numeric import aligned, clear_if_idle, jit
from samebit.kernels.triton.tiles.table import power_of_two, shared_memory

ROWS = 16
"""Rows of a program, tokens times heads: their accumulators are 16 x 512 float32 where latents have 512 elements."""

WARPS = 8

_LEAST_KEYS = 16
"""Keys that a product of tensor cores takes at least."""


def heads_together(heads: int) -> int:
    """Return how many heads a program computes: a power of two, at most `ROWS`."""
    return min(ROWS, power_of_two(heads))


def keys_of_forward(q: torch.Tensor, options: LatentOptions) -> int:
    """Return how many keys the forward takes in at once: in all calls of a layer, also of its sparse form."""
    return _keys_that_fit(q, options, KV_CHUNK, row_tiles=1)


def keys_of_gradients(q: torch.Tensor, options: LatentOptions) -> int:
    """Return how many keys meet a tile of queries at once, for the gradients of these."""
    return _keys_that_fit(q, options, KV_CHUNK // 2, row_tiles=2)


def _keys_that_fit(x: torch.Tensor, options: LatentOptions, most: int, row_tiles: int) -> int:
    """Return ``most``, or fewer where a program has no room for more: the tile depends on the layer and on the GPU.

    Shared memory has ``row_tiles`` tiles of rows; beside them latents with their rotated keys, or, of 16 bits, for
    tensor cores, latents twice, as keys and as values.

    Raises:
        ValueError: a latent of which there is no room for `_LEAST_KEYS`.
    """
    rank, rope = padded_sizes(options)
    of_key = rank + rope if x.dtype == torch.float32 else 2 * rank
    room, keys = shared_memory(x.device), most
    while (needed := (ROWS * (row_tiles * rank + rope) + keys * of_key) * x.itemsize) > room:
        if keys == _LEAST_KEYS:
            raise ValueError(
                f"attention over latents of {options.rank} + {options.rope} elements in {x.dtype} takes {needed} bytes "
                f"of shared memory; on this GPU a program has {room}; allowed: fewer, or a dtype of 16 bits"
            )
        keys //= 2
    return keys


def padded_sizes(options: LatentOptions) -> tuple[int, int]:
    """Return the elements of a latent and of a rotated key in their tiles."""
    return power_of_two(max(options.rank, 16)), power_of_two(max(options.rope, 16))


def write_pages(
    latents: torch.Tensor, pages: torch.Tensor, context: ForwardContext, out: torch.Tensor | None = None
) -> None:
    """Write rows ``[T, W]`` to their blocks in ``pages``, ``[blocks, B, W]``; and zeros to padding rows of ``out``
    ``[T, ...]``."""
    tokens, width = latents.shape
    layout = context.on_device
    if tokens:
        _write[(tokens,)](
            aligned(latents), pages, pages if out is None else out, layout.blocks, layout.offsets, layout.sequences,
            context.block_size, width, power_of_two(width), 0 if out is None else out[0].numel(),
        )  # fmt: skip


@jit(do_not_specialize=["block_size"])
def _write(
    latents: tensor, pages: tensor, out: tensor, blocks: tensor, offsets: tensor, sequences: tensor,
    block_size: tensor, WIDTH: tl.constexpr, PADDED: tl.constexpr, CLEARED: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    target = (tl.load(blocks + row).to(tl.int64) * block_size + tl.load(offsets + row)) * WIDTH
    tl.store(pages + target + d, tl.load(latents + row * WIDTH + d, mask=d < WIDTH), mask=d < WIDTH)
    if CLEARED > 0:
        clear_if_idle(out, sequences, row, CLEARED)


@jit()
def load_rows(
    source: tensor, place: tensor, real: tensor, RANK: tl.constexpr, ROPE: tl.constexpr, PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
) -> Any:  # fmt: skip
    """Return rows at these places of ``[.., W]``, the first R elements and the P behind them; 0 where not real."""
    d, p = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    at = source + place[:, None] * (RANK + ROPE)
    front = tl.load(at + d[None, :], mask=real[:, None] & (d[None, :] < RANK), other=0.0)
    behind = tl.load(at + RANK + p[None, :], mask=real[:, None] & (p[None, :] < ROPE), other=0.0)
    return front, behind
