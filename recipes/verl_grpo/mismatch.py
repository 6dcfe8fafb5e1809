"""Read how far rollout and trainer differ in a run, as verl measures it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISMATCH = (
    "training/rollout_probs_diff_max",
    "rollout_corr/rollout_rs_token_k1_max",
    "rollout_corr/rollout_rs_token_k1_min",
)

PAIRS = "samebit/on_policy/routing_differing"
"""Pairs of a token and an expert of the rollout's that the trainer's forward lacks; of models with routed experts."""


def worst(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the largest absolute mismatch: NaN if one is, None without steps or where a step lacks a metric.

    Another expert for a token is a mismatch too.
    """
    if not all(metric in step for step in steps for metric in MISMATCH):
        return None
    found = [abs(step[metric]) for step in steps for metric in (*MISMATCH, PAIRS) if metric in step]
    if any(map(math.isnan, found)):
        return math.nan
    return max(found, default=None)
