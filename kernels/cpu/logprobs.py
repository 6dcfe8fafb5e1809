"""Compute log-softmax and entropy over the vocabulary on the CPU, in a fixed order.

Invariants: a row is divided into chunks of `VOCAB_CHUNK` tokens from token 0 on; each chunk's
exponentials are summed in sixteen float32 lanes, the chunk sums in one float64. `normaliser` is the only
place where one is computed: draws, sampler and trainer all read it. Logits in bfloat16 are widened as they are read, so
that nothing depends on where that is done; gradients are rounded once. T rows, V tokens of the vocabulary.
"""

from typing import Any

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel, array
from samebit.kernels.cpu.base.numeric import EXP_LOWEST, exp, narrow, share_left, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.device import DTYPES
from samebit.kernels.layout.grids import LANES, VOCAB_CHUNK
from samebit.kernels.layout.options import Reduced

_ZERO = np.float32(0.0)
_LOWEST = np.float32(-np.inf)


@inlined_part
def row_max(logits: Any, lanes: Any) -> Any:
    """Return the largest logit of a row."""
    vocab = len(logits)
    for lane in range(LANES):
        lanes[lane] = _LOWEST
    whole = vocab // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            x = widen(logits[i + lane])
            lanes[lane] = x if x > lanes[lane] else lanes[lane]
    for i in range(whole, vocab):
        x = widen(logits[i])
        lanes[0] = x if x > lanes[0] else lanes[0]
    peak = lanes[0]
    for lane in range(1, LANES):
        peak = lanes[lane] if lanes[lane] > peak else peak
    return peak


@inlined_part
def chunk_total(logits: Any, temperature: Any, peak: Any, lanes: Any) -> Any:
    """Sum exp(logits / temperature - peak) over one chunk."""
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = len(logits) // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + weight(widen(logits[i + lane]), temperature, peak)
    for i in range(whole, len(logits)):
        lanes[i - whole] = lanes[i - whole] + weight(widen(logits[i]), temperature, peak)
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total


@inlined_part
def weight(logit: Any, temperature: Any, peak: Any) -> Any:
    """Return exp(logit / temperature - peak); exactly 0 for a token that was ruled out (-inf)."""
    value = exp(logit / temperature - peak)
    return _ZERO if logit == _LOWEST else value


@inlined_part
def normaliser(logits: Any, temperature: Any, lanes: Any, totals: Any) -> Any:
    """Return (peak, sum of the exponentials above it) of a row at a temperature; ``totals``: of each chunk."""
    peak = row_max(logits, lanes) / temperature
    total = 0.0
    for chunk in range(len(totals)):
        first = chunk * VOCAB_CHUNK
        totals[chunk] = chunk_total(logits[first : first + VOCAB_CHUNK], temperature, peak, lanes)
        total += np.float64(totals[chunk])
    return peak, total


@inlined_part
def chunks_of(logits: Any) -> int:
    """Return in how many chunks a row is summed."""
    return (len(logits) + VOCAB_CHUNK - 1) // VOCAB_CHUNK


@inlined_part
def _log_total(logits: Any, temperature: Any, lanes: Any) -> Any:
    """Return (peak, log of the summed exponentials above it) of a row at a temperature; both float32."""
    peak, total = normaliser(logits, temperature, lanes, np.empty(chunks_of(logits), np.float32))
    return peak, np.float32(np.log(total))


@inlined_part
def logprob(logit: Any, temperature: Any, peak: Any, log_total: Any) -> Any:
    """Return the log-probability of a token of a row with this normaliser."""
    return (logit / temperature - peak) - log_total


def _gather(threads: int, logits: Any, tokens: Any, temperatures: Any, out: Any, peaks: Any, log_totals: Any) -> None:
    share_out(_gather_row, logits.shape[0], threads, (logits, tokens, temperatures, out, peaks, log_totals))


@kernel_part
def _gather_row(row: int, logits: Any, tokens: Any, temperatures: Any, out: Any, peaks: Any, log_totals: Any) -> None:
    lanes = np.empty(LANES, np.float32)
    peak, log_total = _log_total(logits[row], temperatures[row], lanes)
    peaks[row] = peak
    log_totals[row] = log_total
    out[row] = logprob(widen(logits[row, tokens[row]]), temperatures[row], peak, log_total)


def _gather_backward(
    threads: int, logits: Any, tokens: Any, temperatures: Any, peaks: Any, log_totals: Any, grad: Any, out: Any,
) -> None:  # fmt: skip
    share_out(
        _gather_backward_row, logits.shape[0], threads,
        (logits, tokens, temperatures, peaks, log_totals, grad, out),
    )  # fmt: skip


@kernel_part
def _gather_backward_row(
    row: int, logits: Any, tokens: Any, temperatures: Any, peaks: Any, log_totals: Any, grad: Any, out: Any,
) -> None:  # fmt: skip
    scale = grad[row] / temperatures[row]
    peak, log_total = peaks[row], log_totals[row]
    row_in, row_out, temperature = logits[row], out[row], temperatures[row]
    for i in range(len(row_in)):
        row_out[i] = narrow(-scale * _probability(row_in[i], temperature, peak, log_total), row_out[i])
    token = tokens[row]
    if 0 <= token < len(row_in):
        share = -scale * _probability(row_in[token], temperature, peak, log_total)
        row_out[token] = narrow(share + scale, row_out[token])


@inlined_part
def _probability(logit: Any, temperature: Any, peak: Any, log_total: Any) -> Any:
    """Return the probability of a token as the forward has it, 0 below e**-60: a gradient of it would be subnormal.

    The sum of peak and log_total would be rounded, by as much for all tokens of a row: at low temperatures, where the
    peak is far from 0, by more than a gradient may be off.
    """
    return share_left(logprob(widen(logit), temperature, peak, log_total))


def _all(threads: int, logits: Any, temperatures: Any, out: Any) -> None:
    share_out(_all_row, logits.shape[0], threads, (logits, temperatures, out))


@kernel_part
def _all_row(row: int, logits: Any, temperatures: Any, out: Any) -> None:
    lanes = np.empty(LANES, np.float32)
    peak, log_total = _log_total(logits[row], temperatures[row], lanes)
    row_in, row_out, temperature = logits[row], out[row], temperatures[row]
    for i in range(len(row_in)):
        row_out[i] = logprob(widen(row_in[i]), temperature, peak, log_total)


@inlined_part
def _chunk_entropy(logits: Any, temperature: Any, peak: Any, log_total: Any, lanes: Any) -> Any:
    """Sum -p log p over one chunk."""
    for lane in range(LANES):
        lanes[lane] = _ZERO
    whole = len(logits) // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = lanes[lane] + _surprise(widen(logits[i + lane]), temperature, peak, log_total)
    for i in range(whole, len(logits)):
        lanes[i - whole] = lanes[i - whole] + _surprise(widen(logits[i]), temperature, peak, log_total)
    total = _ZERO
    for lane in range(LANES):
        total = total + lanes[lane]
    return total


@inlined_part
def _surprise(logit: Any, temperature: Any, peak: Any, log_total: Any) -> Any:
    """Return -p log p of one token."""
    logprob = (logit / temperature - peak) - log_total
    value = -logprob * exp(logprob)
    return _ZERO if _ruled_out(logit, logprob) else value


@inlined_part
def _ruled_out(logit: Any, logprob: Any) -> Any:
    """Tell whether a token has no part in the entropy: its logit is -inf, or so low, as the lowest finite one, that
    `exp` falls no further, and the true -p log p is below 1.5e-36."""
    return (logit == _LOWEST) | (logprob < EXP_LOWEST)


def _entropy(threads: int, logits: Any, temperatures: Any, out: Any, peaks: Any, log_totals: Any) -> None:
    share_out(_entropy_row, logits.shape[0], threads, (logits, temperatures, out, peaks, log_totals))


@kernel_part
def _entropy_row(row: int, logits: Any, temperatures: Any, out: Any, peaks: Any, log_totals: Any) -> None:
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
    threads: int, logits: Any, temperatures: Any, entropies: Any, peaks: Any, log_totals: Any, grad: Any, out: Any,
) -> None:  # fmt: skip
    share_out(
        _entropy_backward_row, logits.shape[0], threads,
        (logits, temperatures, entropies, peaks, log_totals, grad, out),
    )  # fmt: skip


@kernel_part
def _entropy_backward_row(
    row: int, logits: Any, temperatures: Any, entropies: Any, peaks: Any, log_totals: Any, grad: Any, out: Any,
) -> None:  # fmt: skip
    scale = -grad[row] / temperatures[row]
    row_in, row_out, temperature, entropy = logits[row], out[row], temperatures[row], entropies[row]
    for i in range(len(row_in)):
        logit = widen(row_in[i])
        logprob = (logit / temperature - peaks[row]) - log_totals[row]
        value = scale * share_left(logprob) * (logprob + entropy)
        row_out[i] = narrow(_ZERO if _ruled_out(logit, logprob) else value, row_out[i])


_gather_rows = SharedKernel(_gather)
_gather_gradient_rows = SharedKernel(_gather_backward)
_log_softmax_rows = SharedKernel(_all)
_entropy_rows = SharedKernel(_entropy)
_entropy_gradient_rows = SharedKernel(_entropy_backward)


def log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Implement `Operations.log_softmax`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device="cpu")
    _log_softmax_rows(logits.numel(), _readable(logits), temperatures.numpy(), out.numpy())
    return out


def gather(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Implement `Operations.gather`."""
    out, peaks, log_totals = _three_a_row(logits)
    _gather_rows(
        logits.numel(), _readable(logits), tokens.contiguous().numpy(), temperatures.contiguous().numpy(), out.numpy(),
        peaks.numpy(), log_totals.numpy(),
    )  # fmt: skip
    return out, peaks, log_totals


def gather_gradient(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Implement `Operations.gather_gradient`."""
    out = torch.empty(logits.shape, dtype=_dtype_read(logits), device="cpu")
    _gather_gradient_rows(
        logits.numel(), _readable(logits), tokens.contiguous().numpy(), temperatures.contiguous().numpy(),
        peaks.numpy(), log_totals.numpy(), grad.float().contiguous().numpy(), array(out),
    )  # fmt: skip
    return out.to(logits.dtype)


def entropies(logits: torch.Tensor, temperatures: torch.Tensor) -> Reduced:
    """Implement `Operations.entropies`."""
    out, peaks, log_totals = _three_a_row(logits)
    _entropy_rows(
        logits.numel(), _readable(logits), temperatures.contiguous().numpy(), out.numpy(), peaks.numpy(),
        log_totals.numpy(),
    )  # fmt: skip
    return out, peaks, log_totals


def entropy_gradient(
    logits: torch.Tensor, temperatures: torch.Tensor, entropies: torch.Tensor, peaks: torch.Tensor,
    log_totals: torch.Tensor, grad: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Implement `Operations.entropy_gradient`."""
    out = torch.empty(logits.shape, dtype=_dtype_read(logits), device="cpu")
    _entropy_gradient_rows(
        logits.numel(), _readable(logits), temperatures.contiguous().numpy(), entropies.numpy(), peaks.numpy(),
        log_totals.numpy(), grad.float().contiguous().numpy(), array(out),
    )  # fmt: skip
    return out.to(logits.dtype)


def _three_a_row(logits: torch.Tensor) -> Reduced:
    """Return room for results, which is no view: autograd lets nobody write to one that an operation returns; and for
    normalisers."""
    peaks, log_totals = torch.empty(2, logits.shape[0], dtype=torch.float32, device="cpu").unbind(0)
    return torch.empty(logits.shape[0], dtype=torch.float32, device="cpu"), peaks, log_totals


def _readable(logits: torch.Tensor) -> Any:
    """Return the logits as kernels read them, bfloat16 as its uint16 bits."""
    return array(logits.to(_dtype_read(logits)).contiguous())


def _dtype_read(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype that kernels read logits in, and write their gradients: their own, or float32."""
    return logits.dtype if logits.dtype in DTYPES["cpu"] else torch.float32
