"""How far rollout and trainer are from each other in a run, as verl measures it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISMATCH = (
    "training/rollout_probs_diff_max",
    "rollout_corr/rollout_rs_token_k1_max",
    "rollout_corr/rollout_rs_token_k1_min",
)


def worst(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest of all, absolute; NaN if one of them is, None of no steps."""
    found = [abs(step[metric]) for step in steps for metric in MISMATCH]
    if any(map(math.isnan, found)):
        return math.nan
    return max(found, default=None)
