"""Copy chunks of tokens out of the pages: what a kernel multiplies with lies side by side, in float32.

W elements of a token's row, R of its value, B tokens a block, C tokens a chunk.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.memory import copy_elements
from samebit.kernels.cpu.base.numeric import widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.latent.vectors import widen_vectors
from samebit.kernels.layout.grids import KV_CHUNK, LANES


@inlined_part
def place_of(blocks: Any, token: int, block_size: int, width: int) -> Any:
    """Return where a token's row begins in the pages."""
    return (np.int64(blocks[token // block_size]) * block_size + token % block_size) * width


@kernel_part
def find_tokens(blocks: Any, block_size: int, width: int, base: int, many: int, places: Any) -> None:
    """Write where the C tokens from ``base`` on begin in the pages; those from ``many`` on, where the last before."""
    j = 0
    while j < KV_CHUNK:
        token = min(base + j, many - 1)
        at, inside = place_of(blocks, token, block_size, width), token % block_size
        step = width if base + j < many - 1 else 0
        for i in range(min(KV_CHUNK - j, min(block_size - inside, many - 1 - token) if step > 0 else KV_CHUNK)):
            places[j] = at + i * step
            j += 1


@kernel_part
def find_chosen(blocks: Any, block_size: int, width: int, chosen: Any, base: int, many: int, places: Any) -> None:
    """Do as `find_tokens`, for places of a list of tokens."""
    for j in range(KV_CHUNK):
        places[j] = place_of(blocks, chosen[min(base + j, many - 1)], block_size, width)


@kernel_part
def copy_rows(pages: Any, places: Any, first: int, many: int, begin: int, count: int, copied: Any, stride: int) -> None:
    """Copy ``count`` elements, from ``begin`` on, of ``many`` rows, from the ``first`` of ``places`` on, widened."""
    whole = count // LANES
    for j in range(many):
        at = places[first + j] + begin
        widen_vectors(pages, at, whole, copied, j * stride)
        for d in range(whole * LANES, count):
            copied[j * stride + d] = widen(pages[at + d])


@kernel_part
def gather_rows(
    pages: Any, blocks: Any, block_size: int, width: int, chosen: Any, base: int, count: int, gathered: Any
) -> None:
    """Copy the rows of ``count`` chosen tokens from place ``base`` of the list on to ``gathered``, ``[C, W]``."""
    for j in range(count):
        at = place_of(blocks, chosen[base + j], block_size, width)
        copy_elements(pages, at, width, gathered, j * width)
