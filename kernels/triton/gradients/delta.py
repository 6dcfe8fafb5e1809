"""Compute the gradients of the gated delta rule of a training call: every sequence starts at position 0 with no state.

With S the state before a chunk, E the gradient of the state after it, g the gradient of o, L the running sum of the
decay in the chunk, F what is left at the chunk's end (``exp(L_end - L)``), ``kept[t, s] = exp(L_t - L_s)``, w what a
token would write with a strength of one, ``u = beta w``, and d the gradient of what it wants to write::

    w_t = v_t - exp(L_t) k_t S - sum over s < t of kept (k_t . k_s) u_s
    d_s = sum over t >= s of kept (q_t . k_s) g_t + F_s k_s E + sum over t > s of b_t kept (k_t . k_s),  b = -beta d
    v_t    beta_t d_t                         beta_t    d_t . w_t
    q_t    sum over s <= t of kept (g_t . u_s) k_s + exp(L_t) S g_t
    k_s    sum over t >= s of kept (g_t . u_s) q_t + sum over t > s of kept (b_t . u_s) k_t
           + sum over t < s of kept (b_s . u_t) k_t + exp(L_s) S b_s + F_s E u_s

and the gradient of a token's decay adds up what decays over it: from tokens before it, or the state before the chunk,
to tokens from it on, or the state after. No term of it is subtracted from another.

Two walks over each sequence and value head find w and d, in chunks of `SCAN_CHUNK` tokens by substitution, and note S
and E at the ends of the longer chunks of the gradients. Given these, such a chunk needs no other: one kernel has a
program for each of them and value head. Keys and queries are normalised before, and gradients go back through that
after, a row at a time; there what the value heads of a key head found is added up, in their order.

A sequence's gradients depend on its own rows alone, and on where they stand in it. Source: Yang et al. 2024.

In names, ``of_x`` is the gradient of x, and ``at_x`` says where x begins.
"""

from functools import partial
from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import GRADIENT_CHUNK, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.options import KEY_EPS, DeltaOptions, Saved
from samebit.kernels.triton.gradients.decays import left_at_end, left_between
from samebit.kernels.triton.numeric import aligned, dot, jit, widened
from samebit.kernels.triton.tiles.table import power_of_two, shared_memory

_PART = 32
"""The most elements of a value that a program takes at once."""

_DEPTH = 16
"""Count of elements of a key that a chunk takes at once: with 32, an H100 runs out of registers."""

_WALK_ELEMENTS = 8192
"""The most elements of the state that a walk holds."""

_WALK_WARPS, _CHUNK_WARPS = 8, 16

_ROOM_TO_LOAD_AHEAD = 128 * 1024
"""Bytes of shared memory that a chunk takes at most where its loads run ahead of its products."""


def delta_rule_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: DeltaOptions
) -> tuple[torch.Tensor, ...]:
    """Implement `Operations.delta_rule_backward`: those of padding rows are zero."""
    qkv, decay, beta = (aligned(part) for part in saved)
    grad, layout = aligned(grad), context.on_device
    key_heads, heads, key_dim, value_dim = options.sizes
    rows, floats = len(qkv), partial(torch.empty, dtype=torch.float32, device=qkv.device)
    empty = torch.empty if context.covers_all_rows else torch.zeros
    grad_qkv = empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    grad_decay, grad_beta = (empty(decay.shape, dtype=torch.float32, device=qkv.device) for _ in range(2))
    tiles, first_tiles = layout.tiles(GRADIENT_CHUNK), layout.first_tiles(GRADIENT_CHUNK)
    if not len(tiles):
        return grad_qkv, grad_decay, grad_beta
    pairs = floats(rows, 2, key_heads, key_dim)
    inverses = floats(rows, 2, key_heads)
    before, after = (floats(len(tiles), heads, key_dim, value_dim) for _ in range(2))
    wants, of_wants = (floats(rows, heads, value_dim) for _ in range(2))
    of_pairs = floats(rows, 2, heads, key_dim)
    sizes = key_heads, heads, key_dim, value_dim
    padded_key, padded_value = power_of_two(max(16, key_dim)), power_of_two(max(16, value_dim))
    part = min(padded_value, _PART, max(16, _WALK_ELEMENTS // padded_key))
    _normalise[(rows, 2 * key_heads)](
        qkv, pairs, inverses, qkv.shape[1], key_heads, key_dim, padded_key, key_dim**-0.5, KEY_EPS
    )
    walks = len(context.lengths), heads, ceil_div(value_dim, part)
    where = layout.row_start, layout.lengths
    shape = *sizes, SCAN_CHUNK, GRADIENT_CHUNK // SCAN_CHUNK, padded_key, part
    _walk[walks](qkv, pairs, decay, beta, *where, first_tiles, before, wants, *shape, num_warps=_WALK_WARPS)
    _walk_back[walks](grad, pairs, decay, beta, *where, first_tiles, after, of_wants, *shape, num_warps=_WALK_WARPS)
    stages = 3 if shared_memory(qkv.device) >= _ROOM_TO_LOAD_AHEAD else 1
    _of_chunk[(len(tiles), heads)](
        pairs, decay, beta, grad, *where, tiles, before, after, wants, of_wants, of_pairs, grad_qkv, grad_decay,
        grad_beta, *sizes, GRADIENT_CHUNK, _DEPTH, min(_PART, padded_value), num_warps=_CHUNK_WARPS,
        num_stages=stages,
    )  # fmt: skip
    _through_norm[(len(tiles), 2 * key_heads)](
        pairs, inverses, of_pairs, grad_qkv, *where, tiles, key_heads, heads, key_dim, qkv.shape[1], GRADIENT_CHUNK,
        padded_key, key_dim**-0.5,
    )  # fmt: skip
    return grad_qkv, grad_decay, grad_beta


@jit()
def _normalise(
    qkv: tensor, pairs: tensor, inverses: tensor, WIDTH: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    PADDED_KEY: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
) -> None:  # fmt: skip
    """Divide queries, then keys, by the root of their sum of squares; multiply queries by ``SCALE``."""
    row, place, n = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED_KEY)
    x = tl.load(qkv + row * WIDTH + place * KEY_DIM + n, mask=n < KEY_DIM, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) + EPS)
    x *= inverse
    if place < KEY_HEADS:
        x *= SCALE
    tl.store(inverses + row * (2 * KEY_HEADS) + place, inverse)
    tl.store(pairs + (row * (2 * KEY_HEADS) + place) * KEY_DIM + n, x, mask=n < KEY_DIM)


@jit()
def _sums(
    decay: tensor, beta: tensor, at: tensor, real: tensor, head: tensor, HEADS: tl.constexpr, CHUNK: tl.constexpr
) -> Any:
    """Return beta, the running sum of the decay (float64), what the chunk leaves of the state, and of its tokens."""
    strength = tl.load(beta + at * HEADS + head, mask=real, other=0.0)
    sums = tl.cumsum(tl.load(decay + at * HEADS + head, mask=real, other=0.0).to(tl.float64), axis=0)
    whole, left = left_at_end(sums, CHUNK)
    return strength, sums, whole, left


@jit()
def _walk(
    qkv: tensor, pairs: tensor, decay: tensor, beta: tensor, row_start: tensor, lengths: tensor, first_tiles: tensor,
    before: tensor, wants: tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr, PADDED_KEY: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Find w of all tokens, and the state before each ``TOGETHER`` chunks, for ``PART`` elements of a value head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    length, row = tl.load(lengths + sequence), tl.load(row_start + sequence)
    tile = tl.load(first_tiles + sequence).to(tl.int64)
    t, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_KEY)
    p = tl.program_id(2) * PART + tl.arange(0, PART)
    in_state = n[:, None] * VALUE_DIM + p[None, :]
    real_state = (n[:, None] < KEY_DIM) & (p[None, :] < VALUE_DIM)
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    at_k = pairs + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    at_v = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    state = tl.zeros((PADDED_KEY, PART), tl.float32)
    for chunk in range(tl.cdiv(length, CHUNK)):
        if chunk % TOGETHER == 0:
            place = ((tile + chunk // TOGETHER) * HEADS + head) * (KEY_DIM * VALUE_DIM)
            tl.store(before + place + in_state, state, mask=real_state)
        real = chunk * CHUNK + t < length
        at = (row + chunk * CHUNK + t).to(tl.int64)
        strength, sums, whole, left = _sums(decay, beta, at, real, head, HEADS, CHUNK)
        inside = real[:, None] & (p[None, :] < VALUE_DIM)
        k = tl.load(
            at_k + at[:, None] * (2 * KEY_HEADS * KEY_DIM) + n[None, :],
            mask=real[:, None] & (n[None, :] < KEY_DIM),
            other=0.0,
        )
        value = tl.load(at_v + at[:, None] * WIDTH + p[None, :], mask=inside, other=0.0).to(tl.float32)
        matches = dot(k, tl.trans(k), tl.zeros((CHUNK, CHUNK), tl.float32)) * left_between(sums, CHUNK)
        read = dot(k, state, tl.zeros((CHUNK, PART), tl.float32))
        w = value - read * tl.exp(sums.to(tl.float32))[:, None]
        for s in range(CHUNK - 1):
            seen = tl.sum(tl.where(t[None, :] == s, matches, 0.0), axis=1)
            u = tl.sum(tl.where(t[:, None] == s, w * strength[:, None], 0.0), axis=0)
            w = tl.where(t[:, None] > s, w - seen[:, None] * u[None, :], w)
        tl.store(wants + (at[:, None] * HEADS + head) * VALUE_DIM + p[None, :], w, mask=inside)
        state = dot(tl.trans(k), w * (strength * left)[:, None], state * whole)


@jit()
def _walk_back(
    grad: tensor, pairs: tensor, decay: tensor, beta: tensor, row_start: tensor, lengths: tensor, first_tiles: tensor,
    after: tensor, of_wants: tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, TOGETHER: tl.constexpr, PADDED_KEY: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Find d of all tokens, from the last on, and the gradient of the state after each ``TOGETHER`` chunks."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    length, row = tl.load(lengths + sequence), tl.load(row_start + sequence)
    tile = tl.load(first_tiles + sequence).to(tl.int64)
    t, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_KEY)
    p = tl.program_id(2) * PART + tl.arange(0, PART)
    in_state = n[:, None] * VALUE_DIM + p[None, :]
    real_state = (n[:, None] < KEY_DIM) & (p[None, :] < VALUE_DIM)
    at_q = pairs + (head // (HEADS // KEY_HEADS)) * KEY_DIM
    count = tl.cdiv(length, CHUNK)
    state = tl.zeros((PADDED_KEY, PART), tl.float32)
    for done in range(count):
        chunk = count - 1 - done
        if (done == 0) | (chunk % TOGETHER == TOGETHER - 1):
            place = ((tile + chunk // TOGETHER) * HEADS + head) * (KEY_DIM * VALUE_DIM)
            tl.store(after + place + in_state, state, mask=real_state)
        real = chunk * CHUNK + t < length
        at = (row + chunk * CHUNK + t).to(tl.int64)
        strength, sums, whole, left = _sums(decay, beta, at, real, head, HEADS, CHUNK)
        inside, deep = real[:, None] & (p[None, :] < VALUE_DIM), real[:, None] & (n[None, :] < KEY_DIM)
        from_q = at_q + at[:, None] * (2 * KEY_HEADS * KEY_DIM) + n[None, :]
        q = tl.load(from_q, mask=deep, other=0.0)
        k = tl.load(from_q + KEY_HEADS * KEY_DIM, mask=deep, other=0.0)
        g = widened(tl.load(grad + (at[:, None] * HEADS + head) * VALUE_DIM + p[None, :], mask=inside, other=0.0))
        kept, nothing = left_between(sums, CHUNK), tl.zeros((CHUNK, CHUNK), tl.float32)
        asked = dot(q, tl.trans(k), nothing) * kept
        matches = dot(k, tl.trans(k), nothing) * kept * strength[:, None]
        d = dot(k, state, tl.zeros((CHUNK, PART), tl.float32)) * left[:, None]
        d = dot(tl.trans(asked), g, d)
        for seen in range(CHUNK - 1):
            by = CHUNK - 1 - seen  # its d is whole
            read = tl.sum(tl.where(t[:, None] == by, matches, 0.0), axis=0)
            of_by = tl.sum(tl.where(t[:, None] == by, d, 0.0), axis=0)
            d = tl.where(t[:, None] < by, d - read[:, None] * of_by[None, :], d)
        tl.store(of_wants + (at[:, None] * HEADS + head) * VALUE_DIM + p[None, :], d, mask=inside)
        decayed = tl.exp(sums.to(tl.float32))[:, None]
        state = dot(tl.trans(k), -d * strength[:, None] * decayed, dot(tl.trans(q), g * decayed, state * whole))


@jit()
def _of_chunk(
    pairs: tensor, decay: tensor, beta: tensor, grad: tensor, row_start: tensor, lengths: tensor, tiles: tensor,
    before: tensor, after: tensor, wants: tensor, of_wants: tensor, of_pairs: tensor, grad_qkv: tensor,
    grad_decay: tensor, grad_beta: tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """Compute gradients of one chunk and value head; those of queries and keys as they were normalised."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    t = tl.arange(0, CHUNK)
    real = first + t < tl.load(lengths + sequence)
    at = (tl.load(row_start + sequence) + first + t).to(tl.int64)
    strength, sums, whole, left = _sums(decay, beta, at, real, head, HEADS, CHUNK)
    decayed = tl.exp(sums.to(tl.float32))
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    at_head = (at * HEADS + head) * VALUE_DIM
    to_v = grad_qkv + at[:, None] * WIDTH + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    of_asked, of_matches = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    of_strength = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, VALUE_DIM, PART):
        p = begin + tl.arange(0, PART)
        inside = real[:, None] & (p[None, :] < VALUE_DIM)
        place = at_head[:, None] + p[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(wants + place, mask=inside, other=0.0)
        d = tl.load(of_wants + place, mask=inside, other=0.0)
        of_strength += tl.sum(d * w, axis=1)
        of_v = d * strength[:, None]
        tl.store(to_v + p[None, :], of_v.to(grad_qkv.dtype.element_ty), mask=inside)
        u = tl.trans(w * strength[:, None])
        of_asked = dot(g, u, of_asked)
        of_matches = dot(-of_v, u, of_matches)
    tl.store(grad_beta + at * HEADS + head, of_strength, mask=real)

    from_q = pairs + at[:, None] * (2 * KEY_HEADS * KEY_DIM) + (head // (HEADS // KEY_HEADS)) * KEY_DIM
    asked, matches = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in range(0, KEY_DIM, DEPTH):
        n = begin + tl.arange(0, DEPTH)
        deep = real[:, None] & (n[None, :] < KEY_DIM)
        q = tl.load(from_q + n[None, :], mask=deep, other=0.0)
        k = tl.trans(tl.load(from_q + KEY_HEADS * KEY_DIM + n[None, :], mask=deep, other=0.0))
        asked = dot(q, k, asked)
        matches = dot(tl.trans(k), k, matches)
    kept, earlier = left_between(sums, CHUNK), t[None, :] < t[:, None]  # [t, s]
    of_asked *= kept
    of_matches = tl.where(earlier, of_matches * kept, 0.0)
    weights = tl.where(earlier, of_asked * asked + of_matches * matches, 0.0)
    of_matches += tl.trans(of_matches)

    of_read, of_fed = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    through = tl.zeros((PART,), tl.float32)
    state_at = (tile * HEADS + head) * (KEY_DIM * VALUE_DIM)
    for begin in range(0, KEY_DIM, DEPTH):
        n = begin + tl.arange(0, DEPTH)
        deep = real[:, None] & (n[None, :] < KEY_DIM)
        q = tl.load(from_q + n[None, :], mask=deep, other=0.0)
        k = tl.load(from_q + KEY_HEADS * KEY_DIM + n[None, :], mask=deep, other=0.0)
        read_q, read_k, fed = (
            tl.zeros((CHUNK, DEPTH), tl.float32),
            tl.zeros((CHUNK, DEPTH), tl.float32),
            tl.zeros((CHUNK, DEPTH), tl.float32),
        )
        for start in range(0, VALUE_DIM, PART):
            p = start + tl.arange(0, PART)
            inside = real[:, None] & (p[None, :] < VALUE_DIM)
            place = at_head[:, None] + p[None, :]
            in_state = state_at + n[:, None] * VALUE_DIM + p[None, :]
            real_state = (n[:, None] < KEY_DIM) & (p[None, :] < VALUE_DIM)
            state = tl.load(before + in_state, mask=real_state, other=0.0)
            of_state = tl.load(after + in_state, mask=real_state, other=0.0)
            through += tl.sum(state * of_state, axis=0)
            g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            read_q = dot(g, tl.trans(state), read_q)
            d = tl.load(of_wants + place, mask=inside, other=0.0)
            read_k = dot(-d * strength[:, None], tl.trans(state), read_k)
            w = tl.load(wants + place, mask=inside, other=0.0)
            fed = dot(w * strength[:, None], tl.trans(of_state), fed)
        read_q, read_k, fed = read_q * decayed[:, None], read_k * decayed[:, None], fed * left[:, None]
        of_read += tl.sum(read_q * q + read_k * k, axis=1)
        of_fed += tl.sum(fed * k, axis=1)
        to_pairs = of_pairs + (at[:, None] * (2 * HEADS) + head) * KEY_DIM + n[None, :]
        tl.store(to_pairs, dot(of_asked, k, read_q), mask=deep)
        of_k = dot(of_matches, k, dot(tl.trans(of_asked), q, read_k + fed))
        tl.store(to_pairs + HEADS * KEY_DIM, of_k, mask=deep)

    from_on = (t[None, :] >= t[:, None]).to(tl.float32)  # [v, t]
    over = dot(from_on, weights, tl.zeros((CHUNK, CHUNK), tl.float32))  # [v, s]
    into = tl.where(earlier, over + of_fed[None, :], 0.0)
    of_decay = tl.sum(into, axis=1) + tl.sum(from_on * of_read[None, :], axis=1) + whole * tl.sum(through, axis=0)
    tl.store(grad_decay + at * HEADS + head, of_decay, mask=real)


@jit()
def _through_norm(
    pairs: tensor, inverses: tensor, of_pairs: tensor, grad_qkv: tensor, row_start: tensor, lengths: tensor,
    tiles: tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, PADDED_KEY: tl.constexpr, SCALE: tl.constexpr,
) -> None:  # fmt: skip
    """Add up what the value heads of a query or key found, and find from it the gradient before the norm."""
    tile, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    row, n = (tl.load(row_start + sequence) + first).to(tl.int64), tl.arange(0, PADDED_KEY)
    SHARE: tl.constexpr = HEADS // KEY_HEADS
    is_query = place < KEY_HEADS
    scale = tl.where(is_query, SCALE, 1.0)
    own = (place // KEY_HEADS) * HEADS + (place % KEY_HEADS) * SHARE
    for at in range(row, row + tl.minimum(CHUNK, tl.load(lengths + sequence) - first)):
        found = tl.zeros((PADDED_KEY,), tl.float32)
        for head in range(SHARE):
            part = of_pairs + (at * (2 * HEADS) + own + head) * KEY_DIM + n
            found += tl.load(part, mask=n < KEY_DIM, other=0.0)
        found *= scale
        in_pairs = at * (2 * KEY_HEADS) + place
        normed = tl.load(pairs + in_pairs * KEY_DIM + n, mask=n < KEY_DIM, other=0.0) / scale
        given = (found - normed * tl.sum(found * normed, axis=0)) * tl.load(inverses + in_pairs)
        tl.store(grad_qkv + at * WIDTH + place * KEY_DIM + n, given.to(grad_qkv.dtype.element_ty), mask=n < KEY_DIM)
