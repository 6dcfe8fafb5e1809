"""Put tokens into the tail of a chunk, and find how their keys and queries match the keys of the chunk.

Where each channel of a key decays by itself, with e_t the exponential of a token's decay, each token multiplies the
keys before it in the tail by its e, and so the product of the chunk's e up to it, P_t. A key of the tail is then what
is left of it at the last token, in every call the same products in the same order, and
``exp(L_t - L_s) k_s . q_t = (what is left of k_s) . q_t``: a token costs K exponentials, and nothing overflows. The
state is read by ``P_t k_t`` and ``P_t q_t``. What is left is 0 once it is less than e**-60. "Kimi Linear", Kimi Team
2025.

K is the size of a key, L_t the sum of the chunk's decays up to token t, a number for each channel of a key as P_t.
"""

import math
from typing import Any

import numpy as np

from samebit.kernels.cpu.base.numeric import share_left, widen
from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.cpu.base.rows import Rows
from samebit.kernels.cpu.base.state_tiles import dots, sum_of_squares
from samebit.kernels.layout.decays import GONE
from samebit.kernels.layout.grids import SCAN_CHUNK
from samebit.kernels.layout.options import KEY_EPS

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_EPS = np.float32(KEY_EPS)

_LEAST = np.float32(math.exp(GONE))


@inlined_part
def _or_nothing(left: Any) -> Any:
    """Return what is left of a channel, 0 when it is less than `GONE` leaves of 1; NaN stays NaN."""
    return _ZERO if left > -_LEAST and left < _LEAST else left


@inlined_part
def append(inputs: Any, sizes: Any, memory: Any, item: Any, span: Any, scratch: Any) -> None:
    """Put keys and decays of a span into the tail; keys and queries also go to ``scratch.pairs``, how they match to
    ``scratch.scores``."""
    qkv, stride, decay, _ = inputs
    key_heads, value_heads, key_dim, _, deep, _, share, _ = sizes
    k, sums = memory.k, memory.sums
    row, inside, many = span
    pairs = scratch.pairs
    scale = _ONE / np.sqrt(np.float32(key_dim))
    for j in range(many):
        token = inside + j
        first = (row + j) * stride + item.key_head * key_dim
        key, query = pairs[2 * j * deep : (2 * j + 1) * deep], pairs[(2 * j + 1) * deep : (2 * j + 2) * deep]
        normalise(qkv[first : first + key_dim], scale, query)
        first += key_heads * key_dim
        normalise(qkv[first : first + key_dim], _ONE, key)
        place = (item.key_at * SCAN_CHUNK + token) * deep
        k[place : place + deep] = key
        for h in range(share):
            at = (item.value_at + h) * SCAN_CHUNK + token
            before = sums[at - 1] if token > 0 else 0.0
            sums[at] = before + np.float64(decay[(row + j) * value_heads + item.key_head * share + h])
    k_at = item.key_at * SCAN_CHUNK * deep
    for j in range(many):
        _match(scratch, j, k, k_at, deep, inside + j)


@inlined_part
def append_by_channel(inputs: Any, sizes: Any, memory: Any, item: Any, span: Any, scratch: Any) -> None:
    """Do as `append` where each channel decays; the pairs are those that read the state at the chunk's beginning."""
    qkv, stride, decay, _ = inputs
    key_heads, _, key_dim, _, deep, _, _, _ = sizes
    k, left = memory.k, memory.left
    row, inside, many = span
    pairs, decays = scratch.pairs, scratch.decays
    scale = _ONE / np.sqrt(np.float32(key_dim))
    k_at, left_at = item.key_at * SCAN_CHUNK * deep, item.value_at * SCAN_CHUNK * deep
    for j in range(many):
        token = inside + j
        first = ((row + j) * key_heads + item.key_head) * key_dim
        raw = decay[first : first + key_dim]
        for n in range(key_dim):
            decays[n] = share_left(raw[n])
        for n in range(key_dim, deep):
            decays[n] = _ZERO
        now = left[left_at + token * deep : left_at + (token + 1) * deep]
        if token == 0:
            now[:] = decays
        else:
            before = left[left_at + (token - 1) * deep : left_at + token * deep]
            for n in range(deep):
                now[n] = _or_nothing(before[n] * decays[n])
        for s in range(token):
            past = k[k_at + s * deep : k_at + (s + 1) * deep]
            for n in range(deep):
                past[n] = _or_nothing(past[n] * decays[n])
        first = (row + j) * stride + item.key_head * key_dim
        key, query = pairs[2 * j * deep : (2 * j + 1) * deep], pairs[(2 * j + 1) * deep : (2 * j + 2) * deep]
        normalise(qkv[first : first + key_dim], scale, query)
        first += key_heads * key_dim
        normalise(qkv[first : first + key_dim], _ONE, key)
        k[k_at + token * deep : k_at + (token + 1) * deep] = key
        _match(scratch, j, k, k_at, deep, token)
        for n in range(deep):
            key[n] = key[n] * now[n]
            query[n] = query[n] * now[n]


@inlined_part
def _match(scratch: Any, j: int, k: Any, k_at: int, deep: int, token: int) -> None:
    """Multiply the key and the query of number ``j`` of a span with the keys up to its own."""
    dots(
        2, Rows(scratch.pairs, 2 * j * deep, deep), Rows(k, k_at, deep), token + 1, deep,
        Rows(scratch.scores, 2 * j * SCAN_CHUNK, SCAN_CHUNK),
    )  # fmt: skip


@inlined_part
def normalise(source: Any, scale: Any, target: Any) -> None:
    """Divide by the root of the sum of squares, then multiply by ``scale``; zeros behind."""
    for n in range(len(source)):
        target[n] = widen(source[n])
    for n in range(len(source), len(target)):
        target[n] = _ZERO
    inverse = _ONE / np.sqrt(sum_of_squares(target, 0, len(target)) + _EPS)
    for n in range(len(target)):
        target[n] = target[n] * inverse * scale
