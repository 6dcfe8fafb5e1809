"""Compute the gradients of the gated delta rule of one training call, in batched torch operations, for the
CPU.

The states at the chunk boundaries are computed again, chunk by chunk over all sequences at once, then the chunks are
walked backwards. In a chunk, with S the state before it and L the running sum of the decay::

    A[t, s] = beta_t exp(L_t - L_s) (k_t . k_s) for s < t        (I + A) u = beta (v - exp(L) k S)
    M[t, s] = exp(L_t - L_s) (q_t . k_s) for s <= t              o = exp(L) q S + M u
    S' = exp(L_end) S + sum over s of k_s^T exp(L_end - L_s) u_s

Axes: z sequence, t and s tokens of a chunk, g key head, r value head of the key head, n key size, p value size.

Invariant: what padding rows hold, NaN too, enters no gradient, and theirs are zero.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from samebit.kernels.layout.decays import share_left
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import GRADIENT_CHUNK
from samebit.kernels.layout.options import KEY_EPS, DeltaOptions, Saved


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Holds one chunk of each sequence that has it; tokens after a sequence's end are zero.

    ``rows`` ``[z, t]`` and ``real`` say where the tokens are; q, k ``[z, t, g, n]``, normalised, v and grad ``[z, t, g,
    r, p]``, beta ``[z, t, g, r]``; ``sums`` of the decay ``[z, t, g, r]`` float64.
    """

    rows: torch.Tensor
    real: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    grad: torch.Tensor
    sums: torch.Tensor

    def decay_to_end(self) -> torch.Tensor:
        """Return ``[z, t, g, r, 1]``, what is left of each token at the end of the chunk."""
        return share_left(self.sums[:, -1:] - self.sums).float()[..., None]

    def decay_of_pairs(self) -> torch.Tensor:
        """Return ``[z, g, r, t, s]``, what is left of token s at token t; 0 for s > t."""
        sums = self.sums.permute(0, 2, 3, 1)
        difference = (sums[..., :, None] - sums[..., None, :]).float()
        causal = torch.ones(difference.shape[-2:], dtype=torch.bool, device=sums.device).tril()
        return share_left(difference.masked_fill(~causal, -torch.inf))


@dataclass(frozen=True, eq=False)
class _Solved:
    """Holds what a chunk's tokens write, ``u`` ``[z, t, g, r, p]``, and what that was found of.

    system: ``I + A`` ``[z, g, r, t, s]``. kept: the decay of pairs. matches: ``k_t . k_s`` ``[z, g, 1, t, s]``. read:
    ``k S`` ``[z, t, g, r, p]``. decayed: ``exp(L)`` ``[z, t, g, r, 1]``.
    """

    u: torch.Tensor
    system: torch.Tensor
    kept: torch.Tensor
    matches: torch.Tensor
    read: torch.Tensor
    decayed: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Gradients:
    """Collects the gradients of all rows, float32, those of q and k as they were normalised."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def delta_rule_backward(
    saved: Saved, grad: torch.Tensor, context: ForwardContext, options: DeltaOptions
) -> tuple[torch.Tensor, ...]:
    """Implement `Operations.delta_rule_backward`."""
    qkv, decay, beta = saved
    groups, split = options.key_heads, (options.key_heads, options.value_heads // options.key_heads)
    keys = groups * options.key_dim
    parts = qkv.float().split([keys, keys, qkv.shape[1] - 2 * keys], dim=-1)
    raw_q, raw_k = (part.unflatten(-1, (groups, -1)) for part in parts[:2])
    scale = options.key_dim**-0.5
    q, k = _normalised(raw_q) * scale, _normalised(raw_k)
    v, upstream = parts[2].unflatten(-1, (*split, -1)), grad.float().unflatten(-1, (*split, -1))
    rows = {"q": q, "k": k, "v": v, "beta": beta.unflatten(-1, split), "grad": upstream}
    chunks = _chunks(rows, decay.unflatten(-1, split), context, GRADIENT_CHUNK)
    found = _Gradients(*(torch.zeros_like(part) for part in (q, k, v, rows["beta"], rows["beta"])))
    _walk_back(chunks, found)
    padding = (torch.from_numpy(context.tokens_of_rows[0]) < 0).to(qkv.device)
    of_q, of_k = _through_norm(raw_q, found.q * scale), _through_norm(raw_k, found.k)
    joined = torch.cat([of_q.flatten(1), of_k.flatten(1), found.v.flatten(1)], dim=-1)
    joined.masked_fill_(padding[:, None], 0.0)
    return joined.to(qkv.dtype), found.decay.flatten(1), found.beta.flatten(1)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + KEY_EPS).sqrt()


def _through_norm(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x from that of x normalised."""
    inverse = (x.square().sum(-1, keepdim=True) + KEY_EPS).rsqrt()
    normed = x * inverse
    return (grad - normed * (grad * normed).sum(-1, keepdim=True)) * inverse


def _chunks(parts: dict[str, torch.Tensor], decay: torch.Tensor, context: ForwardContext, size: int) -> list[_Chunk]:
    """Cut the call into chunks, in order; sequences go from long to short: those that go on come first."""
    lengths = torch.from_numpy(context.lengths).long()
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = torch.from_numpy(context.row_start).long()[order]
    chunks = []
    for first in range(0, int(lengths.max()) if len(lengths) else 0, size):
        count = int((lengths > first).sum())
        place = first + torch.arange(min(size, int(lengths.max()) - first), device="cpu")
        real = place < lengths[:count, None]
        rows = torch.where(real, starts[:count, None] + place, 0).to(decay.device)
        real = real.to(decay.device)

        def tile(part: torch.Tensor, rows: torch.Tensor = rows, real: torch.Tensor = real) -> torch.Tensor:
            return part[rows].masked_fill_(~real.view(*real.shape, *([1] * (part.dim() - 1))), 0.0)

        tiles = {name: tile(part) for name, part in parts.items()}
        chunks.append(_Chunk(rows, real, **tiles, sums=tile(decay).double().cumsum(1)))
    return chunks


def _walk_back(chunks: list[_Chunk], found: _Gradients) -> None:
    """Find the state before each chunk and what its tokens write, then gradients from the last chunk to the first."""
    steps: list[tuple[_Chunk, torch.Tensor, _Solved]] = []
    for chunk in chunks:
        if steps:
            state = _after(*steps[-1])[: len(chunk.k)]
        else:
            z, _, g, r, p = chunk.v.shape
            state = chunk.v.new_zeros(z, g, r, chunk.k.shape[-1], p)
        steps.append((chunk, state, _solve(chunk, state)))
    after = torch.zeros_like(steps[-1][1]) if steps else torch.empty(0, device="cpu")
    for chunk, state, solved in reversed(steps):
        after = F.pad(after, (0, 0, 0, 0, 0, 0, 0, 0, 0, len(state) - len(after)))
        after = _chunk_gradients(chunk, state, solved, after, found)


def _solve(chunk: _Chunk, state: torch.Tensor) -> _Solved:
    """Find what the tokens of a chunk write."""
    kept, decayed = chunk.decay_of_pairs(), share_left(chunk.sums).float()[..., None]
    matches = torch.einsum("ztgn,zsgn->zgts", chunk.k, chunk.k)[:, :, None]
    read = torch.einsum("ztgn,zgrnp->ztgrp", chunk.k, state)
    strength = chunk.beta.permute(0, 2, 3, 1)[..., None]
    system = (strength * kept * matches).tril(-1)
    wanted = chunk.beta[..., None] * (chunk.v - decayed * read)
    u = torch.linalg.solve_triangular(system, wanted.permute(0, 2, 3, 1, 4), upper=False, unitriangular=True)
    return _Solved(u.permute(0, 3, 1, 2, 4), system, kept, matches, read, decayed)


def _after(chunk: _Chunk, state: torch.Tensor, solved: _Solved) -> torch.Tensor:
    """Return the state ``[z, g, r, n, p]`` after a chunk."""
    fed = torch.einsum("zsgn,zsgrp->zgrnp", chunk.k, solved.u * chunk.decay_to_end())
    return share_left(chunk.sums[:, -1]).float()[..., None, None] * state + fed


def _chunk_gradients(
    chunk: _Chunk, state: torch.Tensor, solved: _Solved, after: torch.Tensor, found: _Gradients
) -> torch.Tensor:
    """Add the chunk's gradients; from the gradient of the state after it, return that of the state before."""
    q, k, grad = chunk.q, chunk.k, chunk.grad
    u, kept, decayed, left = solved.u, solved.kept, solved.decayed, chunk.decay_to_end()
    asked = torch.einsum("ztgn,zsgn->zgts", q, k)[:, :, None]
    # to what was written
    wanted = torch.einsum("zsgn,zgrnp->zsgrp", k, after)
    to_u = torch.einsum("zgrts,ztgrp->zsgrp", kept * asked, grad) + left * wanted
    upper = solved.system.transpose(-1, -2)
    of_solved = torch.linalg.solve_triangular(upper, to_u.permute(0, 2, 3, 1, 4), upper=True, unitriangular=True)
    of_solved = of_solved.permute(0, 3, 1, 2, 4)
    # from pairs of tokens
    of_matches = -torch.einsum("ztgrp,zsgrp->zgrts", of_solved, u).tril(-1) * kept
    of_strength = (of_matches * solved.matches).sum(-1).permute(0, 3, 1, 2)
    of_matches = of_matches * chunk.beta.permute(0, 2, 3, 1)[..., None]
    of_asked = torch.einsum("ztgrp,zsgrp->zgrts", grad, u) * kept
    through = of_matches * solved.matches + of_asked * asked
    grad_sums = (through.sum(-1) - through.sum(-2)).permute(0, 3, 1, 2)
    of_matches, of_asked = of_matches.sum(2), of_asked.sum(2)
    grad_q = torch.einsum("zgts,zsgn->ztgn", of_asked, k)
    grad_k = torch.einsum("zgts,ztgn->zsgn", of_asked, q)
    grad_k = grad_k + torch.einsum("zgts,zsgn->ztgn", of_matches + of_matches.transpose(-1, -2), k)
    # from the state before
    back = -chunk.beta[..., None] * of_solved
    read_q = torch.einsum("ztgn,zgrnp->ztgrp", q, state)
    grad_sums = grad_sums + ((solved.read * back + read_q * grad) * decayed).sum(-1)
    grad_q = grad_q + torch.einsum("zgrnp,ztgrp->ztgn", state, grad * decayed)
    grad_k = grad_k + torch.einsum("zgrnp,ztgrp->ztgn", state, back * decayed)
    # to the state after
    pull = (left * wanted * u).sum(-1)
    grad_k = grad_k + torch.einsum("zgrnp,zsgrp->zsgn", after, left * u)
    whole = share_left(chunk.sums[:, -1]).float()
    grad_sums = grad_sums - pull
    grad_sums[:, -1] += pull.sum(1) + whole * (state * after).sum((-1, -2))
    # collected
    rows = chunk.rows[chunk.real]
    found.q[rows], found.k[rows] = grad_q[chunk.real], grad_k[chunk.real]
    found.v[rows] = (chunk.beta[..., None] * of_solved)[chunk.real]
    found.beta[rows] = (((chunk.v - decayed * solved.read) * of_solved).sum(-1) + of_strength)[chunk.real]
    found.decay[rows] = grad_sums.flip(1).cumsum(1).flip(1)[chunk.real]
    before = torch.einsum("ztgn,ztgrp->zgrnp", k, back * decayed) + torch.einsum("ztgn,ztgrp->zgrnp", q, grad * decayed)
    return before + whole[..., None, None] * after
