"""Draw counter-based random numbers, and tokens by inverse CDF, on the CPU. T rows, V tokens of the vocabulary."""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu import philox
from samebit.kernels.cpu.base.jit import SharedKernel
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.logprobs import chunks_of, logprob, normaliser, row_max, weight
from samebit.kernels.layout.grids import LANES, VOCAB_CHUNK
from samebit.kernels.layout.options import Filters

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)


def _draw(threads: int, logits: Any, temperatures: Any, uniforms: Any, out: Any) -> None:
    """Choose the first token whose cumulated weight exceeds uniform * total, in the first chunk whose sum does; greedy
    at 0. What that sum was rounded up by is the chunk's likeliest token's.

    Greedy ties go to the lowest id. A row with NaN or with every token ruled out gives -1.
    """
    share_out(_draw_row, logits.shape[0], threads, (logits, temperatures, uniforms, out))


@kernel_part
def _draw_row(row: int, logits: Any, temperatures: Any, uniforms: Any, out: Any) -> None:
    row_in, temperature = logits[row], temperatures[row]
    lanes, totals = np.empty(LANES, np.float32), np.empty(chunks_of(row_in), np.float32)
    out[row] = -1
    if temperature == _ZERO:
        out[row] = _likeliest(row_in, lanes)
    else:
        peak, total = normaliser(row_in, temperature, lanes, totals)
        out[row] = _drawn(row_in, temperature, uniforms[row], peak, total, totals)


def _sample(threads: int, logits: Any, temperatures: Any, keys: Any, counters: Any, tokens: Any, found: Any) -> None:
    """Draw as `_draw` does, by numbers of `philox`, and report as `logprobs.gather`: ``found`` ``[3, T]``."""
    share_out(_sample_row, logits.shape[0], threads, (logits, temperatures, keys, counters, tokens, found))


@kernel_part
def _sample_row(row: int, logits: Any, temperatures: Any, keys: Any, counters: Any, tokens: Any, found: Any) -> None:
    row_in, temperature = logits[row], temperatures[row]
    lanes, totals = np.empty(LANES, np.float32), np.empty(chunks_of(row_in), np.float32)
    report_at = _ONE if temperature == _ZERO else temperature
    peak, total = normaliser(row_in, report_at, lanes, totals)
    if temperature == _ZERO:
        chosen = _likeliest(row_in, lanes)
    else:
        uniform = philox.number(counters, keys, row)
        chosen = _drawn(row_in, temperature, uniform, peak, total, totals)
    logit = row_in[max(chosen, 0)]
    tokens[row], found[0, row] = max(chosen, 0), chosen
    found[1, row] = found[2, row] = logprob(logit, report_at, peak, np.float32(np.log(total)))
    if report_at != _ONE:
        peak, total = normaliser(row_in, _ONE, lanes, totals)
        found[2, row] = logprob(logit, _ONE, peak, np.float32(np.log(total)))


@inlined_part
def _likeliest(logits: Any, lanes: Any) -> int:
    best = row_max(logits, lanes)
    chosen = -1
    for i in range(len(logits) - 1, -1, -1):
        if np.isnan(logits[i]):
            return -1
        if logits[i] == best and best > _LOWEST:
            chosen = i
    return chosen


@inlined_part
def _drawn(logits: Any, temperature: Any, uniform: float, peak: Any, total: float, totals: Any) -> int:
    chunks = len(totals)
    if not total > 0.0:
        return -1
    target = uniform * total
    c = 0
    passed = 0.0
    while c < chunks - 1 and passed + np.float64(totals[c]) <= target:
        passed += np.float64(totals[c])
        c += 1
    first = c * VOCAB_CHUNK
    chunk = logits[first : first + VOCAB_CHUNK]
    weights = np.empty(VOCAB_CHUNK, np.float32)
    for i in range(len(chunk)):
        weights[i] = weight(chunk[i], temperature, peak)
    likeliest = 0
    for i in range(len(chunk)):
        passed += np.float64(weights[i])
        if passed > target:
            return first + i
        likeliest = i if weights[i] > weights[likeliest] else likeliest
    return first + likeliest


_draw_rows = SharedKernel(_draw)
_sample_rows = SharedKernel(_sample)


def uniforms(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.uniforms`."""
    words, numbers = np.empty((len(counters), 4), np.uint32), np.empty(len(counters))
    philox.blocks(words.size, counters.numpy(), keys.numpy(), words, numbers)
    return torch.from_numpy(numbers)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.draw`."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device="cpu")
    _draw_rows(logits.numel(), logits.numpy(), temperatures.numpy(), uniform.numpy(), out.numpy())
    return out


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, counters: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `dispatch.WholeCalls.sample`."""
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device="cpu")
    found = torch.empty(3, rows, dtype=torch.float64, device="cpu")
    _sample_rows(
        logits.numel(), logits.numpy(), temperatures.numpy(), keys.numpy(), counters.numpy(), tokens.numpy(),
        found.numpy(),
    )  # fmt: skip
    return tokens, found


def keep_likely(logits: torch.Tensor, filters: Filters) -> None:
    """Implement `Operations.keep_likely`."""
    each = zip(filters.rows, filters.temperatures, filters.top_k, filters.top_p, filters.min_p, strict=True)
    for row, temperature, top_k, top_p, min_p in each:
        _keep_likely(logits[int(row)], float(temperature), int(top_k), float(top_p), float(min_p))


def _keep_likely(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    order = torch.sort(row, descending=True, stable=True).indices
    scaled = row[order].double() / temperature
    keep = torch.ones(len(row), dtype=torch.bool, device="cpu")
    if top_k > 0:
        keep[top_k:] = False
    weights = (scaled - scaled[0]).exp()
    keep &= weights >= min_p  # the likeliest has the weight 1
    keep[0] = True
    if top_p < 1.0:
        weights = torch.where(keep, weights, 0.0)
        mass = weights.cumsum(0)
        keep &= mass - weights < top_p * mass[-1]
    row[order[~keep]] = float("-inf")
