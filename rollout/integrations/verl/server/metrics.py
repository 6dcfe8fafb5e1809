"""Make what samebit adds to the metrics of a step of verl's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import transfer_queue
from torch import Tensor
from verl import DataProto

from samebit.rollout.integrations.verl.trainer.routing import COMPARED, DIFFERING

_MOMENTARY = (
    "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_evictable", "states_used",
    "states_total", "draft_blocks_total", "draft_blocks_free",
)  # fmt: skip
"""Names the figures that are not counted from the start on."""

_VERSION = "weight_version"
"""Names the figure that is no amount: of several servers the oldest one's is taken."""

_SPAN = ("min_global_steps", "max_global_steps")
"""Gives verl's names of the oldest and the newest weights of a trajectory."""


_LOGPROBS = ("rollout_log_probs", "old_log_probs")
"""Names the rollout's log-probabilities and the trainer's; the first are 0 where a token was not sampled but given by a
tool."""


def of_servers(before: Sequence[Mapping[str, float]], now: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sum the servers' numbers; counters as they grew since `before`. Of `weight_version` take the smallest.

    `samebit/prefix_hit_rate`: the share of prompt tokens that were not computed, because they were cached.
    """
    totals: dict[str, float] = {}
    for old, new in zip(before, now, strict=True):
        for name, value in new.items():
            if name == _VERSION:
                continue
            grown = value if name in _MOMENTARY else value - old.get(name, 0.0)
            totals[f"samebit/{name}"] = totals.get(f"samebit/{name}", 0.0) + grown
    versions = [new[_VERSION] for new in now if _VERSION in new]
    if versions:
        totals[f"samebit/{_VERSION}"] = min(versions)
    skipped = totals.get("samebit/prefill_tokens_skipped", 0.0)
    prompt_tokens = skipped + totals.get("samebit/prefill_tokens_computed", 0.0)
    totals["samebit/prefix_hit_rate"] = skipped / prompt_tokens if prompt_tokens else 0.0
    return totals


def on_policy(batch: Any, step: int, *, with_routing: bool = False) -> dict[str, float]:
    """Compare the rollout's log-probabilities with the trainer's where they should agree: in trajectories that were
    sampled, from the first token to the last, under the weights that this step trains.

    Args:
        batch: verl's keys and tags of the trajectories of this step.
        step: the trainer's; its weights are those after the step before.
        with_routing: the servers reported the experts of each token, and the trainer has counted those that it lacks.
    """
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    keys = [key for key, tag in tags.items() if not tag.get("is_padding", False) and _is_fresh(tag, {step - 1})]
    if not keys:
        return _compared(0)
    counted = [COMPARED, DIFFERING] if with_routing else []
    fields = [*_LOGPROBS, "response_mask", *counted]
    data = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    sampled = data["response_mask"].values().bool()
    metrics = _compared(len(keys), *(data[name].values()[sampled] for name in _LOGPROBS))
    return metrics | {f"samebit/on_policy/{name}": float(data[name].values().sum()) for name in counted}


def on_policy_of(data: DataProto, weights: Set[int]) -> dict[str, float]:
    """Compare both sides' log-probabilities in a batch that holds its tensors. weights: versions that are on policy."""
    tags = ({name: data.non_tensor_batch[name][row] for name in _SPAN} for row in range(len(data)))
    fresh = torch.tensor([_is_fresh(tag, weights) for tag in tags])
    tokens = data.batch["response_mask"].bool() & fresh[:, None]
    return _compared(int(fresh.sum()), *(data.batch[name][tokens] for name in _LOGPROBS))


def _compared(trajectories: int, *logprobs: Tensor) -> dict[str, float]:
    """Compare two sets of log-probabilities. logprobs: the rollout's and the trainer's, of the same tokens, float32;
    compared by their bits."""
    metrics = {"samebit/on_policy/trajectories": float(trajectories)}
    if trajectories:
        rollout, trainer = logprobs
        apart = (rollout - trainer).abs()
        metrics["samebit/on_policy/tokens"] = float(len(rollout))
        metrics["samebit/on_policy/tokens_differing"] = float((_bits(rollout) != _bits(trainer)).sum())
        metrics["samebit/on_policy/logprobs_diff_max"] = float(apart.max()) if len(apart) else 0.0
    return metrics


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _is_fresh(tag: Mapping[str, Any], weights: Set[int]) -> bool:
    first, last = (tag[name] for name in _SPAN)
    return first == last and last in weights
