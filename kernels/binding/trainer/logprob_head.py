"""Compute a language model's head and the log-probabilities of its rows, with no more than a part of the logits at
once.

Invariants:

* Forward: rows in chunks, each with all its logits. Head, epilogue and log-probability are row-invariant, so the bits
  are those of any other number of rows a chunk.
* Where one buffer holds all logits it is kept for the backward. Else that computes the logits again, all rows of a part
  of the vocabulary at a time: what it needs of the rest of a row is the normaliser, which the forward kept. So the
  gradient of a weight is one product, rounded once, and no copy of the weight's size is needed to add up parts; those
  of the hidden states are added up in float32.
* A buffer holds `BYTES_AT_ONCE` of float32 logits at most, but always one row, and `_LEAST_COLUMNS` of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from samebit.kernels.binding.epilogue import Epilogue, unchanged
from samebit.kernels.binding.trainer.logprob_request import Scores, Scoring
from samebit.kernels.layout.device import plain_backward
from samebit.kernels.ops.linear import add_gradient_of_inputs, gradient_of_weight, linear, linear_part
from samebit.kernels.ops.logprobs import entropies, entropy_gradient, gather, gather_gradient

BYTES_AT_ONCE = 256 << 20
"""A buffer of float32 logits holds at most this many bytes; a few such buffers exist at a time."""

_ROWS = 64
"""Larger chunks have a multiple of this count of rows: it is a panel of the CPU's matrix product."""

_LEAST_COLUMNS = 256


def scored(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    config: Any,
    scoring: Scoring,
) -> Scores:
    """Return the log-probabilities of the tokens asked for, differentiable in ``x``, ``weight`` and ``bias``.

    Args:
        x: ``[..., K]`` hidden states, R rows in all.
        weight: ``[V, K]``, the same dtype.
        bias: ``[V]`` or None.
        epilogue: makes the model's logits of the head's, with this ``config``.
        scoring: of R tokens.

    Raises:
        ValueError: another number of rows than of tokens.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) != scoring.token_ids.numel():
        raise ValueError(f"{scoring.token_ids.numel()} tokens are to be scored, but {len(rows)} rows reach the head")
    return Scores(*_Scored.apply(rows, weight, bias, epilogue, config, scoring))


def _rows_at_once(vocab: int) -> int:
    rows = max(BYTES_AT_ONCE // (4 * vocab), 1)
    return rows if rows < _ROWS else rows // _ROWS * _ROWS


def _columns_at_once(rows: int) -> int:
    """Return a power of two, because on a GPU each width is another compiled kernel."""
    return max(1 << max(BYTES_AT_ONCE // (4 * max(rows, 1)), 1).bit_length() - 1, _LEAST_COLUMNS)


def _parts(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        config: Any,
        scoring: Scoring,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, temperatures = scoring.token_ids.reshape(-1), scoring.temperatures.reshape(-1)
        shape = scoring.token_ids.shape
        logprobs, entropy = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
        peaks, log_totals = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        parts = _parts(len(x), _rows_at_once(len(weight)))
        of_head = x.new_empty(0)
        for part in parts:
            of_head = _as_read(linear(x[part], weight, bias), epilogue)
            logits = epilogue(config, of_head)
            logprobs.view(-1)[part], peaks[part], log_totals[part] = gather(logits, tokens[part], temperatures[part])
            if scoring.with_entropy:
                entropy.view(-1)[part] = entropies(logits, temperatures[part])[0]
        ctx.set_materialize_grads(False)
        kept = of_head if len(parts) == 1 else None
        ctx.save_for_backward(x, weight, bias, tokens, temperatures, peaks, log_totals, entropy, kept)
        ctx.epilogue, ctx.config = epilogue, config
        return logprobs, entropy if scoring.with_entropy else None

    @staticmethod
    @plain_backward
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint around the call gives them once
        x, weight, bias, *_ = saved
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        x_grad = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if of_x else None
        weight_grad = torch.empty_like(weight) if of_weight else None
        bias_grad = torch.empty_like(bias) if of_bias else None
        at_once = len(weight) if saved[-1] is not None else _columns_at_once(len(x))
        for part in _parts(len(weight), at_once):
            grad = _gradient_of_logits(ctx, saved, part, of_logprobs, of_entropy).to(weight.dtype)
            if x_grad is not None:
                add_gradient_of_inputs(x_grad, grad, weight[part])
            if weight_grad is not None:
                weight_grad[part] = gradient_of_weight(grad, x)
            if bias_grad is not None:
                bias_grad[part] = grad.sum(0)
            del grad  # before the next one is made
        return None if x_grad is None else x_grad.to(x.dtype), weight_grad, bias_grad, None, None, None


def _as_read(logits: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """Return the head's logits as epilogue and kernels take them: float32, or on a CPU as they are if nothing changes
    them.

    Widened logits of a large vocabulary are more bytes than the weights. On a GPU sums over another dtype might be
    made in another order.
    """
    return logits if epilogue is unchanged and logits.is_cpu else logits.float()


def _gradient_of_logits(
    ctx: Any, saved: Sequence[Any], part: slice, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient ``[R, columns]`` of what the head gives for this part of the vocabulary."""
    x, weight, bias, tokens, temperatures, peaks, log_totals, entropy, kept = saved
    if kept is None:
        kept = linear_part(x, weight[part], None if bias is None else bias[part], len(weight))
    if of_entropy is not None:
        kept = kept.float()  # two gradients are added before they are rounded
    kept = _as_read(kept, ctx.epilogue)
    head_logits = kept.detach().requires_grad_()
    with torch.enable_grad():
        logits = ctx.epilogue(ctx.config, head_logits)
    if of_logprobs is None:
        grad = torch.zeros_like(head_logits)
    else:
        places = tokens - part.start  # those that lie in other parts have their share of the gradient there
        grad = gather_gradient(logits, places, temperatures, peaks, log_totals, of_logprobs.reshape(-1))
    if of_entropy is not None:
        known = temperatures, entropy.view(-1), peaks, log_totals
        grad += entropy_gradient(logits, *known, of_entropy.reshape(-1))
    return grad if logits is head_logits else torch.autograd.grad(logits, head_logits, grad)[0]
