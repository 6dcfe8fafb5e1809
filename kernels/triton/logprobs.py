"""Compute log-softmax and entropy over the vocabulary: one program a row, chunk after chunk.

Invariants: a row is divided into chunks of `VOCAB_CHUNK` tokens from token 0 on; a chunk's exponentials are summed in
float32 in the order of one tile's reduction, the chunk sums in one float64. `_log_total` is the only place where a
normaliser is computed: sampler and trainer both read it. Logits are read in their own dtype and widened chunk by
chunk: there is no float32 copy of them. T rows, V tokens of the vocabulary, C tokens a chunk.
"""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import VOCAB_CHUNK
from samebit.kernels.layout.options import Reduced
from samebit.kernels.triton.numeric import aligned, jit

_WARPS = 4


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.log_softmax`."""
    logits = aligned(logits)
    rows, vocab = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if rows:
        _all_tokens[(rows,)](logits, aligned(temperatures), out, vocab, VOCAB_CHUNK, num_warps=_WARPS)
    return out


def gather(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Implement `Operations.gather`."""
    logits, tokens, temperatures = aligned(logits), aligned(tokens), aligned(temperatures)
    rows, vocab = logits.shape
    out, peaks, log_totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _gather[(rows,)](logits, tokens, temperatures, out, peaks, log_totals, vocab, VOCAB_CHUNK, num_warps=_WARPS)
    return out, peaks, log_totals


def gather_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Implement `Operations.gather_gradient`."""
    out, logits = torch.empty_like(logits, memory_format=torch.contiguous_format), aligned(logits)
    if len(logits):
        _gather_gradients[(len(logits),)](
            logits, aligned(tokens), aligned(temperatures), aligned(peaks), aligned(log_totals), aligned(grad.float()),
            out, logits.shape[1], VOCAB_CHUNK, num_warps=_WARPS,
        )  # fmt: skip
    return out


def entropies(logits: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Implement `Operations.entropies`."""
    logits, temperatures = aligned(logits), aligned(temperatures)
    rows, vocab = logits.shape
    out, peaks, log_totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _entropy[(rows,)](logits, temperatures, out, peaks, log_totals, vocab, VOCAB_CHUNK, num_warps=_WARPS)
    return out, peaks, log_totals


def entropy_gradient(
    logits: torch.Tensor, temperatures: torch.Tensor, entropies: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Implement `Operations.entropy_gradient`."""
    out, logits = torch.empty_like(logits, memory_format=torch.contiguous_format), aligned(logits)
    if len(logits):
        _entropy_gradients[(len(logits),)](
            logits, aligned(temperatures), aligned(entropies), aligned(peaks), aligned(log_totals),
            aligned(grad.float()), out, logits.shape[1], VOCAB_CHUNK, num_warps=_WARPS,
        )  # fmt: skip
    return out


@jit()
def chunk_of(row: tensor, first: int, VOCAB: tl.constexpr, CHUNK: tl.constexpr) -> tensor:
    """Load the chunk from ``first`` on as float32; -inf beyond the vocabulary, and for a token ruled out.

    A thread takes four tokens side by side, as many as a word of float32 holds, also where they are narrower: which
    thread has which token is the order in which a chunk is summed.
    """
    token = tl.max_contiguous(first + tl.arange(0, CHUNK), 4)
    return tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)


@jit()
def chunk_weights(logits: tensor, temperature: tensor, peak: tensor) -> tensor:
    """Return exp(logits / temperature - peak); exactly 0 for -inf."""
    return tl.where(logits == float("-inf"), 0.0, tl.exp(tl.div_rn(logits, temperature) - peak))


@jit()
def row_peak(row: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr) -> tensor:
    """Return the largest logit; NaN if there is one."""
    highest = tl.full((CHUNK,), float("-inf"), tl.float32)
    spoilt = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, VOCAB, CHUNK):
        logits = chunk_of(row, first, VOCAB, CHUNK)
        highest = tl.maximum(highest, logits)
        spoilt |= (logits != logits).to(tl.int32)
    return tl.where(tl.max(spoilt, axis=0) > 0, float("nan"), tl.max(highest, axis=0))


@jit()
def _log_total(row: tensor, temperature: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr) -> tensor:
    """Return (peak, log of the summed exponentials above it) of a row at a temperature, both float32."""
    peak = tl.div_rn(row_peak(row, VOCAB, CHUNK), temperature)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, CHUNK):
        weights = chunk_weights(chunk_of(row, first, VOCAB, CHUNK), temperature, peak)
        total += tl.sum(weights, axis=0).to(tl.float64)
    return peak, tl.log(total).to(tl.float32)


@jit()
def _gather(
    logits: tensor, tokens: tensor, temperatures: tensor, out: tensor, peaks: tensor, log_totals: tensor,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * VOCAB
    temperature = tl.load(temperatures + r)
    peak, log_total = _log_total(row, temperature, VOCAB, CHUNK)
    chosen = tl.load(row + tl.load(tokens + r)).to(tl.float32)
    tl.store(peaks + r, peak)
    tl.store(log_totals + r, log_total)
    tl.store(out + r, (tl.div_rn(chosen, temperature) - peak) - log_total)


@jit()
def _gather_gradients(
    logits: tensor, tokens: tensor, temperatures: tensor, peaks: tensor, log_totals: tensor, grad: tensor, out: tensor,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * VOCAB
    temperature, chosen = tl.load(temperatures + r), tl.load(tokens + r)
    scale = tl.load(grad + r) / temperature
    peak, log_total = tl.load(peaks + r), tl.load(log_totals + r)
    for first in range(0, VOCAB, CHUNK):
        token = first + tl.arange(0, CHUNK)
        weights = chunk_weights(chunk_of(row, first, VOCAB, CHUNK), temperature, peak + log_total)
        value = scale * (tl.where(token == chosen, 1.0, 0.0) - weights)
        tl.store(out + r.to(tl.int64) * VOCAB + token, value.to(out.dtype.element_ty), mask=token < VOCAB)


@jit()
def _all_tokens(logits: tensor, temperatures: tensor, out: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr) -> None:
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * VOCAB
    temperature = tl.load(temperatures + r)
    peak, log_total = _log_total(row, temperature, VOCAB, CHUNK)
    for first in range(0, VOCAB, CHUNK):
        token = first + tl.arange(0, CHUNK)
        value = (tl.div_rn(chunk_of(row, first, VOCAB, CHUNK), temperature) - peak) - log_total
        tl.store(out + r.to(tl.int64) * VOCAB + token, value, mask=token < VOCAB)


@jit()
def _entropy(
    logits: tensor, temperatures: tensor, out: tensor, peaks: tensor, log_totals: tensor, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * VOCAB
    temperature = tl.load(temperatures + r)
    peak, log_total = _log_total(row, temperature, VOCAB, CHUNK)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, CHUNK):
        values = chunk_of(row, first, VOCAB, CHUNK)
        logprobs = (tl.div_rn(values, temperature) - peak) - log_total
        surprise = tl.where(values == float("-inf"), 0.0, -logprobs * tl.exp(logprobs))
        total += tl.sum(surprise, axis=0).to(tl.float64)
    tl.store(peaks + r, peak)
    tl.store(log_totals + r, log_total)
    tl.store(out + r, total.to(tl.float32))


@jit()
def _entropy_gradients(
    logits: tensor, temperatures: tensor, entropies: tensor, peaks: tensor, log_totals: tensor, grad: tensor,
    out: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * VOCAB
    temperature, entropy = tl.load(temperatures + r), tl.load(entropies + r)
    scale = -tl.load(grad + r) / temperature
    peak, log_total = tl.load(peaks + r), tl.load(log_totals + r)
    for first in range(0, VOCAB, CHUNK):
        token = first + tl.arange(0, CHUNK)
        values = chunk_of(row, first, VOCAB, CHUNK)
        logprobs = (tl.div_rn(values, temperature) - peak) - log_total
        slope = tl.where(values == float("-inf"), 0.0, scale * tl.exp(logprobs) * (logprobs + entropy))
        tl.store(out + r.to(tl.int64) * VOCAB + token, slope.to(out.dtype.element_ty), mask=token < VOCAB)
