"""What samebit adds to the metrics of a step of verl's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue

_MOMENTARY = (
    "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_evictable", "weight_version",
    "states_used", "states_total",
)  # fmt: skip
"""What is not counted from the start on."""


def of_servers(before: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The servers' numbers, summed; counters as they grew since `before`.

    `samebit/prefix_hit_rate`: the share of prompt tokens that were not computed, because they were cached.
    """
    totals: dict[str, float] = {}
    for old, new in zip(before, now, strict=True):
        for name, value in new.items():
            grown = value if name in _MOMENTARY else value - old.get(name, 0.0)
            totals[f"samebit/{name}"] = totals.get(f"samebit/{name}", 0.0) + grown
    skipped = totals.get("samebit/prefill_tokens_skipped", 0.0)
    prompt_tokens = skipped + totals.get("samebit/prefill_tokens_computed", 0.0)
    totals["samebit/prefix_hit_rate"] = skipped / prompt_tokens if prompt_tokens else 0.0
    return totals


def on_policy(batch: Any, step: int) -> dict[str, float]:
    """How the rollout's and the trainer's log-probabilities differ where they should not: in trajectories that were
    sampled, from the first token to the last, under the weights that this step trains.

    Args:
        batch: verl's keys and tags of the trajectories of this step.
        step: the trainer's; its weights are those after the step before.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if _is_fresh(tag, step - 1)]
    metrics = {"samebit/on_policy/trajectories": float(len(keys))}
    if keys:
        fields = ["rollout_log_probs", "old_log_probs"]
        data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        rollout, trainer = (data[name].values() for name in fields)
        metrics["samebit/on_policy/tokens"] = float(len(rollout))
        metrics["samebit/on_policy/tokens_differing"] = float((rollout != trainer).sum())
        metrics["samebit/on_policy/logprobs_diff_max"] = float((rollout - trainer).abs().max())
    return metrics


def _is_fresh(tag: Mapping[str, Any], weights: int) -> bool:
    return not tag.get("is_padding", False) and tag["min_global_steps"] == tag["max_global_steps"] == weights
