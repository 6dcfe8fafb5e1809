"""Choosing the next token: logit processing, counter-based random numbers, inverse-CDF sampling.

Contract: a row's choice depends on that row's logits, parameters and counter alone. Processing changes the
choice, never the reported log-probability, which comes from the unprocessed logits.
"""

import numpy as np
import torch

from . import device
from .cpu import logprobs as cpu
from .cpu import philox
from .packing import indices, sent

_RULED_OUT = float("-inf")


def uniforms(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1) with 53 bits, one a row, from Philox4x32-10 (Salmon et al. 2011).

    Args:
        keys: ``[R, 2]`` uint32.
        counters: ``[R, 4]`` uint32.

    Returns:
        ``[R]`` float64 on the device of the counters, the same bits on each.
    """
    if device.on_gpu(counters):
        from .triton import sampling as gpu

        return gpu.uniforms(keys, counters)
    words = np.empty((len(counters), 4), np.uint32)
    philox.blocks(words.size, counters.numpy(), keys.numpy(), words)
    high = (words[:, 0] >> np.uint32(5)).astype(np.float64)
    low = (words[:, 1] >> np.uint32(6)).astype(np.float64)
    return torch.from_numpy((high * 67108864.0 + low) / 9007199254740992.0)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample one token a row from softmax(logits / temperature); greedy (lowest id on ties) at temperature 0.

    Args:
        logits: ``[R, V]`` float32, contiguous; -inf rules a token out.
        temperatures: ``[R]`` float32, not negative.
        uniform: ``[R]`` float64 in [0, 1).

    Returns:
        ``[R]`` int64 on the device of the logits; -1 for a row from which nothing can be drawn.
    """
    if device.on_gpu(logits):
        from .triton import sampling as gpu

        return gpu.draw(logits, temperatures, uniform)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    cpu.draw(logits.numel(), logits.numpy(), temperatures.numpy(), uniform.numpy(), out.numpy())
    return out


def penalize_repetition(row: torch.Tensor, seen: torch.Tensor, penalty: float) -> None:
    """In place: logits ``row[seen]`` divided by the penalty where positive, multiplied where negative.

    Keskar et al. 2019; ``row``: ``[V]``, ``seen``: int64 ids of prompt and output.
    """
    picked = row[seen]
    row[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)


def add_bias(row: torch.Tensor, bias: dict[int, float]) -> None:
    """In place: add ``bias[id]`` to the logits of these ids; ``row``: ``[V]``."""
    parts = sent(
        {"ids": np.array(list(bias), np.int64), "values": np.array(list(bias.values()), np.float32)}, row.device
    )
    row[parts["ids"]] += parts["values"]


def rule_out(row: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    """In place: make these tokens impossible; ``row``: ``[V]``."""
    row.index_fill_(0, indices(np.array(token_ids, np.int64), row.device), _RULED_OUT)


def keep_likely(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """In place: rule out all but the likely tokens of ``row``: ``[V]``.

    Top-k first, then top-p of what is left (Holtzman et al. 2020), then min-p relative to the likeliest
    (Nguyen et al. 2024), as vLLM orders them. Ties are broken by the lower id. At least one token stays.
    ``top_k <= 0``, ``top_p == 1`` and ``min_p == 0`` switch the filters off.
    """
    if device.on_gpu(row):
        from .triton import sampling as gpu

        return gpu.keep_likely(row, temperature, top_k, top_p, min_p)
    order = torch.sort(row, descending=True, stable=True).indices
    scaled = row[order].double() / temperature
    keep = torch.ones(len(row), dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    weights = torch.where(keep, (scaled - scaled[0]).exp(), 0.0)
    if top_p < 1.0:
        mass = weights.cumsum(0)
        keep &= mass - weights < top_p * mass[-1]
    if min_p > 0.0:
        keep &= weights >= min_p * weights[0]
    keep[0] = True
    row[order[~keep]] = _RULED_OUT
