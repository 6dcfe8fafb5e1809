"""Gradients of the paged causal attention of one training call, on the CPU.

One work item is a sequence and a KV head; it owns the gradients of its keys, its values and of the query
heads that read them, so no two items add to the same place. Probabilities are recomputed from the saved
log-sum-exp (Dao et al. 2022). Pages of a training call hold one KV chunk each.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .attention import KV_CHUNK
from .jit import parallel_kernel
from .numeric import LANES, exp, fma, tanh, widen
from .simd import tile_multiply, tile_multiply_add

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def _backward(
    q: Any, pages: Any, table_rows: Any, block_tables: Any, row_start: Any, lengths: Any, block_size: int,
    scale: Any, window: int, softcap: Any, out: Any, lse: Any, grad: Any, grad_q: Any, grad_k: Any, grad_v: Any,
    threads: int,
) -> None:  # fmt: skip
    kv_heads = grad_k.shape[1]
    items = len(lengths) * kv_heads
    share = (items + threads - 1) // threads
    for slot in prange(share * threads):
        item = (slot % share) * threads + slot // share
        if item < items:
            sequence = item // kv_heads
            _backward_head(
                q, pages, block_tables, table_rows[sequence], row_start[sequence], lengths[sequence], item % kv_heads,
                kv_heads, block_size, scale, window, softcap, out, lse, grad, grad_q, grad_k, grad_v,
            )  # fmt: skip


backward = parallel_kernel(_backward)


@njit(nogil=True, error_model="numpy")
def _backward_head(
    q: Any, pages: Any, block_tables: Any, table: int, row: int, length: int, kv_head: int, kv_heads: int,
    block_size: int, scale: Any, window: int, softcap: Any, out: Any, lse: Any, grad: Any, grad_q: Any, grad_k: Any,
    grad_v: Any,
) -> None:  # fmt: skip
    head_dim = q.shape[2]
    group = q.shape[1] // kv_heads
    wide = (head_dim + LANES - 1) // LANES * LANES  # rows padded to whole vectors
    rows = length * group
    query = np.zeros((rows, wide), np.float32)
    upstream = np.zeros((rows, wide), np.float32)
    delta = np.zeros(rows, np.float32)
    for r in range(rows):
        token, head = row + r // group, kv_head * group + r % group
        for d in range(head_dim):
            query[r, d] = widen(q[token, head, d])
            upstream[r, d] = widen(grad[token, head, d])
            delta[r] = fma(upstream[r, d], widen(out[token, head, d]), delta[r])
    grad_query = np.zeros((rows, wide), np.float32)
    keys = np.zeros((wide, KV_CHUNK), np.float32)
    values = np.zeros((wide, KV_CHUNK), np.float32)
    key_rows = np.zeros((KV_CHUNK, wide), np.float32)
    grad_keys = np.zeros((KV_CHUNK, wide), np.float32)
    grad_values = np.zeros((KV_CHUNK, wide), np.float32)
    for chunk in range((length + KV_CHUNK - 1) // KV_CHUNK):
        base = chunk * KV_CHUNK
        count = min(KV_CHUNK, length - base)
        page = (block_tables[table, base // block_size] * kv_heads + kv_head) * 2 * head_dim * block_size
        _load_chunk(pages, page, block_size, head_dim, count, keys, values, key_rows)
        grad_keys[:] = _ZERO
        grad_values[:] = _ZERO
        last_row = rows if window <= 0 else min(rows, (base + count - 1 + window) * group)
        _chunk_gradients(
            base, count, base * group, last_row, group, head_dim, wide, scale, window, softcap, row, kv_head, lse,
            query.reshape(-1), upstream.reshape(-1), delta, keys.reshape(-1), values.reshape(-1), key_rows.reshape(-1),
            grad_query.reshape(-1), grad_keys.reshape(-1), grad_values.reshape(-1),
        )  # fmt: skip
        for j in range(count):
            for d in range(head_dim):
                grad_k[row + base + j, kv_head, d] = grad_keys[j, d]
                grad_v[row + base + j, kv_head, d] = grad_values[j, d]
    for r in range(rows):
        for d in range(head_dim):
            grad_q[row + r // group, kv_head * group + r % group, d] = grad_query[r, d]


@njit(inline="always")
def _load_chunk(
    pages: Any, page: int, block_size: int, head_dim: int, count: int, keys: Any, values: Any, key_rows: Any
) -> None:
    """Keys and values of a chunk as [D, chunk] tiles, keys also as [chunk, D]; 0 where there is no token."""
    for d in range(head_dim):
        for j in range(KV_CHUNK):
            keys[d, j] = widen(pages[page + d * block_size + j]) if j < count else _ZERO
            values[d, j] = widen(pages[page + head_dim * block_size + j * head_dim + d]) if j < count else _ZERO
            key_rows[j, d] = keys[d, j]


@njit(inline="always")
def _chunk_gradients(
    base: int, count: int, first_row: int, last_row: int, group: int, head_dim: int, wide: int, scale: Any,
    window: int, softcap: Any, row: int, kv_head: int, lse: Any, query: Any, upstream: Any, delta: Any, keys: Any,
    values: Any, key_rows: Any, grad_query: Any, grad_keys: Any, grad_values: Any,
) -> None:  # fmt: skip
    p = np.zeros(KV_CHUNK, np.float32)
    slope = np.zeros(KV_CHUNK, np.float32)
    for r in range(first_row, last_row):
        token = r // group
        lo = max(0, token - window + 1 - base) if window > 0 else 0
        hi = min(count, token + 1 - base)
        shift = lse[row + token, kv_head * group + r % group]
        for at in range(0, hi, 2 * LANES):
            tile_multiply(1, 2, query, r * wide, wide, keys, at, KV_CHUNK, head_dim, p, at, KV_CHUNK)
            tile_multiply(1, 2, upstream, r * wide, wide, values, at, KV_CHUNK, head_dim, slope, at, KV_CHUNK)
        for j in range(KV_CHUNK):
            s = p[j] * scale
            bend = _ONE
            if softcap > _ZERO:
                t = tanh(s / softcap)
                s = softcap * t
                bend = _ONE - t * t
            seen = lo <= j and j < hi
            p[j] = exp(s - shift) if seen else _ZERO
            slope[j] = p[j] * (slope[j] - delta[r]) * bend * scale if seen else _ZERO
        for d in range(0, wide, LANES):
            tile_multiply_add(1, 1, slope, 0, KV_CHUNK, key_rows, d, wide, hi, grad_query, r * wide + d, wide)
        for j in range(lo, hi):
            for d in range(wide):
                grad_values[j * wide + d] = fma(p[j], upstream[r * wide + d], grad_values[j * wide + d])
                grad_keys[j * wide + d] = fma(slope[j], query[r * wide + d], grad_keys[j * wide + d])
