"""Choose the experts of a row and their weights: one program a row.

Invariants: a row's experts are one tile, a group of them a line of it; sums are reductions of that tile, whose shape is
the layer's. What is compared is what the CPU compares: without a correction, and where no scores of a group are added
up, the logits themselves. The greatest are found one after the other, the lowest id first among equals. A NaN is less
than all numbers: ids are always of experts, each once.
"""

from typing import Any

import torch
import triton.language as tl
from triton.language import tensor

from samebit.kernels.layout.options import RoutingOptions, Saved
from samebit.kernels.triton.numeric import aligned, jit, sigmoid
from samebit.kernels.triton.tiles.table import power_of_two

_LEAST = tl.constexpr(float("-inf"))
_SOFTMAX, _NORMALISED_SOFTMAX, _SIGMOID, _NORMALISED_SIGMOID = (tl.constexpr(kind) for kind in range(4))


def route_forward(
    logits: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Implement `Operations.route_forward`."""
    logits = aligned(logits)
    rows, experts = logits.shape
    ids = torch.empty(rows, options.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, options.top_k, dtype=torch.float32, device=logits.device)
    two_best = options.groups > 1 and options.group_score == "best_two"
    if rows:
        _choose[(rows,)](
            logits, logits if correction is None else aligned(correction), ids, weights, options.scale, options.floor,
            experts, options.groups, options.kept_groups, options.top_k, _kind(options), correction is not None,
            two_best, power_of_two(options.groups), power_of_two(experts // options.groups), num_warps=1,
        )  # fmt: skip
    return ids, weights, (logits, ids, weights)


def route_backward(saved: Saved, grad: torch.Tensor, options: RoutingOptions) -> torch.Tensor:
    """Implement `Operations.route_backward`."""
    logits, ids, weights = saved
    rows, experts = logits.shape
    out = torch.empty_like(logits)
    if rows:
        _differentiate[(rows,)](
            logits, ids, weights, aligned(grad), out, options.scale, options.floor, experts, options.top_k,
            _kind(options), power_of_two(experts), num_warps=1,
        )  # fmt: skip
    return out


def _kind(options: RoutingOptions) -> int:
    """Return which of the four kinds of weights the router gives."""
    normalised = options.normalised or options.scores == "softmax_of_chosen"
    return 2 * (options.scores == "sigmoid") + normalised


@jit(do_not_specialize=["scale", "floor"])
def _choose(
    logits: tensor, correction: tensor, ids: tensor, weights: tensor, scale: tensor, floor: tensor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    CORRECTED: tl.constexpr, TWO_BEST: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    SIZE: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, PADDED_GROUPS)[:, None], tl.arange(0, PADDED_SIZE)[None, :]
    free = (group < GROUPS) & (place < SIZE)
    expert = tl.where(free, group * SIZE + place, EXPERTS)  # what pads a line is no expert of the next
    logit = tl.load(logits + row * EXPERTS + expert, mask=free, other=_LEAST)
    keys = logit
    if CORRECTED:
        keys = _scores(logit, KIND) + tl.load(correction + expert, mask=free, other=0.0)
    elif TWO_BEST:
        keys = _scores(logit, KIND)
    keys = tl.where(free & (keys == keys), keys, _LEAST)
    if KEPT < GROUPS:
        free &= _best_groups(keys, GROUPS, KEPT, TWO_BEST, PADDED_GROUPS, PADDED_SIZE)[:, None]
    chosen = expert < 0
    for _ in range(TOP_K):
        here = free & ~chosen
        best = _most(tl.where(here, keys, _LEAST))
        first = tl.min(tl.min(tl.where(here & (keys == best), expert, EXPERTS), axis=1), axis=0)
        chosen |= expert == first
    weight = _weights(logit, chosen, floor, KIND) * scale
    inside = tl.cumsum(chosen.to(tl.int32), axis=1)
    of_groups = tl.sum(chosen.to(tl.int32), axis=1)
    rank = inside + (tl.cumsum(of_groups, axis=0) - of_groups)[:, None] - 1
    tl.store(ids + row * TOP_K + rank, expert, mask=chosen)
    tl.store(weights + row * TOP_K + rank, weight, mask=chosen)


@jit()
def _most(tile: tensor) -> Any:
    """Return the greatest of a tile."""
    return tl.max(tl.max(tile, axis=1), axis=0)


@jit()
def _sum(tile: tensor) -> Any:
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@jit()
def _scores(logit: tensor, KIND: tl.constexpr) -> Any:
    """Return the scores of all experts; 0 where the logit is -inf."""
    if KIND >= _SIGMOID:
        scores = sigmoid(logit)
    else:
        above = tl.exp(logit - _most(logit))
        scores = above / _sum(above)
    return scores


@jit()
def _weights(logit: tensor, chosen: tensor, floor: tensor, KIND: tl.constexpr) -> Any:
    """Return the weights of the chosen, before the layer's factor."""
    if KIND == _NORMALISED_SOFTMAX:
        logit = tl.where(chosen, logit, _LEAST)
    weights = _scores(logit, KIND)
    if KIND == _NORMALISED_SIGMOID:
        weights /= _sum(tl.where(chosen, weights, 0.0)) + floor
    return weights


@jit()
def _best_groups(
    keys: tensor, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO_BEST: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> Any:  # fmt: skip
    """Tell of each group whether it is among the best, the first among equals."""
    group, place = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_SIZE)[None, :]
    score = tl.max(keys, axis=1)
    if TWO_BEST:
        first = tl.min(tl.where(keys == score[:, None], place, PADDED_SIZE), axis=1)
        score += tl.max(tl.where(place == first[:, None], _LEAST, keys), axis=1)
    kept = group < 0
    for _ in range(KEPT):
        here = (group < GROUPS) & ~kept
        best = tl.max(tl.where(here, score, _LEAST), axis=0)
        kept |= group == tl.min(tl.where(here & (score == best), group, GROUPS), axis=0)
    return kept


@jit(do_not_specialize=["scale", "floor"])
def _differentiate(
    logits: tensor, ids: tensor, weights: tensor, grad: tensor, out: tensor, scale: tensor, floor: tensor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a row's gradient; what all weights share of it is summed in the order of the ids."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    logit = tl.load(logits + row * EXPERTS + expert, mask=expert < EXPERTS, other=_LEAST)
    weight, upstream = tl.zeros((PADDED,), tl.float32), tl.zeros((PADDED,), tl.float32)
    chosen = expert < 0
    inner = 0.0
    for choice in range(TOP_K):
        at = row * TOP_K + choice
        mine = expert == tl.load(ids + at)
        own, towards = tl.load(weights + at), tl.load(grad + at)
        weight, upstream = tl.where(mine, own, weight), tl.where(mine, towards, upstream)
        chosen |= mine
        inner += own * towards
    if KIND == _SOFTMAX:
        scores = tl.exp(logit - tl.max(logit, axis=0))
        result = weight * upstream - scores / tl.sum(scores, axis=0) * inner
    elif KIND == _NORMALISED_SOFTMAX:
        result = weight * (upstream - inner / scale)
    else:
        score = sigmoid(logit)
        slope = scale * score * (1.0 - score)
        if KIND == _NORMALISED_SIGMOID:
            slope /= tl.sum(tl.where(chosen, score, 0.0), axis=0) + floor
            upstream -= inner / scale
        result = tl.where(chosen, slope * upstream, 0.0)
    tl.store(out + row * EXPERTS + expert, result, mask=expert < EXPERTS)
