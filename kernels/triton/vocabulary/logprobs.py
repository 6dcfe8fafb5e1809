"""Compute log-softmax and entropy over the vocabulary, from one normaliser.

Invariant: `_normalise` is the only place where a normaliser is computed: sampler and trainer both read it, and `chunks`
says in which order it is summed. T rows, V tokens of the vocabulary, C tokens a chunk.
"""

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.decays import GONE
from samebit.kernels.layout.grids import VOCAB_CHUNK
from samebit.kernels.layout.options import Reduced
from samebit.kernels.triton.numeric import aligned, jit
from samebit.kernels.triton.vocabulary.chunks import (
    AHEAD,
    PART,
    WARPS,
    Parts,
    chunk_of,
    chunk_sums,
    part_peaks,
    row_peak,
    row_total,
)

_UNLIKELY = tl.constexpr(-87.0)
"""A token of a lower log-probability has no part in the entropy, as on the CPU: -p log p is below 1.5e-36, and where
logit / temperature is -inf it would be NaN."""

_GONE = tl.constexpr(GONE)
"""A token of a lower log-probability has a gradient of 0, as on the CPU."""


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.log_softmax`."""
    logits, temperatures = aligned(logits), aligned(temperatures)
    rows, vocab = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if rows:
        _, peaks, log_totals = _normalised(logits, None, temperatures)
        _all_tokens[(rows, Parts.of(vocab).parts)](
            logits, temperatures, peaks, log_totals, out, vocab, PART, VOCAB_CHUNK, num_warps=WARPS
        )  # fmt: skip
    return out


def gather(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Implement `Operations.gather`."""
    return _normalised(aligned(logits), aligned(tokens), aligned(temperatures))


def _normalised(logits: torch.Tensor, tokens: torch.Tensor | None, temperatures: torch.Tensor) -> Reduced:
    """Return the log-probabilities of ``tokens``, if any are given; the peaks of the rows, and the logarithms of the
    summed exponentials above them, float32."""
    rows = len(logits)
    out, peaks, log_totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        parts = Parts.of(logits.shape[1])
        of_parts = part_peaks(logits)
        _normalise[(rows,)](
            logits, out if tokens is None else tokens, temperatures, of_parts,
            chunk_sums(logits, temperatures, of_parts), out, peaks, log_totals, parts.vocab, parts.chunks, parts.parts,
            parts.padded, tokens is not None, num_warps=1,
        )  # fmt: skip
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
            out, logits.shape[1], VOCAB_CHUNK, num_warps=WARPS,
        )  # fmt: skip
    return out


def entropies(logits: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Implement `Operations.entropies`."""
    logits, temperatures = aligned(logits), aligned(temperatures)
    rows, vocab = logits.shape
    out, peaks, log_totals = _normalised(logits, None, temperatures)
    if rows:
        _entropy[(rows,)](logits, temperatures, peaks, log_totals, out, vocab, VOCAB_CHUNK, num_warps=WARPS)
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
            aligned(grad.float()), out, logits.shape[1], VOCAB_CHUNK, num_warps=WARPS,
        )  # fmt: skip
    return out


@jit()
def _normalise(
    logits: tensor, tokens: tensor, temperatures: tensor, of_parts: tensor, sums: tensor, out: tensor, peaks: tensor,
    log_totals: tensor, VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    GATHERED: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + r)
    peak = tl.div_rn(row_peak(of_parts + r * PARTS, PARTS, PADDED), temperature)
    log_total = tl.log(row_total(sums + r * CHUNKS, CHUNKS, AHEAD)).to(tl.float32)
    tl.store(peaks + r, peak)
    tl.store(log_totals + r, log_total)
    if GATHERED:
        chosen = tl.load(logits + r * VOCAB + tl.load(tokens + r)).to(tl.float32)
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
        logprobs = (tl.div_rn(chunk_of(row, first, VOCAB, CHUNK), temperature) - peak) - log_total
        value = scale * (tl.where(token == chosen, 1.0, 0.0) - _probabilities(logprobs))
        tl.store(out + r.to(tl.int64) * VOCAB + token, value.to(out.dtype.element_ty), mask=token < VOCAB)


@jit()
def _probabilities(logprobs: tensor) -> tensor:
    """Return what gradients take for e**logprobs: 0 below `GONE`. NaN stays NaN."""
    return tl.where(logprobs < _GONE, 0.0, tl.exp(logprobs))


@jit()
def _all_tokens(
    logits: tensor, temperatures: tensor, peaks: tensor, log_totals: tensor, out: tensor, VOCAB: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    temperature, peak, log_total = tl.load(temperatures + r), tl.load(peaks + r), tl.load(log_totals + r)
    for n in range(PART):
        first = (tl.program_id(1) * PART + n) * CHUNK
        token = first + tl.arange(0, CHUNK)
        value = (tl.div_rn(chunk_of(logits + r * VOCAB, first, VOCAB, CHUNK), temperature) - peak) - log_total
        tl.store(out + r * VOCAB + token, value, mask=token < VOCAB)


@jit()
def _ruled_out(logits: tensor, logprobs: tensor) -> tensor:
    """Tell which tokens have no part in the entropy: those of logit -inf, also in a row of no other, and unlikely
    ones. NaN has one."""
    return (logits == float("-inf")) | (logprobs < _UNLIKELY)


@jit()
def _entropy(
    logits: tensor, temperatures: tensor, peaks: tensor, log_totals: tensor, out: tensor, VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    temperature, peak, log_total = tl.load(temperatures + r), tl.load(peaks + r), tl.load(log_totals + r)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, VOCAB, CHUNK):
        values = chunk_of(logits + r * VOCAB, first, VOCAB, CHUNK)
        logprobs = (tl.div_rn(values, temperature) - peak) - log_total
        surprise = tl.where(_ruled_out(values, logprobs), 0.0, -logprobs * tl.exp(logprobs))
        total += tl.sum(surprise, axis=0).to(tl.float64)
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
        slope = tl.where(_ruled_out(values, logprobs), 0.0, scale * _probabilities(logprobs) * (logprobs + entropy))
        tl.store(out + r.to(tl.int64) * VOCAB + token, slope.to(out.dtype.element_ty), mask=token < VOCAB)
