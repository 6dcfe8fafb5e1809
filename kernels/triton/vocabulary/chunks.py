"""Sum the exponentials of rows over the vocabulary: a program takes a few chunks of a row, so that few rows fill a GPU.

Invariants: a row is divided into chunks of `VOCAB_CHUNK` tokens from token 0 on; a chunk's exponentials, above the peak
of the whole row, are summed in float32 in the order of one tile's reduction, the chunk sums in one float64 in their
order. Logits are read in their own dtype and widened chunk by chunk: there is no float32 copy of them. T rows, V tokens
of the vocabulary, C tokens a chunk.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import VOCAB_CHUNK, ceil_div
from samebit.kernels.triton.numeric import jit
from samebit.kernels.triton.tiles.table import power_of_two

WARPS = 4
"""Sets the threads that share a chunk, and so the order of its sum."""

PART = 8
"""Count of chunks that a program takes."""

AHEAD = tl.constexpr(8)
"""Count of chunks whose sums are read before the first is added."""


@dataclass(frozen=True)
class Parts:
    """Tells kernels how a vocabulary is divided: constants of theirs."""

    vocab: int
    chunks: int
    parts: int
    padded: int

    @classmethod
    def of(cls, vocab: int) -> "Parts":
        chunks = ceil_div(vocab, VOCAB_CHUNK)
        parts = ceil_div(chunks, PART)
        return cls(vocab, chunks, parts, power_of_two(parts))


def part_peaks(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each part of the rows ``[T, V]``, NaN if there is one: ``[T, parts]`` float32."""
    parts = Parts.of(logits.shape[1])
    peaks = torch.empty(len(logits), parts.parts, dtype=torch.float32, device=logits.device)
    _part_peaks[(len(logits), parts.parts)](
        logits, peaks, parts.vocab, parts.parts, PART, VOCAB_CHUNK, num_warps=WARPS
    )  # fmt: skip
    return peaks


def chunk_sums(logits: torch.Tensor, temperatures: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the summed exponentials of each chunk above the peaks of the rows: ``[T, chunks]`` float32."""
    parts = Parts.of(logits.shape[1])
    sums = torch.empty(len(logits), parts.chunks, dtype=torch.float32, device=logits.device)
    _chunk_sums[(len(logits), parts.parts)](
        logits, temperatures, peaks, sums, parts.vocab, parts.chunks, parts.parts, parts.padded, PART, VOCAB_CHUNK,
        num_warps=WARPS,
    )  # fmt: skip
    return sums


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
def _part_peaks(
    logits: tensor, peaks: tensor, VOCAB: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    r, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + r * VOCAB
    highest = tl.full((CHUNK,), float("-inf"), tl.float32)
    spoilt = tl.zeros((CHUNK,), tl.int32)
    for chunk in range(PART):
        values = chunk_of(row, (part * PART + chunk) * CHUNK, VOCAB, CHUNK)
        highest = tl.maximum(highest, values)
        spoilt |= (values != values).to(tl.int32)
    tl.store(peaks + r * PARTS + part, tl.where(tl.max(spoilt, axis=0) > 0, float("nan"), tl.max(highest, axis=0)))


@jit()
def row_peak(peaks: tensor, PARTS: tl.constexpr, PADDED: tl.constexpr) -> tensor:
    """Return the largest logit of a row from those of its parts; NaN if there is one."""
    part = tl.arange(0, PADDED)
    found = tl.load(peaks + part, mask=part < PARTS, other=float("-inf"))
    return tl.where(tl.max((found != found).to(tl.int32), axis=0) > 0, float("nan"), tl.max(found, axis=0))


@jit()
def _chunk_sums(
    logits: tensor, temperatures: tensor, peaks: tensor, sums: tensor, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + r)
    peak = tl.div_rn(row_peak(peaks + r * PARTS, PARTS, PADDED), temperature)
    for n in range(PART):
        chunk = tl.program_id(1) * PART + n
        weights = chunk_weights(chunk_of(logits + r * VOCAB, chunk * CHUNK, VOCAB, CHUNK), temperature, peak)
        tl.store(sums + r * CHUNKS + chunk, tl.sum(weights, axis=0), mask=chunk < CHUNKS)


@jit()
def row_total(sums: tensor, CHUNKS: tl.constexpr, AHEAD: tl.constexpr) -> tensor:
    """Return the sum of a row's chunks, float64, in their order; several are read ahead."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, CHUNKS, AHEAD):
        for n in tl.static_range(AHEAD):
            total += tl.load(sums + first + n, mask=first + n < CHUNKS, other=0.0).to(tl.float64)
    return total
