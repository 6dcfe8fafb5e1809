"""Rule out unlikely tokens by rank and by cumulated weight, for all rows that ask for it at once.

torch sorts the rows together; the weights are summed in chunks of ranks, float64, in the order of the chunks. T rows of
V tokens, C tokens a chunk.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.grids import VOCAB_CHUNK
from samebit.kernels.layout.options import Filters
from samebit.kernels.layout.transfer import sent
from samebit.kernels.triton.numeric import jit
from samebit.kernels.triton.vocabulary.chunks import AHEAD, PART, WARPS, Parts

_SORTED = 64
"""Rows that are sorted at once: that takes 24 bytes a token and row."""


def keep_likely(logits: torch.Tensor, filters: Filters) -> None:
    """Implement `Operations.keep_likely`."""
    parts = Parts.of(logits.shape[1])
    share = np.where(filters.top_p < 1.0, filters.top_p, 2.0)  # more than there is
    kept = np.where(filters.top_k > 0, np.minimum(filters.top_k, parts.vocab), parts.vocab)
    limits = np.stack([filters.temperatures, share, filters.min_p], axis=1)
    for first in range(0, len(filters.rows), _SORTED):
        some = slice(first, first + _SORTED)
        here = sent({"rows": filters.rows[some], "limits": limits[some], "kept": kept[some]}, logits.device)
        ranked = torch.sort(logits[here["rows"]], dim=1, descending=True, stable=True)
        masses = torch.empty(len(here["rows"]), parts.chunks, dtype=torch.float64, device=logits.device)
        grid = (len(masses), parts.parts)
        sizes = parts.vocab, parts.chunks, PART, VOCAB_CHUNK
        _sum_ranks[grid](ranked.values, here["limits"], here["kept"], masses, *sizes, num_warps=WARPS)
        _rule_out_unlikely[grid](
            ranked.values, ranked.indices, logits, here["rows"], here["limits"], here["kept"], masses, *sizes,
            num_warps=WARPS,
        )  # fmt: skip


@jit()
def _sum_ranks(
    values: tensor, limits: tensor, kept: tensor, masses: tensor, VOCAB: tl.constexpr, CHUNKS: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    for n in range(PART):
        chunk = tl.program_id(1) * PART + n
        weights = _ranked_weights(values + r * VOCAB, chunk * CHUNK, limits + 3 * r, kept + r, VOCAB, CHUNK)
        tl.store(masses + r * CHUNKS + chunk, tl.sum(weights, axis=0), mask=chunk < CHUNKS)


@jit()
def _rule_out_unlikely(
    values: tensor, order: tensor, logits: tensor, rows: tensor, limits: tensor, kept: tensor, masses: tensor,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(rows + r) * VOCAB
    top_p, min_p = tl.load(limits + 3 * r + 1), tl.load(limits + 3 * r + 2)
    total, passed = _masses_before(masses + r * CHUNKS, tl.program_id(1) * PART, CHUNKS, AHEAD)
    bound = top_p * total
    for n in range(PART):
        first = (tl.program_id(1) * PART + n) * CHUNK
        rank = first + tl.arange(0, CHUNK)
        weights = _ranked_weights(values + r * VOCAB, first, limits + 3 * r, kept + r, VOCAB, CHUNK)
        mass = passed + tl.cumsum(weights, axis=0)
        likely = (rank < tl.load(kept + r)) & (weights >= min_p) & (mass - weights < bound)
        token = tl.load(order + r * VOCAB + rank, mask=rank < VOCAB, other=0)
        tl.store(row + token, float("-inf"), mask=(rank < VOCAB) & (rank > 0) & (likely == 0))
        passed += tl.sum(weights, axis=0)


@jit()
def _masses_before(masses: tensor, before: tensor, CHUNKS: tl.constexpr, AHEAD: tl.constexpr) -> Any:
    """Return the masses of all chunks, and of those before one, each summed in order."""
    total, passed = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for first in range(0, CHUNKS, AHEAD):
        for n in tl.static_range(AHEAD):
            passed = tl.where(first + n == before, total, passed)
            total += tl.load(masses + first + n, mask=first + n < CHUNKS, other=0.0)
    return total, passed


@jit()
def _ranked_weights(
    values: tensor, first: tensor, limits: tensor, kept: tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> tensor:
    """Return exp((logit - best) / temperature), float64, of ranks from ``first`` on; 0 from rank ``kept`` on, and below
    min-p."""
    rank = first + tl.arange(0, CHUNK)
    real = (rank < VOCAB) & (rank < tl.load(kept))
    logits = tl.load(values + rank, mask=real, other=float("-inf")).to(tl.float64)
    weights = tl.exp((logits - tl.load(values).to(tl.float64)) / tl.load(limits))
    return tl.where(real & (weights >= tl.load(limits + 2)), weights, 0.0)
