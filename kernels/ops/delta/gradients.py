"""Compute the gradients of the delta rule whose decay is a channel's, in torch operations, on any device.

The states before the chunks of `SCAN_CHUNK` tokens are computed again, then the chunks are walked backwards, all
sequences at once; the gradients of a chunk are autograd's of its formula. With S the state before it and L ``[t, n]``
the running sum of the decay in it::

    A[t, s] = beta_t sum over n of exp(L_t - L_s) k_t k_s for s < t      (I + A) u = beta (v - (exp(L) k) S)
    M[t, s] = sum over n of exp(L_t - L_s) q_t k_s for s <= t            o = (exp(L) q) S + M u
    S' = exp(L_end) S + sum over s of (exp(L_end - L_s) k_s)^T u_s

Axes: z sequence, t and s tokens of a chunk, h head, n key size, p value size.

Invariants
----------
* What padding rows hold, NaN too, enters no gradient, and theirs are zero.
* No product is torch's in float32, whose bits are those of a setting of the process: of TF32, say. They are in float64,
  or element by element.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from samebit.kernels.layout.decays import share_left
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import SCAN_CHUNK
from samebit.kernels.layout.options import KEY_EPS, DeltaOptions, Saved


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Holds where the tokens of one chunk of each sequence are: ``rows`` ``[z, t]``, of which some are ``real``."""

    rows: torch.Tensor
    real: torch.Tensor

    def of(self, parts: Saved) -> list[torch.Tensor]:
        """Return float32 tiles ``[z, t, ...]`` of parts of all rows, zero after a sequence's end."""
        wanted = self.real.to(parts[0].device)
        return [
            part[self.rows].float().masked_fill(~wanted.view(*wanted.shape, *[1] * (part.dim() - 1)), 0.0)
            for part in parts
        ]


def gradients_by_channel(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: DeltaOptions
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of qkv, decay and beta, which ``saved`` are."""
    qkv, decay, beta = saved
    heads = options.value_heads
    keys = heads * options.key_dim
    shaped = (*(part.unflatten(-1, (heads, -1)) for part in (*qkv.split([keys, keys, options.inner], -1), decay)), beta)
    found = [torch.zeros(part.shape, dtype=torch.float32, device=part.device) for part in shaped]
    upstream = grad.unflatten(-1, (heads, -1))
    chunks = _chunks(context)
    state = grad.new_zeros(len(context.lengths), heads, options.key_dim, options.value_dim, dtype=torch.float32)
    states = []
    for chunk in chunks:
        state = state[: len(chunk.rows)]
        states.append(state)
        _, state = _outputs(chunk.of(shaped), state)
    after = torch.zeros_like(state)
    for chunk, before in zip(reversed(chunks), reversed(states), strict=True):
        after = F.pad(after, (0, 0, 0, 0, 0, 0, 0, len(before) - len(after)))
        leaves = [part.requires_grad_() for part in (*chunk.of(shaped), before.detach())]
        with torch.enable_grad():
            outputs = _outputs(leaves[:-1], leaves[-1])
        *parts, after = torch.autograd.grad(outputs, leaves, (*chunk.of((upstream,)), after))
        for whole, part in zip(found, parts, strict=True):
            whole[chunk.rows[chunk.real]] = part[chunk.real.to(part.device)]
    q, k, v, of_decay, of_beta = found
    joined = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=-1)
    return joined.to(qkv.dtype), of_decay.flatten(1), of_beta


def _chunks(context: ForwardContext) -> list[_Chunk]:
    """Cut the call into chunks, in order; sequences go from long to short: those that go on come first."""
    lengths, order = torch.from_numpy(context.lengths).long().sort(descending=True, stable=True)
    starts = torch.from_numpy(context.row_start).long()[order]
    chunks = []
    for first in range(0, int(lengths.max()) if len(lengths) else 0, SCAN_CHUNK):
        count = int((lengths > first).sum())
        place = first + torch.arange(SCAN_CHUNK, device="cpu")
        real = place < lengths[:count, None]
        chunks.append(_Chunk(torch.where(real, starts[:count, None] + place, 0), real))
    return chunks


def _outputs(parts: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o ``[z, t, h, p]`` of a chunk's q, k, v, decay and beta, and the state after it."""
    q, k, v, decay, beta = parts
    q, k = (part / (part.square().sum(-1, keepdim=True) + KEY_EPS).sqrt() for part in (q, k))
    q = q * k.shape[-1] ** -0.5
    sums = decay.double().cumsum(1)
    causal = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=q.device).tril()
    difference = (sums[:, :, None] - sums[:, None]).float()  # [z, t, s, h, n]
    kept = share_left(difference.masked_fill(~causal[:, :, None, None], -torch.inf))
    decayed = share_left(sums.float())
    system = beta.transpose(1, 2)[..., None] * _matches(k, k, kept).tril(-1)
    before = state.double()
    read = (k * decayed).transpose(1, 2).double() @ before
    wanted = beta.transpose(1, 2)[..., None] * (v.transpose(1, 2) - read)
    u = torch.linalg.solve_triangular(system.double(), wanted, upper=False, unitriangular=True)
    out = (q * decayed).transpose(1, 2).double() @ before + _matches(q, k, kept).double() @ u
    left = k * share_left((sums[:, -1:] - sums).float())
    after = decayed[:, -1, :, :, None] * before + left.permute(0, 2, 3, 1).double() @ u
    return out.transpose(1, 2).float(), after.float()


def _matches(asking: torch.Tensor, keys: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return ``[z, h, t, s]``, how far each token of ``asking`` ``[z, t, h, n]`` matches each of ``keys``."""
    return (asking[:, :, None] * keys[:, None] * kept).sum(-1).permute(0, 3, 1, 2)
