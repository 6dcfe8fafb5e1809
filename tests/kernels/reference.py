"""Compute in float64 what each kernel computes: slow, obvious, the oracle of the tests.

Plain torch, differentiable by torch's own autograd, one dense sequence at a time, no tiling, no padding.

Shapes: T query tokens, S tokens of the sequence, H query heads, G KV heads, D head size, R rotated pairs,
V vocabulary, E experts.
"""

import math
from collections.abc import Iterable

import torch

from samebit.kernels.layout.options import ExpertOptions, GatedNormOptions, RoutingOptions


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``; ``x``: ``[..., K]``, ``weight``: ``[N, K]``."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Compute ``x / sqrt(mean(x**2) + eps) * (weight + offset)`` over the last axis."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis."""
    centered = x.double() - x.double().mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * weight.double() + bias.double()


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(gate) * up``, by the activation's Hugging Face name."""
    return activated(activation, gate) * up.double()


def activated(activation: str, x: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(x)``, by the activation's Hugging Face name."""
    x = x.double()
    if activation in ("silu", "swish"):
        y = x / (1 + (-x).exp())
    elif activation in ("gelu_pytorch_tanh", "gelu_new"):
        y = 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
    elif activation == "sigmoid":
        y = 1 / (1 + (-x).exp())
    elif activation == "gelu":
        y = 0.5 * x * (1 + (x / math.sqrt(2)).erf())
    elif activation == "quick_gelu":
        y = x / (1 + (-1.702 * x).exp())
    else:
        raise ValueError(f"no reference for activation {activation!r}")
    return y


def rotate(
    x: torch.Tensor, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scaling: float = 1.0
) -> torch.Tensor:
    """Turn the pairs (i, R + i) of each head by position * frequency; elements from 2 R on stay.

    Args:
        x: ``[T, H, D]``.
        positions: ``[T]``.
        inverse_frequencies: ``[R]``.
        scaling: factor on sine and cosine.
    """
    x, half = x.double(), len(inverse_frequencies)
    angles = (positions.double()[:, None] * inverse_frequencies.double())[:, None]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, *, scale: float,
    window: int = 0, softcap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention of the last T tokens of one sequence to all S of them.

    Args:
        q: ``[T, H, D]``; row t is token ``S - T + t``.
        k: ``[S, G, D]``; query head h reads KV head ``h // (H / G)``.
        v: ``[S, G, D]``.
        sinks: ``[H]``, one more score of each row, without a value.
        scale: factor on the scores.
        window: a token sees itself and the ``window - 1`` before it; 0 for all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for off.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    query_token = torch.arange(len(k) - len(q), len(k))[:, None]
    key_token = torch.arange(len(k))[None, :]
    seen = key_token <= query_token
    if window:
        seen &= key_token > query_token - window
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", weights, values)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Compute attention of all tokens of one segment to all of them; ``[T, H, D]`` each."""
    weights = (torch.einsum("thd,shd->hts", q.double(), k.double()) * scale).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v.double())


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return log-softmax of ``logits / temperature`` at the tokens; ``logits``: ``[..., V]``, the others ``[...]``."""
    scaled = logits.double() / torch.as_tensor(temperature, dtype=torch.float64).expand(token_ids.shape)[..., None]
    return scaled.log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def entropy(logits: torch.Tensor, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Return the entropy in nats of the softmax of ``logits / temperature``; ``logits``: ``[..., V]``."""
    scaled = logits.double() / torch.as_tensor(temperature, dtype=torch.float64).expand(logits.shape[:-1])[..., None]
    logprobs = scaled.log_softmax(-1)
    return -torch.where(scaled == -math.inf, 0.0, logprobs.exp() * logprobs).sum(-1)


def penalize_repetition(logits: torch.Tensor, seen: set[int], penalty: float) -> torch.Tensor:
    """Divide the logits ``[V]`` of tokens seen so far by the penalty if they are positive, else multiply them."""
    out = logits.double().clone()
    for token in seen:
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def sampling_distribution(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Return the probability of each of V tokens after min-p, then top-k, then top-p; ``logits``: ``[V]``.

    Min-p keeps the tokens that are at least ``min_p`` times as likely as the likeliest, top-p the shortest run of
    likeliest ones whose share of what the others left reaches ``top_p``. Ties go to the lower id.
    """
    probabilities = (logits.double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    ranked = [token for token in ranked if probabilities[token] >= min_p * probabilities[ranked[0]]]
    ranked = ranked[:top_k] if top_k > 0 else ranked
    left = sum(probabilities[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass >= top_p * left:
            break
        kept.append(token)
        mass += probabilities[token]
    out = torch.zeros(len(probabilities), dtype=torch.float64)
    out[kept] = torch.tensor([probabilities[token] for token in kept], dtype=torch.float64)
    return out / out.sum()


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, silu: bool = True
) -> torch.Tensor:
    """Compute the depthwise causal convolution of a sequence, and silu of it; ``x``: ``[T, W]``, ``weight``: ``[W, 1,
    K]``."""
    taps = weight.shape[-1]
    padded = torch.nn.functional.pad(x.double(), (0, 0, taps - 1, 0))
    out = torch.stack([(padded[t : t + taps] * weight[:, 0].double().T).sum(0) for t in range(len(x))])
    out = out if bias is None else out + bias.double()
    return torch.nn.functional.silu(out) if silu else out


def ssm_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    """Compute the recurrence of Mamba2, ``S_t = exp(A dt_t) S + dt_t B_t x_t``, ``y_t = C_t S_t + D x_t``.

    Args:
        x: ``[T, H, P]``.
        b: ``[T, G, N]``; head h reads group ``h // (H / G)``.
        c: ``[T, G, N]``.
        dt: ``[T, H]`` before bias and softplus.
        decay_rate: ``[H]``, A.
        dt_bias: ``[H]``.
        skip: ``[H]``, D.
        dt_limits: bounds of the time step.

    Returns:
        ``[T, H, P]``.
    """
    repeat = x.shape[1] // b.shape[1]
    x, b, c = x.double(), b.double().repeat_interleave(repeat, 1), c.double().repeat_interleave(repeat, 1)
    step = torch.nn.functional.softplus(dt.double() + dt_bias.double(), threshold=40).clamp(*dt_limits)
    state = torch.zeros(x.shape[1], x.shape[2], b.shape[2], dtype=torch.float64)
    out = []
    for t in range(len(x)):
        kept = (step[t] * decay_rate.double()).exp()[:, None, None] * state
        state = kept + (step[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        out.append((state * c[t][:, None, :]).sum(-1) + skip.double()[:, None] * x[t])
    return torch.stack(out)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, options: GatedNormOptions
) -> torch.Tensor:
    """Normalise each group of the last axis (RMSNorm), times silu(gate) or sigmoid(gate) before or after it."""
    eps, groups, gate_first = options.eps, options.groups, options.gate_first
    x, gate = x.double(), gate.double()
    gate = (1 if options.sigmoid else gate) / (1 + (-gate).exp())
    x = x * gate if gate_first else x
    parts = x.unflatten(-1, (groups, -1))
    normed = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight.double()
    gated_after: torch.Tensor = normed if gate_first else normed * gate
    return gated_after


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, beta_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log of the decay and the strength of the delta rule; ``a``: ``[T, H]`` or ``[T, H K]``, ``b``: ``[T,
    H]``.
    """
    step = torch.nn.functional.softplus(a.double() + dt_bias.double())
    return -a_log.double().exp().repeat_interleave(a.shape[1] // b.shape[1]) * step, beta_scale * b.double().sigmoid()


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Compute the recurrence of one sequence; ``q``, ``k``: ``[T, Hk, K]``, ``v``: ``[T, Hv, V]``, ``beta``: ``[T,
    Hv]``, ``decay``: as beta, or of each channel ``[T, Hv K]``.
    """
    q, k = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    share = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(share, 1) for x in (q * k.shape[-1] ** -0.5, k))
    v, beta = v.double(), beta.double()
    kept = decay.double().exp().unflatten(1, (v.shape[1], -1))
    state = torch.zeros(v.shape[1], k.shape[-1], v.shape[-1], dtype=torch.double)
    out = []
    for t in range(len(v)):
        state = kept[t, :, :, None] * state
        written = beta[t, :, None] * (v[t] - torch.einsum("hn,hnp->hp", k[t], state))
        state = state + k[t, :, :, None] * written[:, None]
        out.append(torch.einsum("hn,hnp->hp", q[t], state))
    return torch.stack(out)


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions
) -> tuple[list[list[int]], torch.Tensor]:
    """Return the experts of each row, ascending, and their weights; ``logits``: ``[T, E]``, ``correction``: ``[E]``."""
    logits, number = logits.double(), logits.shape[1]
    scores = logits.sigmoid() if options.scores == "sigmoid" else logits.softmax(-1)
    corrected = scores if correction is None else scores + correction.double()
    ties = logits if correction is None else torch.zeros_like(logits)  # a score of 0 or 1 may be one that was rounded
    size, counted = number // options.groups, 2 if options.group_score == "best_two" else 1
    ids = []
    for keys in torch.stack([corrected, ties], -1).tolist():
        groups = [_ranked(keys, range(first, first + size)) for first in range(0, number, size)]
        sums = [[sum(keys[e][0] for e in group[:counted])] for group in groups]
        kept = _ranked(sums, range(options.groups))[: options.kept_groups]
        ids.append(sorted(_ranked(keys, [e for group in kept for e in groups[group]])[: options.top_k]))
    weights = scores.gather(1, torch.tensor(ids))
    if options.normalised or options.scores == "softmax_of_chosen":
        weights = weights / (weights.sum(-1, keepdim=True) + (options.floor if options.scores == "sigmoid" else 0.0))
    return ids, weights * options.scale


def _ranked(keys: list[list[float]], places: Iterable[int]) -> list[int]:
    """Return the places with the greatest keys first, the lowest among equals."""
    return sorted(places, key=lambda place: ([-key for key in keys[place]], place))


def routed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    options: ExpertOptions,
) -> torch.Tensor:
    """Sum each row's experts by their weights: shapes and options as of `samebit.kernels.ops.experts.routed`."""
    rows = []
    for row, chosen, own in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(row)
        for expert, weight in zip(chosen, own, strict=True):
            first, second = ((part[expert].T if options.transposed else part[expert]) for part in (up, down))
            products = linear(row, first, None if up_bias is None else up_bias[expert])
            if options.form == "plain":
                hidden = products.clamp(min=0).square()
            elif options.form == "gated":
                hidden = gated(options.activation, *products.chunk(2))
            else:
                gate = products[0::2].clamp(max=options.limit)
                clamped = products[1::2].clamp(-options.limit, options.limit)
                hidden = (clamped + 1) * gate * (options.alpha * gate).sigmoid()
            total = total + weight * linear(hidden, second, None if down_bias is None else down_bias[expert])
        rows.append(total)
    return torch.stack(rows)
