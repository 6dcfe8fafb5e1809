"""Choose the experts of a row and their weights, on the CPU; a row is one thread's.

Invariants: without a correction, and where no scores of a group are added up, the logits themselves are compared: the
order of the scores without the ties that rounding makes of them. A sum over all experts is one of sixteen lanes, a sum
over the chosen goes in order of their ids.

T rows, E experts, k the chosen ones: logits are ``[T, E]``, ids and weights ``[T, k]``.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import SharedKernel, array
from samebit.kernels.cpu.base.numeric import exp, sigmoid
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.options import RoutingOptions, Saved

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LEAST = np.float32(-np.inf)


class Rule(NamedTuple):
    """Holds the options of a router as a kernel takes them: what is yes or no as 1 or 0, scale and floor float32."""

    scale: Any
    floor: Any
    sigmoid: int
    normalised: int
    compare_logits: int
    top_k: int
    groups: int
    kept_groups: int
    two_best: int


RULE = len(Rule._fields) - 2
"""Counts the integers of a `Rule`; scale and floor stand before them."""


def rule_of(options: RoutingOptions, corrected: bool) -> Rule:
    """Return the rule of a router."""
    two_best = options.groups > 1 and options.group_score == "best_two"
    return Rule(
        scale=np.float32(options.scale),
        floor=np.float32(options.floor),
        sigmoid=int(options.scores == "sigmoid"),
        normalised=int(options.normalised or options.scores == "softmax_of_chosen"),
        compare_logits=int(not (corrected or two_best)),
        top_k=options.top_k,
        groups=options.groups,
        kept_groups=options.kept_groups,
        two_best=int(two_best),
    )


def route_forward(
    logits: torch.Tensor, correction: torch.Tensor | None, options: RoutingOptions
) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Implement `Operations.route_forward`."""
    rows, experts = logits.shape
    ids = torch.empty(rows, options.top_k, dtype=torch.int32, device="cpu")
    weights = torch.empty(rows, options.top_k, dtype=torch.float32, device="cpu")
    added = torch.zeros(experts, dtype=torch.float32, device="cpu") if correction is None else correction.contiguous()
    rule = rule_of(options, correction is not None)
    _choose(4 * logits.numel(), array(logits), array(added), rule, array(ids), array(weights))
    return ids, weights, (logits, ids, weights)


def route_backward(saved: Saved, grad: torch.Tensor, options: RoutingOptions) -> torch.Tensor:
    """Implement `Operations.route_backward`."""
    logits, ids, weights = saved
    out = torch.empty_like(logits)
    rule = rule_of(options, False)
    given = (array(part.contiguous()) for part in (logits, ids, weights, grad))
    _differentiate(4 * logits.numel(), *given, rule, array(out))
    return out


@inlined_part
def choose_rows(threads: int, logits: Any, correction: Any, rule: Any, ids: Any, weights: Any) -> None:
    """Write ids and weights of the experts of all rows, as arrays."""
    share_out(_choose_row, len(logits), threads, (logits, correction, rule, ids, weights))


@kernel_part
def _choose_row(row: int, logits: Any, correction: Any, rule: Any, ids: Any, weights: Any) -> None:
    own, chosen = logits[row], ids[row]
    keys = own if rule.compare_logits else _scores(own, rule.sigmoid) + correction
    if rule.groups > 1:
        keys = _of_best_groups(keys, rule)
    _greatest(keys, chosen)
    _sort(chosen)
    _weigh(own, chosen, rule, weights[row])


def _differentiate_rows(threads: int, logits: Any, ids: Any, weights: Any, grad: Any, rule: Any, out: Any) -> None:
    share_out(_differentiate_row, len(logits), threads, (logits, ids, weights, grad, rule, out))


@kernel_part
def _differentiate_row(row: int, logits: Any, ids: Any, weights: Any, grad: Any, rule: Any, out: Any) -> None:
    own, chosen, to = logits[row], ids[row], out[row]
    inner = _ZERO  # <grad, weights>: what all weights share
    for place in range(rule.top_k):
        inner += grad[row, place] * weights[row, place]
    if rule.sigmoid or rule.normalised:
        to[:] = _ZERO
    else:
        scores = _scores(own, False)
        for e in range(len(own)):
            to[e] = -scores[e] * inner
    total = _sum_of_sigmoids(own, chosen, rule.floor) if rule.sigmoid and rule.normalised else _ONE
    for place in range(rule.top_k):
        e, upstream, weight = chosen[place], grad[row, place], weights[row, place]
        if rule.sigmoid:
            score = sigmoid(own[e])
            if rule.normalised:
                upstream -= inner / rule.scale
            to[e] = rule.scale * upstream / total * score * (_ONE - score)
        elif rule.normalised:
            to[e] = weight * (upstream - inner / rule.scale)
        else:
            to[e] += weight * upstream


def _choose_all(threads: int, logits: Any, correction: Any, rule: Any, ids: Any, weights: Any) -> None:
    choose_rows(threads, logits, correction, rule, ids, weights)


_choose = SharedKernel(_choose_all)
_differentiate = SharedKernel(_differentiate_rows)


@kernel_part
def _scores(logits: Any, by_sigmoid: bool) -> Any:
    """Return the scores of all experts."""
    scores = np.empty_like(logits)
    if by_sigmoid:
        for e in range(len(logits)):
            scores[e] = sigmoid(logits[e])
        return scores
    peak = _peak(logits)
    for e in range(len(logits)):
        scores[e] = exp(logits[e] - peak)
    total = _sum_in_lanes(scores)
    for e in range(len(logits)):
        scores[e] = scores[e] / total
    return scores


@kernel_part
def _peak(logits: Any) -> Any:
    peak = _LEAST
    for e in range(len(logits)):
        peak = max(peak, logits[e])
    return peak


@kernel_part
def _sum_in_lanes(values: Any) -> Any:
    lanes = np.zeros(LANES, np.float32)
    for first in range(0, len(values), LANES):
        for lane in range(min(LANES, len(values) - first)):
            lanes[lane] += values[first + lane]
    total = _ZERO
    for lane in range(LANES):
        total += lanes[lane]
    return total


@kernel_part
def _of_best_groups(keys: Any, rule: Any) -> Any:
    """Return the keys of the experts in the best groups, those of the others being less than all."""
    size = len(keys) // rule.groups
    scores = np.empty(rule.groups, np.float32)
    for group in range(rule.groups):
        best = second = _LEAST
        for e in range(group * size, (group + 1) * size):
            second = max(second, min(best, keys[e]))
            best = max(best, keys[e])
        scores[group] = best + second if rule.two_best else best
    kept = np.empty(rule.kept_groups, np.int32)
    _greatest(scores, kept)
    found = np.full_like(keys, _LEAST)
    for group in kept:
        found[group * size : (group + 1) * size] = keys[group * size : (group + 1) * size]
    return found


@kernel_part
def _greatest(keys: Any, chosen: Any) -> None:
    """Write the places of the greatest keys, as many as ``chosen`` holds, greatest first, the first among equals."""
    filled = 0
    for e in range(len(keys)):
        if filled < len(chosen):
            filled += 1
        elif not keys[e] > keys[chosen[filled - 1]]:
            continue
        place = filled - 1
        while place > 0 and keys[e] > keys[chosen[place - 1]]:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = e


@kernel_part
def _sort(chosen: Any) -> None:
    """Put a few ids in ascending order."""
    for last in range(1, len(chosen)):
        e, place = chosen[last], last
        while place > 0 and chosen[place - 1] > e:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = e


@kernel_part
def _weigh(logits: Any, chosen: Any, rule: Any, weights: Any) -> None:
    """Write the weights of the chosen."""
    if rule.sigmoid:
        total = _sum_of_sigmoids(logits, chosen, rule.floor) if rule.normalised else _ONE
        for place, e in enumerate(chosen):
            weights[place] = sigmoid(logits[e]) / total * rule.scale
        return
    peak = _LEAST
    if rule.normalised:
        for e in chosen:
            peak = max(peak, logits[e])
    else:
        peak = _peak(logits)
    for place, e in enumerate(chosen):
        weights[place] = exp(logits[e] - peak)
    total = _ZERO
    if rule.normalised:
        for place in range(len(chosen)):
            total += weights[place]
    else:
        scores = np.empty_like(logits)
        for e in range(len(logits)):
            scores[e] = exp(logits[e] - peak)
        total = _sum_in_lanes(scores)
    for place in range(len(chosen)):
        weights[place] = weights[place] / total * rule.scale


@kernel_part
def _sum_of_sigmoids(logits: Any, chosen: Any, floor: Any) -> Any:
    total = _ZERO
    for e in chosen:
        total += sigmoid(logits[e])
    return total + floor
