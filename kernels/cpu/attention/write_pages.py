"""Write keys and values into KV pages on the CPU. `samebit.kernels.layout.kv_pages` defines the layout.

T tokens, H heads, D head size, B tokens a block.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.many_rows_vectors import fetch
from samebit.kernels.cpu.norm.forward import rms_norm_row
from samebit.kernels.cpu.rope import rotate_head, rotate_to_halves
from samebit.kernels.layout.grids import LANES

_FORWARD = np.float32(1.0)

_PARTS = 16
"""Count of pieces that rows are cut into: scratch memory is allocated once a piece."""


@inlined_part
def _put(key: Any, value: Any, page: int, offset: int, block_size: int, pages: Any) -> None:
    """Write one token of one head into the page that starts at element ``page``: a column of keys, a row of values."""
    head_dim = len(key)
    for d in range(head_dim):
        pages[page + d * block_size + offset] = key[d]
    values = page + head_dim * (block_size + offset)
    for d in range(head_dim):
        pages[values + d] = value[d]


@inlined_part
def _fetch_column(first: int, kv_heads: int, head_dim: int, offset: int, block_size: int, pages: Any) -> None:
    """Ask for the lines that a token's keys go to: each element lies in another one."""
    for head in range(first, first + kv_heads):
        page = head * 2 * head_dim * block_size + offset
        for d in range(head_dim):
            fetch(pages, page + d * block_size)


def _write(threads: int, k: Any, v: Any, block_of_row: Any, offset_of_row: Any, block_size: int, pages: Any) -> None:
    share_out(_write_row, k.shape[0], threads, (k, v, block_of_row, offset_of_row, block_size, pages))


@kernel_part
def _write_row(row: int, k: Any, v: Any, block_of_row: Any, offset_of_row: Any, block_size: int, pages: Any) -> None:
    kv_heads, head_dim = k.shape[1], k.shape[2]
    for head in range(kv_heads):
        page = (block_of_row[row] * kv_heads + head) * 2 * head_dim * block_size
        _put(k[row, head], v[row, head], page, offset_of_row[row], block_size, pages)


def _rotate_and_write(
    threads: int, tensors: Any, sizes: Any, norms: Any, block_of_row: Any, offset_of_row: Any, kind: Any
) -> None:
    """Write rotated keys and the values into the pages, rotated queries into ``out``.

    Args:
        threads: take shares of the rows.
        tensors: addresses of q, k, v, cos, sin, pages and out.
        sizes: T, heads of queries and of keys, D, angles, B; and whether elements that are rotated together stand side
            by side, which lie in halves then.
        norms: addresses of the weights that queries and keys are normalised with (0 for none), a number of their type
            behind each; offset and eps; above 0 where what is rotated is normalised, not what is to be.
        block_of_row: where each row's key and value go, with ``offset_of_row``.
        offset_of_row: see there.
        kind: a number of the elements' type.
    """
    parts = min(_PARTS, sizes[0])
    share_out(
        _rotate_and_write_part, parts, threads,
        (parts, tensors, sizes, norms, block_of_row, offset_of_row, kind),
    )  # fmt: skip


@kernel_part
def _rotate_and_write_part(
    part: int, parts: int, tensors: Any, sizes: Any, norms: Any, block_of_row: Any, offset_of_row: Any, kind: Any
) -> None:
    rows, heads, kv_heads, head_dim, half, block_size, neighbours = sizes
    queries_at, kind_of_queries, keys_at, kind_of_keys, offset, eps, behind = norms
    of_queries = elements(queries_at, head_dim if queries_at else 0, kind_of_queries)
    of_keys = elements(keys_at, head_dim if keys_at else 0, kind_of_keys)
    q, k, v = elements(tensors[0], NO_END, kind), elements(tensors[1], NO_END, kind), elements(tensors[2], NO_END, kind)
    cos, sin = floats(tensors[3], rows * half), floats(tensors[4], rows * half)
    pages, out = elements(tensors[5], NO_END, kind), elements(tensors[6], NO_END, kind)
    key, normed, lanes = np.empty(head_dim, pages.dtype), np.empty(head_dim, pages.dtype), np.empty(LANES, np.float32)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        after = min(row + 1, rows - 1)
        _fetch_column(block_of_row[after] * kv_heads, kv_heads, head_dim, offset_of_row[after], block_size, pages)
        along, across = cos[row * half : (row + 1) * half], sin[row * half : (row + 1) * half]
        for at in range(row * heads * head_dim, (row + 1) * heads * head_dim, head_dim):
            _turn(
                q[at : at + head_dim], of_queries, offset, eps, behind, neighbours, along, across, normed, lanes,
                out[at : at + head_dim],
            )  # fmt: skip
        for head in range(kv_heads):
            at = (row * kv_heads + head) * head_dim
            _turn(k[at : at + head_dim], of_keys, offset, eps, behind, neighbours, along, across, normed, lanes, key)
            page = (block_of_row[row] * kv_heads + head) * 2 * head_dim * block_size
            _put(key, v[at : at + head_dim], page, offset_of_row[row], block_size, pages)


@inlined_part
def _turn(
    x: Any, weight: Any, offset: Any, eps: Any, behind: int, neighbours: Any, cos: Any, sin: Any, normed: Any,
    lanes: Any, out: Any,
) -> None:  # fmt: skip
    """Rotate a head; where there is a weight, normalise it before, or ``behind`` that."""
    if len(weight) > 0 and behind == 0:
        rms_norm_row(x, weight, offset, eps, lanes, normed)
        _rotate(normed, neighbours, cos, sin, out)
    else:
        _rotate(x, neighbours, cos, sin, out)
    if len(weight) > 0 and behind > 0:
        rms_norm_row(out, weight, offset, eps, lanes, out)


@inlined_part
def _rotate(x: Any, neighbours: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotate a head; with ``neighbours``, elements 2 i and 2 i + 1, which lie in halves then."""
    if neighbours > 0:
        rotate_to_halves(x, 0, True, cos, sin, out, 0)
        for i in range(2 * len(cos), len(x)):
            out[i] = x[i]
    else:
        rotate_head(x, cos, sin, _FORWARD, out)


write_pages = SharedKernel(_write)
rotate_and_write = SharedKernel(_rotate_and_write)
