"""Compute the gated delta rule: one kernel for prefill, mixed batches, decode and training.

Invariants (the row rule and the grid rule):

* Chunks of `SCAN_CHUNK` tokens are anchored at position 0 of each sequence. With S the state at the chunk's first
  token and L the running sum of the decay in the chunk (float64), a token writes u and reads o:
  ``u_t = beta_t (v_t - exp(L_t) k_t S - sum over s < t of exp(L_t - L_s) (k_t . k_s) u_s)``,
  ``o_t = exp(L_t) q_t S + sum over s <= t of exp(L_t - L_s) (q_t . k_s) u_s``.
* Keys and u of a chunk are tiles of the whole chunk, whichever of its tokens belong to the call: those before come from
  the tail, those to come are zeros. A token's place in them is its position's in the chunk, in every call, and so is
  the order in which the squares of its key are summed.
* Where each channel of a key decays by itself (Kimi Delta Attention), each token of the chunk, from the first on,
  multiplies the keys before it by its decay, in every call in the same order, and so the product that is left of the
  state; ``exp(L_t - L_s)`` is then in the keys.
* The tokens of the call are computed one after the other by one piece of code, which a decode runs once.
* The state moves once a chunk, with the chunk's last token, by one product of the chunk's two tiles.
* A program owns a slice of the value size of the state, and of u, of one sequence and value head: sums run over the
  key size and over tokens, so nothing is summed over programs. It alone reads and writes its part of the tail's u; keys
  and decays, which slices and heads share, are written by another launch after it.

A program keeps its slice of the state in registers. A decode step reads state and tail once and writes the state once a
chunk, where the plain recurrence reads and writes it at each token.

The memory is laid out as on the CPU (`samebit.kernels.layout.states.delta`) with two differences, so that one code
computes each: ``tail_k`` holds keys before they are normalised, ``tail_sums`` the decay itself.

T tokens, Hk and Hv heads of keys and values, K and V their sizes, C tokens a chunk; S is the state alone.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES, SCAN_CHUNK, ceil_div
from samebit.kernels.layout.options import KEY_EPS, DeltaOptions
from samebit.kernels.layout.states.delta import DeltaStates
from samebit.kernels.triton.numeric import aligned, clear_idle_parts, dot, jit, keep_state, widened
from samebit.kernels.triton.tiles.table import power_of_two

_WARPS = 4

_VALUE_PART = 32
"""The most elements of a value that a program takes."""

_STATE_ELEMENTS = 8192
"""The most elements of the state that a program holds (more of K > 512): 64 registers of each thread."""


def delta_rule(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, context: ForwardContext, options: DeltaOptions
) -> torch.Tensor:
    """Implement `Operations.delta_rule`."""
    qkv, decay, beta = aligned(qkv), aligned(decay), aligned(beta)
    layer = None if context.states is None else context.states.layer(options.layer, DeltaStates)
    out = _run(qkv, decay, beta, context, options, layer)
    if layer is not None:
        _append(qkv, decay, context, options, layer, out)
    return out


def _run(
    qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, context: ForwardContext, options: DeltaOptions,
    layer: DeltaStates | None,
) -> torch.Tensor:  # fmt: skip
    key_heads, heads, key_dim, value_dim = options.sizes
    layout = context.on_device
    filled = context.covers_all_rows or (layer is not None and len(context.lengths) > 0)  # by `_append`
    out = (torch.empty if filled else torch.zeros)(len(qkv), heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if layer is None or context.states is None:  # nothing of the memory is touched; one compiled kernel serves both
        held = decay if options.by_channel else decay.new_empty(0, dtype=torch.float64)
        memory, grid = (decay, decay, decay, decay, held, decay), 0
    else:
        kept = context.states.checkpoints[options.layer].state
        memory, grid = (
            (layer.state, layer.block_state, layer.tail_k, layer.tail_u, layer.tail_sums, kept),
            context.block_size,
        )
    if len(context.lengths):
        padded_key, padded_value = power_of_two(max(16, key_dim)), power_of_two(max(16, value_dim))
        part = min(padded_value, _VALUE_PART, max(16, _STATE_ELEMENTS // padded_key))
        _rule_head[(len(context.lengths), heads, ceil_div(value_dim, part))](
            qkv, decay, beta, layout.row_start, layout.lengths, layout.starts, layout.slots, *memory, layout.captures,
            layout.first_capture, grid, out, key_heads, heads, key_dim, value_dim, ceil_div(key_dim, LANES) * LANES,
            ceil_div(value_dim, LANES) * LANES, SCAN_CHUNK, part, padded_key, key_dim**-0.5, KEY_EPS,
            options.by_channel, num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
    return out


@jit(do_not_specialize=["grid"])
def _rule_head(
    qkv: tensor, decay: tensor, beta: tensor, row_start: tensor, lengths: tensor, starts: tensor, slots: tensor,
    states: tensor, block_states: tensor, tail_k: tensor, tail_u: tensor, tail_decay: tensor, captured: tensor,
    captures: tensor, first_capture: tensor, grid: tensor, out: tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, PADDED_KEY: tl.constexpr, SCALE: tl.constexpr, EPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
) -> None:  # fmt: skip
    """Run one sequence's tokens of the call, for ``PART`` elements of one value head; ``grid``: of the block
    boundaries, 0 without memory."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    end = start + tl.load(lengths + sequence)
    origin = (tl.load(row_start + sequence) - start).to(tl.int64)  # the row that position 0 would be
    c, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_KEY)
    p = tl.program_id(2) * PART + tl.arange(0, PART)
    real_n, real_p = n < KEY_DIM, p < VALUE_DIM
    in_state = n[:, None] * WIDE + p[None, :]
    real_state = real_n[:, None] & real_p[None, :]
    own = (slot * HEADS + head) * (KEY_DIM * WIDE)
    begun = tl.full((PADDED_KEY, PART), start, tl.int32) >= CHUNK  # before, no state was ever written
    state = tl.load(states + own + in_state, mask=real_state & begun, other=0.0)
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    of_q = qkv + key_head * KEY_DIM
    of_k = of_q + KEY_HEADS * KEY_DIM
    of_v = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    old_k = tail_k + (slot * KEY_HEADS + key_head) * (CHUNK * DEEP)
    old_u = tail_u + (slot * HEADS + head) * (CHUNK * WIDE)
    old_decay = tail_decay + (slot * HEADS + head) * (CHUNK * DEEP if BY_CHANNEL else CHUNK)
    for base in range(start // CHUNK * CHUNK, end, CHUNK):
        position = base + c
        old, new = position < start, (position >= start) & (position < end)
        rows = origin + position
        old_n, new_n = old[:, None] & real_n[None, :], new[:, None] & real_n[None, :]
        if BY_CHANNEL:
            decay_old = tl.load(old_decay + c[:, None] * DEEP + n[None, :], mask=old_n, other=0.0)
            of_channels = decay + (rows[:, None] * HEADS + head) * KEY_DIM + n[None, :]
            keeps = tl.exp(tl.where(old[:, None], decay_old, tl.load(of_channels, mask=new_n, other=0.0)))
        else:
            decay_old = tl.load(old_decay + c, mask=old, other=0.0)
            decay_new = tl.load(decay + rows * HEADS + head, mask=new, other=0.0).to(tl.float64)
            sums = tl.cumsum(tl.where(old, decay_old, decay_new), axis=0)
        k_new = tl.load(of_k + rows[:, None] * WIDTH + n[None, :], mask=new_n, other=0.0)
        k_old = tl.load(old_k + c[:, None] * DEEP + n[None, :], mask=old_n, other=0.0)
        k = tl.where(old[:, None], k_old, widened(k_new))
        k = k / tl.sqrt_rn(tl.sum(k * k, axis=1) + EPS)[:, None]
        in_u = old_u + c[:, None] * WIDE + p[None, :]
        u = tl.load(in_u, mask=old[:, None] & real_p[None, :], other=0.0)
        first = tl.maximum(start - base, 0)
        through = tl.full((PADDED_KEY,), 1.0, tl.float32)  # what is left of the state, by channel
        if BY_CHANNEL:
            for t in range(first):
                k, through = _decayed(k, through, keeps, t)
        for t in range(first, tl.minimum(end - base, CHUNK)):
            row = origin + base + t
            q_t = tl.load(of_q + row * WIDTH + n, mask=real_n, other=0.0).to(tl.float32)
            q_t = q_t / tl.sqrt_rn(tl.sum(q_t * q_t, axis=0) + EPS) * SCALE
            k_t = tl.sum(tl.where(c[:, None] == t, k, 0.0), axis=0)
            if BY_CHANNEL:
                k, through = _decayed(k, through, keeps, t)
                kept, decayed = tl.full((CHUNK,), 1.0, tl.float32), 1.0
            else:
                now = tl.sum(tl.where(c == t, sums, 0.0), axis=0)
                kept = tl.exp(tl.where(c <= t, (now - sums).to(tl.float32), 0.0))
                decayed = tl.exp(now.to(tl.float32))
            matches = tl.where(c < t, tl.sum(k * k_t[None, :], axis=1) * kept, 0.0)
            v_t = tl.load(of_v + row * WIDTH + p, mask=real_p, other=0.0).to(tl.float32)
            v_t -= decayed * tl.sum(state * (k_t * through)[:, None], axis=0)
            u_t = tl.load(beta + row * HEADS + head) * (v_t - tl.sum(u * matches[:, None], axis=0))
            u = tl.where(c[:, None] == t, u_t[None, :], u)
            asked = tl.where(c <= t, tl.sum(k * q_t[None, :], axis=1) * kept, 0.0)
            o_t = decayed * tl.sum(state * (q_t * through)[:, None], axis=0) + tl.sum(u * asked[:, None], axis=0)
            place = out + row * (HEADS * VALUE_DIM) + head * VALUE_DIM + p
            tl.store(place, o_t.to(out.dtype.element_ty), mask=real_p)
        if base + CHUNK <= end:
            if BY_CHANNEL:
                state = dot(tl.trans(k), u, state * through[:, None])
            else:
                last = tl.sum(tl.where(c == CHUNK - 1, sums, 0.0), axis=0)
                left = tl.exp((last - sums).to(tl.float32))
                state = dot(tl.trans(k), u * left[:, None], state * tl.exp(last.to(tl.float32)))
            if grid > 0:
                keep_state(
                    state, in_state, real_state, own, states, block_states, captured, captures, first_capture, grid,
                    sequence, head, base + CHUNK, end, HEADS, KEY_DIM * WIDE, CHUNK,
                )  # fmt: skip
        elif grid > 0:
            tl.store(in_u, u, mask=new[:, None] & real_p[None, :])


@jit()
def _decayed(k: tensor, through: tensor, keeps: tensor, t: tensor) -> Any:
    """Multiply the keys before token ``t`` of the chunk by what it keeps of each channel, and so ``through``."""
    c = tl.arange(0, k.shape[0])
    now = tl.sum(tl.where(c[:, None] == t, keeps, 0.0), axis=0)
    return tl.where(c[:, None] < t, k * now[None, :], k), through * now


def _append(
    qkv: torch.Tensor, decay: torch.Tensor, context: ForwardContext, options: DeltaOptions, layer: DeltaStates,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Put keys and decays of the call's tokens of the unfinished chunks into the tails, zeros into padding rows of
    ``out``."""
    layout = context.on_device
    if len(context.lengths):
        _append_tokens[(len(context.lengths), options.value_heads)](
            qkv, decay, layout.row_start, layout.lengths, layout.starts, layout.slots, layer.tail_k, layer.tail_sums,
            out, layout.sequences, 0 if context.covers_all_rows else len(qkv), *options.sizes,
            ceil_div(options.key_dim, LANES) * LANES, SCAN_CHUNK, power_of_two(options.key_dim),
            power_of_two(options.value_dim), options.by_channel, num_warps=_WARPS,
        )  # fmt: skip


@jit(do_not_specialize=["rows"])
def _append_tokens(
    qkv: tensor, decay: tensor, row_start: tensor, lengths: tensor, starts: tensor, slots: tensor, tail_k: tensor,
    tail_decay: tensor, out: tensor, sequences: tensor, rows: tensor, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DEEP: tl.constexpr, CHUNK: tl.constexpr, PADDED_KEY: tl.constexpr,
    PADDED_VALUE: tl.constexpr, BY_CHANNEL: tl.constexpr,
) -> None:  # fmt: skip
    clear_idle_parts(out, sequences, rows, tl.program_id(1), HEADS, VALUE_DIM, PADDED_VALUE)
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, slot = tl.load(row_start + sequence), tl.load(slots + sequence).to(tl.int64)
    start = tl.load(starts + sequence)
    end = start + tl.load(lengths + sequence)
    c, n = tl.arange(0, CHUNK), tl.arange(0, PADDED_KEY)
    position = end // CHUNK * CHUNK + c
    new = (position >= start) & (position < end)
    at = (row + position - start).to(tl.int64)
    in_tail = (slot * HEADS + head) * CHUNK + c
    if BY_CHANNEL:
        inside = new[:, None] & (n[None, :] < KEY_DIM)
        of_channels = tl.load(decay + (at[:, None] * HEADS + head) * KEY_DIM + n[None, :], mask=inside, other=0.0)
        tl.store(tail_decay + in_tail[:, None] * DEEP + n[None, :], of_channels, mask=inside)
    else:
        held = tl.load(decay + at * HEADS + head, mask=new, other=0.0).to(tl.float64)
        tl.store(tail_decay + in_tail, held, mask=new)
    SHARE: tl.constexpr = HEADS // KEY_HEADS
    if head % SHARE == 0:
        key_head = head // SHARE
        WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
        from_k = qkv + (KEY_HEADS + key_head) * KEY_DIM + at[:, None] * WIDTH + n[None, :]
        mask = new[:, None] & (n[None, :] < KEY_DIM)
        key = tl.load(from_k, mask=mask, other=0.0).to(tl.float32)
        place = (slot * KEY_HEADS + key_head) * CHUNK + c
        tl.store(tail_k + place[:, None] * DEEP + n[None, :], key, mask=mask)
