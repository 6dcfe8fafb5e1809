"""Draw counter-based random numbers, and tokens by inverse CDF, on the device.

A draw depends on that row's logits, temperature, key and counter alone. The random words are Philox4x32-10, the integer
function of `samebit.kernels.cpu.philox`: the same number for a token on either device. The sums over the vocabulary are
in another order than on the CPU, so a draw at the very border of two tokens may differ between devices.

T rows, V tokens of the vocabulary, C tokens a chunk.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import VOCAB_CHUNK, ceil_div
from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.vocabulary.chunks import (
    AHEAD,
    PART,
    WARPS,
    Parts,
    chunk_of,
    chunk_weights,
    part_peaks,
    row_peak,
    row_total,
)

_ROWS = 128


def uniforms(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.uniforms`."""
    out = torch.empty(len(keys), dtype=torch.float64, device=keys.device)
    if len(keys):
        _uniforms[(ceil_div(len(keys), _ROWS),)](aligned(keys), aligned(counters), out, len(keys), _ROWS)
    return out


@jit(do_not_specialize=["count"])
def _uniforms(keys: tensor, counters: tensor, out: tensor, count: tensor, ROWS: tl.constexpr) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < count
    k0 = tl.load(keys + 2 * row, mask=real, other=0)
    k1 = tl.load(keys + 2 * row + 1, mask=real, other=0)
    c0 = tl.load(counters + 4 * row, mask=real, other=0)
    c1 = tl.load(counters + 4 * row + 1, mask=real, other=0)
    c2 = tl.load(counters + 4 * row + 2, mask=real, other=0)
    c3 = tl.load(counters + 4 * row + 3, mask=real, other=0)
    a, b, _, _ = tl.philox_impl(c0, c1, c2, c3, k0, k1, 10)
    high, low = (a >> 5).to(tl.float64), (b >> 6).to(tl.float64)
    tl.store(out + row, (high * 67108864.0 + low) / 9007199254740992.0, mask=real)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.draw`."""
    logits, temperatures = aligned(logits), aligned(temperatures)
    rows, parts = len(logits), Parts.of(logits.shape[1])
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        peaks = part_peaks(logits)
        sums = torch.empty(rows, parts.chunks, dtype=torch.float32, device=logits.device)
        firsts = torch.empty(rows, parts.parts, dtype=torch.int32, device=logits.device)
        sizes = parts.vocab, parts.chunks, parts.parts, parts.padded
        _weigh[(rows, parts.parts)](
            logits, temperatures, peaks, sums, firsts, *sizes, PART, VOCAB_CHUNK, num_warps=WARPS
        )  # fmt: skip
        _draw[(rows,)](
            logits, temperatures, aligned(uniform), peaks, sums, firsts, out, *sizes, VOCAB_CHUNK, num_warps=WARPS
        )  # fmt: skip
    return out


@jit()
def _weigh(
    logits: tensor, temperatures: tensor, peaks: tensor, sums: tensor, firsts: tensor, VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Store each chunk's summed weights; at temperature 0 the lowest id of the part that has the largest logit of the
    row."""
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + r * VOCAB
    temperature = tl.load(temperatures + r)
    highest = row_peak(peaks + r * PARTS, PARTS, PADDED)
    if temperature == 0.0:
        found = tl.full((), VOCAB, tl.int32)
        for n in range(PART):
            token = (part * PART + n) * CHUNK + tl.arange(0, CHUNK)
            values = chunk_of(row, (part * PART + n) * CHUNK, VOCAB, CHUNK)
            found = tl.minimum(found, tl.min(tl.where(values == highest, token, VOCAB), axis=0))
        tl.store(firsts + r * PARTS + part, found)
    else:
        peak = tl.div_rn(highest, temperature)
        for n in range(PART):
            chunk = part * PART + n
            weights = chunk_weights(chunk_of(row, chunk * CHUNK, VOCAB, CHUNK), temperature, peak)
            tl.store(sums + r * CHUNKS + chunk, tl.sum(weights, axis=0), mask=chunk < CHUNKS)


@jit()
def _draw(
    logits: tensor, temperatures: tensor, uniforms: tensor, peaks: tensor, sums: tensor, firsts: tensor, out: tensor,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Draw a token for each row; -1 for one with NaN or with every token ruled out. What a chunk's sum was rounded up
    by is the chunk's likeliest token's."""
    r = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + r)
    highest = row_peak(peaks + r * PARTS, PARTS, PADDED)
    chosen = tl.full((), -1, tl.int32)
    if highest > float("-inf"):
        if temperature == 0.0:
            part = tl.arange(0, PADDED)
            chosen = tl.min(tl.load(firsts + r * PARTS + part, mask=part < PARTS, other=VOCAB), axis=0)
        else:
            total = row_total(sums + r * CHUNKS, CHUNKS, AHEAD)
            target = tl.load(uniforms + r) * total
            chunk, passed = _chunk_beyond(sums + r * CHUNKS, target, CHUNKS, AHEAD)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            values = chunk_of(logits + r * VOCAB, chunk * CHUNK, VOCAB, CHUNK)
            weights = chunk_weights(values, temperature, tl.div_rn(highest, temperature))
            cumulated = passed + tl.cumsum(weights.to(tl.float64), axis=0)
            found = tl.min(tl.where((weights > 0) & (cumulated > target), token, VOCAB), axis=0)
            likeliest = tl.min(tl.where(weights == tl.max(weights, axis=0), token, VOCAB), axis=0)
            chosen = tl.where(total > 0.0, tl.where(found < VOCAB, found, likeliest), -1)
    tl.store(out + r, chosen)


@jit()
def _chunk_beyond(sums: tensor, target: tensor, CHUNKS: tl.constexpr, AHEAD: tl.constexpr) -> Any:
    """Return the first chunk with whose sum the cumulated sums exceed the target, and those before it."""
    chunk = tl.full((), 0, tl.int32)
    running, passed = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for first in range(0, CHUNKS, AHEAD):
        for n in tl.static_range(AHEAD):
            running += tl.load(sums + first + n, mask=first + n < CHUNKS, other=0.0).to(tl.float64)
            is_before = (running <= target) & (first + n < CHUNKS - 1)
            chunk, passed = tl.where(is_before, first + n + 1, chunk), tl.where(is_before, running, passed)
    return chunk, passed
