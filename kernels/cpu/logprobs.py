"""Log-softmax over the vocabulary on the CPU, in a fixed order, and sampling from it.

Invariants: a row is divided into chunks of `VOCAB_CHUNK` tokens from token 0 on; each chunk's
exponentials are summed in sixteen float32 lanes, the chunk sums in one float64. `log_total` is the only
place where a normaliser is computed: sampler and trainer both read it.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from .jit import RowKernel
from .numeric import LANES, exp

VOCAB_CHUNK = 1024

_ZERO = np.float32(0.0)
_LOWEST = np.float32(-np.inf)


@njit(inline="always")
def _row_max(logits: Any, lanes: Any) -> Any:
    vocab = len(logits)
    for lane in range(LANES):
        lanes[lane] = _LOWEST
    whole = vocab // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            x = logits[i + lane]
            lanes[lane] = x if x > lanes[lane] else lanes[lane]
    for i in range(whole, vocab):
        lanes[0] = logits[i] if logits[i] > lanes[0] else lanes[0]
    peak = lanes[0]
    for lane in range(1, LANES):
        peak = lanes[lane] if lanes[lane] > peak else peak
    return peak


@njit(inline="always")
def _chunk_total(logits: Any, temperature: Any, peak: Any, lanes: Any) -> Any:
    """Sum of exp(logits / temperature - peak) over one chunk."""
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = len(logits) // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + _weight(logits[i + lane], temperature, peak)
    for i in range(whole, len(logits)):
        lanes[i - whole] = lanes[i - whole] + _weight(logits[i], temperature, peak)
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total


@njit(inline="always")
def _weight(logit: Any, temperature: Any, peak: Any) -> Any:
    """exp(logit / temperature - peak); exactly 0 for a token that was ruled out (-inf)."""
    value = exp(logit / temperature - peak)
    return _ZERO if logit == _LOWEST else value


@njit(inline="always")
def _log_total(logits: Any, temperature: Any, lanes: Any) -> Any:
    """(peak, log of the summed exponentials above it) of a row at a temperature; both float32."""
    peak = _row_max(logits, lanes) / temperature
    total = 0.0
    for first in range(0, len(logits), VOCAB_CHUNK):
        total += np.float64(_chunk_total(logits[first : first + VOCAB_CHUNK], temperature, peak, lanes))
    return peak, np.float32(np.log(total))


def _gather(logits: Any, tokens: Any, temperatures: Any, out: Any, peaks: Any, log_totals: Any) -> None:
    for row in prange(logits.shape[0]):
        lanes = np.empty(LANES, np.float32)
        peak, log_total = _log_total(logits[row], temperatures[row], lanes)
        peaks[row] = peak
        log_totals[row] = log_total
        out[row] = (logits[row, tokens[row]] / temperatures[row] - peak) - log_total


def _gather_backward(
    logits: Any, tokens: Any, temperatures: Any, peaks: Any, log_totals: Any, grad: Any, out: Any
) -> None:
    for row in prange(logits.shape[0]):
        scale = grad[row] / temperatures[row]
        shift = peaks[row] + log_totals[row]
        row_in, row_out, temperature = logits[row], out[row], temperatures[row]
        for i in range(len(row_in)):
            row_out[i] = -scale * exp(row_in[i] / temperature - shift)
        if 0 <= tokens[row] < len(row_in):
            out[row, tokens[row]] += scale


def _all(logits: Any, temperatures: Any, out: Any) -> None:
    for row in prange(logits.shape[0]):
        lanes = np.empty(LANES, np.float32)
        peak, log_total = _log_total(logits[row], temperatures[row], lanes)
        row_in, row_out, temperature = logits[row], out[row], temperatures[row]
        for i in range(len(row_in)):
            row_out[i] = (row_in[i] / temperature - peak) - log_total


@njit(inline="always")
def _chunk_entropy(logits: Any, temperature: Any, peak: Any, log_total: Any, lanes: Any) -> Any:
    """Sum of -p log p over one chunk."""
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = len(logits) // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + _surprise(logits[i + lane], temperature, peak, log_total)
    for i in range(whole, len(logits)):
        lanes[i - whole] = lanes[i - whole] + _surprise(logits[i], temperature, peak, log_total)
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total


@njit(inline="always")
def _surprise(logit: Any, temperature: Any, peak: Any, log_total: Any) -> Any:
    """-p log p of one token; exactly 0 for one that was ruled out (-inf)."""
    logprob = (logit / temperature - peak) - log_total
    value = -logprob * exp(logprob)
    return _ZERO if logit == _LOWEST else value


def _entropy(logits: Any, temperatures: Any, out: Any, peaks: Any, log_totals: Any) -> None:
    for row in prange(logits.shape[0]):
        lanes = np.empty(LANES, np.float32)
        row_in, temperature = logits[row], temperatures[row]
        peak, log_total = _log_total(row_in, temperature, lanes)
        total = 0.0
        for first in range(0, len(row_in), VOCAB_CHUNK):
            chunk = row_in[first : first + VOCAB_CHUNK]
            total += np.float64(_chunk_entropy(chunk, temperature, peak, log_total, lanes))
        peaks[row] = peak
        log_totals[row] = log_total
        out[row] = np.float32(total)


def _entropy_backward(
    logits: Any, temperatures: Any, entropies: Any, peaks: Any, log_totals: Any, grad: Any, out: Any
) -> None:
    for row in prange(logits.shape[0]):
        scale = -grad[row] / temperatures[row]
        row_in, row_out, temperature, entropy = logits[row], out[row], temperatures[row], entropies[row]
        for i in range(len(row_in)):
            logprob = (row_in[i] / temperature - peaks[row]) - log_totals[row]
            value = scale * exp(logprob) * (logprob + entropy)
            row_out[i] = _ZERO if row_in[i] == _LOWEST else value


def _draw(logits: Any, temperatures: Any, uniforms: Any, out: Any) -> None:
    """Inverse-CDF sampling: the first token whose cumulated weight exceeds uniform * total; greedy at 0.

    Greedy ties go to the lowest id. A row with NaN or with every token ruled out gives -1.
    """
    for row in prange(logits.shape[0]):
        lanes = np.empty(LANES, np.float32)
        out[row] = -1
        if temperatures[row] == _ZERO:
            out[row] = _likeliest(logits[row], lanes)
        else:
            out[row] = _draw_row(logits[row], temperatures[row], uniforms[row], lanes)


@njit(inline="always")
def _likeliest(logits: Any, lanes: Any) -> int:
    best = _row_max(logits, lanes)
    chosen = -1
    for i in range(len(logits) - 1, -1, -1):
        if np.isnan(logits[i]):
            return -1
        if logits[i] == best and best > _LOWEST:
            chosen = i
    return chosen


@njit(inline="always")
def _draw_row(logits: Any, temperature: Any, uniform: float, lanes: Any) -> int:
    vocab = len(logits)
    chunks = (vocab + VOCAB_CHUNK - 1) // VOCAB_CHUNK
    totals = np.empty(chunks, np.float32)
    peak = _row_max(logits, lanes) / temperature
    total = 0.0
    for c in range(chunks):
        totals[c] = _chunk_total(logits[c * VOCAB_CHUNK : (c + 1) * VOCAB_CHUNK], temperature, peak, lanes)
        total += np.float64(totals[c])
    if not total > 0.0:
        return -1
    target = uniform * total
    c = 0
    passed = 0.0
    while c < chunks - 1 and passed + np.float64(totals[c]) <= target:
        passed += np.float64(totals[c])
        c += 1
    chosen = -1
    weights = np.empty(VOCAB_CHUNK, np.float32)
    for first in range(c * VOCAB_CHUNK, vocab, VOCAB_CHUNK):
        chunk = logits[first : first + VOCAB_CHUNK]
        for i in range(len(chunk)):
            weights[i] = _weight(chunk[i], temperature, peak)
        for i in range(len(chunk)):
            if weights[i] > _ZERO:
                chosen = first + i
                passed += np.float64(weights[i])
                if passed > target:
                    return chosen
    return chosen


gather = RowKernel(_gather)
gather_backward = RowKernel(_gather_backward)
log_softmax = RowKernel(_all)
entropy = RowKernel(_entropy)
entropy_backward = RowKernel(_entropy_backward)
draw = RowKernel(_draw)
