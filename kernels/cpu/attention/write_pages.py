"""Write keys and values into KV pages on the CPU. `samebit.kernels.layout.kv_pages` defines the layout.

T tokens, H heads, D head size, B tokens a block.
"""

from typing import Any

import numpy as np

from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.many_rows_vectors import fetch
from samebit.kernels.cpu.rope import rotate_head

_FORWARD = np.float32(1.0)


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
    threads: int, q: Any, k: Any, v: Any, cos: Any, sin: Any, block_of_row: Any, offset_of_row: Any, block_size: int,
    pages: Any, out: Any,
) -> None:  # fmt: skip
    """Write rotated keys and the values into the pages, rotated queries into ``out``."""
    share_out(
        _rotate_and_write_row, q.shape[0], threads,
        (q, k, v, cos, sin, block_of_row, offset_of_row, block_size, pages, out),
    )  # fmt: skip


@kernel_part
def _rotate_and_write_row(
    row: int, q: Any, k: Any, v: Any, cos: Any, sin: Any, block_of_row: Any, offset_of_row: Any, block_size: int,
    pages: Any, out: Any,
) -> None:  # fmt: skip
    kv_heads, head_dim = k.shape[1], k.shape[2]
    after = min(row + 1, q.shape[0] - 1)
    _fetch_column(block_of_row[after] * kv_heads, kv_heads, head_dim, offset_of_row[after], block_size, pages)
    key = np.empty(head_dim, k.dtype)
    for head in range(q.shape[1]):
        rotate_head(q[row, head], cos[row], sin[row], _FORWARD, out[row, head])
    for head in range(kv_heads):
        rotate_head(k[row, head], cos[row], sin[row], _FORWARD, key)
        page = (block_of_row[row] * kv_heads + head) * 2 * head_dim * block_size
        _put(key, v[row, head], page, offset_of_row[row], block_size, pages)


write_pages = SharedKernel(_write)
rotate_and_write = SharedKernel(_rotate_and_write)
