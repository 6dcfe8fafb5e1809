"""Draw counter-based random numbers, and tokens by inverse CDF, on the device.

A draw depends on that row's logits, temperature, key and counter alone. The random words are Philox4x32-10, the integer
function of `samebit.kernels.cpu.philox`: the same number for a token on either device. The sums over the vocabulary are
in another order than on the CPU, so a draw at the very border of two tokens may differ between devices.

T rows, V tokens of the vocabulary, C tokens a chunk.
"""

import numpy as np
import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import VOCAB_CHUNK, ceil_div
from samebit.kernels.layout.transfer import sent
from samebit.kernels.triton.logprobs import chunk_of, chunk_weights, row_peak
from samebit.kernels.triton.numeric import aligned, jit

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


def keep_likely(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Implement `Operations.keep_likely`: torch sorts, the masses are summed in a fixed order."""
    ranked = torch.sort(row, descending=True, stable=True)
    vocab = len(row)
    share = top_p if top_p < 1.0 else 2.0  # more than there is
    limits = sent({"limits": np.array([temperature, share, min_p])}, row.device)["limits"]  # numbers go as float32
    _rule_out_unlikely[(1,)](
        ranked.values, ranked.indices, row, limits, top_k if top_k > 0 else vocab, vocab, VOCAB_CHUNK, num_warps=4
    )  # fmt: skip


@jit(do_not_specialize=["kept"])
def _rule_out_unlikely(
    values: tensor, order: tensor, row: tensor, limits: tensor, kept: tensor, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    best = tl.load(values).to(tl.float64)
    temperature, top_p, min_p = tl.load(limits), tl.load(limits + 1), tl.load(limits + 2)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, CHUNK):
        total += tl.sum(_ranked_weights(values, first, best, temperature, kept, VOCAB, CHUNK), axis=0)
    bound = top_p * total
    passed = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, CHUNK):
        rank = first + tl.arange(0, CHUNK)
        weights = _ranked_weights(values, first, best, temperature, kept, VOCAB, CHUNK)
        mass = passed + tl.cumsum(weights, axis=0)
        likely = (rank < kept) & (weights >= min_p) & (mass - weights < bound)
        token = tl.load(order + rank, mask=rank < VOCAB, other=0)
        tl.store(row + token, float("-inf"), mask=(rank < VOCAB) & (rank > 0) & (likely == 0))
        passed += tl.sum(weights, axis=0)


@jit()
def _ranked_weights(
    values: tensor, first: int, best: tensor, temperature: tensor, kept: tensor, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tensor:  # fmt: skip
    """Return exp((logit - best) / temperature), float64, of ranks from ``first`` on; 0 from rank ``kept`` on."""
    rank = first + tl.arange(0, CHUNK)
    real = (rank < VOCAB) & (rank < kept)
    logits = tl.load(values + rank, mask=real, other=float("-inf")).to(tl.float64)
    return tl.where(real, tl.exp((logits - best) / temperature), 0.0)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.draw`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _draw[(rows,)](aligned(logits), aligned(temperatures), aligned(uniform), out, vocab, VOCAB_CHUNK, num_warps=4)
    return out


@jit()
def _draw(
    logits: tensor, temperatures: tensor, uniforms: tensor, out: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Draw a token for each row; -1 for one with NaN or with every token ruled out."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * VOCAB
    temperature = tl.load(temperatures + r)
    highest = row_peak(row, VOCAB, CHUNK)
    chosen = tl.full((), -1, tl.int32)
    if highest > float("-inf"):
        if temperature == 0.0:
            chosen = _first_equal(row, highest, VOCAB, CHUNK)
        else:
            peak = tl.div_rn(highest, temperature)
            chosen = _first_beyond(row, temperature, peak, tl.load(uniforms + r), VOCAB, CHUNK)
    tl.store(out + r, chosen)


@jit()
def _first_equal(row: tensor, value: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr) -> tensor:
    """Return the lowest id with this logit."""
    found = tl.full((), VOCAB, tl.int32)
    for first in range(0, VOCAB, CHUNK):
        token = first + tl.arange(0, CHUNK)
        here = tl.where(chunk_of(row, first, VOCAB, CHUNK) == value, token, VOCAB)
        found = tl.minimum(found, tl.min(here, axis=0))
    return found


@jit()
def _first_beyond(
    row: tensor, temperature: tensor, peak: tensor, uniform: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> tensor:
    """Return the first token whose cumulated weight exceeds uniform * total, the last possible if none does."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, CHUNK):
        weights = chunk_weights(chunk_of(row, first, VOCAB, CHUNK), temperature, peak)
        total += tl.sum(weights, axis=0).to(tl.float64)
    target = uniform * total
    passed = tl.full((), 0.0, tl.float64)
    found = tl.full((), VOCAB, tl.int32)
    last = tl.full((), 0, tl.int32)
    for first in range(0, VOCAB, CHUNK):
        token = first + tl.arange(0, CHUNK)
        weights = chunk_weights(chunk_of(row, first, VOCAB, CHUNK), temperature, peak)
        cumulated = passed + tl.cumsum(weights.to(tl.float64), axis=0)
        possible = weights > 0
        beyond = tl.where(possible & (cumulated > target), token, VOCAB)
        found = tl.minimum(found, tl.min(beyond, axis=0))
        last = tl.maximum(last, tl.max(tl.where(possible, token, 0), axis=0))
        passed += tl.sum(weights, axis=0).to(tl.float64)
    return tl.minimum(found, last)
