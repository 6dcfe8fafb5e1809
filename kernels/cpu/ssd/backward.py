"""Compute the gradients of the Mamba2 chunked scan of one training call, in batched torch operations, for the CPU.

The states at the chunk boundaries are computed again, chunk by chunk over all sequences at once, then the chunks are
walked backwards. Axes: z sequence, t and u tokens of a chunk, g group, r head of the group, n state, p head size.

Invariant: what padding rows hold, NaN too, enters no gradient, and theirs are zero.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from samebit.kernels.layout.decays import share_left
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import GRADIENT_CHUNK
from samebit.kernels.layout.options import SSMOptions


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Holds one chunk of each sequence that has it; tokens after a sequence's end are zero.

    ``rows`` ``[z, t]`` and ``real`` say where the tokens are; the others are float32 tiles of them.
    """

    rows: torch.Tensor
    real: torch.Tensor
    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    step: torch.Tensor
    grad: torch.Tensor
    sums: torch.Tensor

    def decay_to_end(self) -> torch.Tensor:
        """Return ``[z, u, g, r]``, what is left of each token at the end of the chunk."""
        return share_left(self.sums[:, -1:] - self.sums).float()


@dataclass(frozen=True, eq=False)
class _Gradients:
    """Collects the gradients of all rows, float32."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    step: torch.Tensor
    rate: torch.Tensor


def scan_gradients(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    grad: torch.Tensor,
    context: ForwardContext,
    options: SSMOptions,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the first five arguments of `samebit.kernels.ops.ssd.scan`."""
    groups, size = options.groups, options.state_size
    heads = len(decay_rate)
    inner = xbc.shape[1] - 2 * groups * size
    split = (groups, heads // groups)
    x, b, c = xbc.float().split([inner, groups * size, groups * size], dim=-1)
    x, b, c = x.unflatten(-1, (*split, -1)), b.unflatten(-1, (groups, size)), c.unflatten(-1, (groups, size))
    raw = dt.float() + dt_bias
    step = F.softplus(raw).clamp(*options.dt_limits).unflatten(-1, split)
    upstream = grad.float().unflatten(-1, (*split, -1))
    rate = decay_rate.view(split)
    sums_of = _chunks(x, b, c, step, upstream, rate, context, GRADIENT_CHUNK)
    padding = (torch.from_numpy(context.tokens_of_rows[0]) < 0).to(x.device)
    found = _Gradients(
        x=(upstream * skip.view(*split, 1)).masked_fill_(padding.view(-1, 1, 1, 1), 0.0),
        b=torch.zeros_like(b), c=torch.zeros_like(c), step=torch.zeros_like(step), rate=torch.zeros_like(rate),
    )  # fmt: skip
    states = _states(sums_of)
    after = x.new_zeros(0, *states[0].shape[1:]) if states else x.new_empty(0)
    for chunk, state in zip(reversed(sums_of), reversed(states), strict=True):
        after = F.pad(after, (0, 0, 0, 0, 0, 0, 0, 0, 0, len(state) - len(after)))
        after = _chunk_gradients(chunk, state, after, rate, found)
    low, high = options.dt_limits
    grad_dt = found.step.flatten(1) * torch.sigmoid(raw) * ((F.softplus(raw) >= low) & (F.softplus(raw) <= high))
    grad_dt.masked_fill_(padding[:, None], 0.0)
    grad_xbc = torch.cat([found.x.flatten(1), found.b.flatten(1), found.c.flatten(1)], dim=-1)
    grad_skip = sum((part.grad * part.x).sum((0, 1, 4)) for part in sums_of)
    return (
        grad_xbc.to(xbc.dtype), grad_dt.to(dt.dtype), found.rate.flatten(), grad_dt.sum(0),
        torch.as_tensor(grad_skip, device="cpu").reshape(-1),
    )  # fmt: skip


def _chunks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    step: torch.Tensor,
    grad: torch.Tensor,
    rate: torch.Tensor,
    context: ForwardContext,
    size: int,
) -> list[_Chunk]:
    """Cut the call into chunks, in order; sequences go from long to short: those that go on come first."""
    lengths = torch.from_numpy(context.lengths).long()
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = torch.from_numpy(context.row_start).long()[order]
    chunks = []
    for first in range(0, int(lengths.max()) if len(lengths) else 0, size):
        count = int((lengths > first).sum())
        place = first + torch.arange(size, device="cpu")
        real = place < lengths[:count, None]
        rows = torch.where(real, starts[:count, None] + place, 0).to(x.device)
        real = real.to(x.device)

        def tile(part: torch.Tensor, rows: torch.Tensor = rows, real: torch.Tensor = real) -> torch.Tensor:
            return part[rows].masked_fill_(~real.view(*real.shape, *([1] * (part.dim() - 1))), 0.0)

        steps = tile(step)
        sums = (steps.double() * rate.double()).cumsum(1)
        chunks.append(_Chunk(rows, real, tile(x), tile(b), tile(c), steps, tile(grad), sums))
    return chunks


def _states(chunks: list[_Chunk]) -> list[torch.Tensor]:
    """Return the state ``[z, g, r, n, p]`` that each chunk starts from."""
    states: list[torch.Tensor] = []
    for chunk in chunks:
        if not states:
            z, _, g, r, p = chunk.x.shape
            states.append(chunk.x.new_zeros(z, g, r, chunk.b.shape[-1], p))
            before = chunk
            continue
        kept = share_left(before.sums[:, -1]).float()[..., None, None] * states[-1]
        weighted = before.x * (before.decay_to_end() * before.step)[..., None]
        states.append((kept + torch.einsum("zugn,zugrp->zgrnp", before.b, weighted))[: len(chunk.x)])
        before = chunk
    return states


def _chunk_gradients(
    chunk: _Chunk, state: torch.Tensor, after: torch.Tensor, rate: torch.Tensor, found: _Gradients
) -> torch.Tensor:
    """Add the chunk's gradients; from the gradient of the state after it, return that of the state before."""
    x, b, c, step, grad = chunk.x, chunk.b, chunk.c, chunk.step, chunk.grad
    decay = share_left(chunk.sums).float()
    # from the state
    read = torch.einsum("zgrnp,ztgrp->ztgrn", state, grad) * decay[..., None]
    grad_c = read.sum(3)
    grad_sums = torch.einsum("ztgrn,ztgn->ztgr", read, c)
    grad_state = torch.einsum("ztgn,ztgrp->zgrnp", c, grad * decay[..., None])
    # from the tokens of the chunk
    difference = (chunk.sums[:, :, None] - chunk.sums[:, None]).float()
    causal = torch.ones(difference.shape[1:3], dtype=torch.bool, device=x.device).tril()[None, :, :, None, None]
    kept = share_left(difference.masked_fill(~causal, -torch.inf))
    scores = kept * torch.einsum("ztgn,zugn->ztug", c, b)[..., None]
    match = torch.einsum("ztgrp,zugrp->ztugr", grad, x)
    grad_x = torch.einsum("ztugr,ztgrp->zugrp", scores * step[:, None], grad)
    grad_scores = (kept * step[:, None] * match).sum(-1)
    grad_c = grad_c + torch.einsum("ztug,zugn->ztgn", grad_scores, b)
    grad_b = torch.einsum("ztug,ztgn->zugn", grad_scores, c)
    through = scores * match
    grad_step = through.sum(1)
    weighted = through * step[:, None]
    grad_sums = grad_sums + weighted.sum(2) - weighted.sum(1)
    # to the state at the end
    left = chunk.decay_to_end()
    wanted = torch.einsum("zugn,zgrnp->zugrp", b, after)
    grad_x = grad_x + wanted * (left * step)[..., None]
    pull = (wanted * x).sum(-1) * left
    grad_step = grad_step + pull
    grad_sums = grad_sums - pull * step
    whole = share_left(chunk.sums[:, -1]).float()
    grad_sums[:, -1] += (pull * step).sum(1) + whole * (state * after).sum((-1, -2))
    grad_b = grad_b + torch.einsum("zugrp,zgrnp->zugn", x * (left * step)[..., None], after)
    # the running sum of the decay
    grad_decay = grad_sums.flip(1).cumsum(1).flip(1)
    grad_step = grad_step + grad_decay * rate
    found.rate.add_((grad_decay * step).sum((0, 1)))
    rows = chunk.rows[chunk.real]
    for target, part in ((found.x, grad_x), (found.b, grad_b), (found.c, grad_c), (found.step, grad_step)):
        target[rows] += part[chunk.real]
    return grad_state + whole[..., None, None] * after
