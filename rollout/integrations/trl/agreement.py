"""Compare the trainer's log-probabilities with those that the rollout reported, bit by bit."""

from __future__ import annotations

import logging
import math

import torch

logger = logging.getLogger(__name__)

DIFFERENCE = "samebit/rollout_probs_diff_max"
COMPARED = "samebit/tokens_compared"
DIFFERING = "samebit/tokens_differing"
OF_TRL = "sampling/sampling_logp_difference/max"
"""The name under which TRL's own trainers log the largest difference of log-probabilities, when they use vLLM."""

_NOTHING = (0, 0, 0.0, 0.0)
"""Stands for no tokens compared, none that differ, and the largest differences of those."""


class Agreement:
    """Counts what was compared: all since the trainer was built; and since the last log, in training and in evaluation
    each by itself, as TRL counts its own metrics."""

    def __init__(self) -> None:
        self.compared = 0
        self.differing = 0
        self.probs_diff_max = 0.0
        self.logprobs_diff_max = 0.0
        self._since = {True: _NOTHING, False: _NOTHING}

    def add(self, rollout: torch.Tensor, trainer: torch.Tensor, sampled: torch.Tensor, *, training: bool) -> None:
        """Compare float32 log-probabilities of one shape, where `sampled` (bool) says that the rollout has one."""
        ours, theirs = (one.detach().float()[sampled] for one in (rollout, trainer))
        count = int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
        probs = _largest(ours.exp() - theirs.exp())
        logprobs = _largest(ours - theirs)
        if count and not self.differing:
            logger.warning(
                "%d of %d tokens have another log-probability in the trainer than in the rollout (largest difference "
                "of probabilities: %g); see docs/trl.md",
                count,
                len(ours),
                probs,
            )
        compared, differing, worst_probs, worst_logprobs = self._since[training]
        worst = _max(worst_probs, probs), _max(worst_logprobs, logprobs)
        self._since[training] = compared + len(ours), differing + count, *worst
        self.compared += len(ours)
        self.differing += count
        self.probs_diff_max = _max(self.probs_diff_max, probs)
        self.logprobs_diff_max = _max(self.logprobs_diff_max, logprobs)

    def take_metrics(self, *, training: bool) -> dict[str, float]:
        """Return the metrics since the last call for training, or for evaluation, which have `eval_` in front of their
        names; none where nothing was compared."""
        compared, differing, probs, logprobs = self._since[training]
        self._since[training] = _NOTHING
        if not compared:
            return {}
        counts = {COMPARED: float(compared), DIFFERING: float(differing)}
        metrics = {**counts, DIFFERENCE: probs, OF_TRL: logprobs}
        return metrics if training else {f"eval_{name}": value for name, value in metrics.items()}


def _largest(differences: torch.Tensor) -> float:
    """Return the largest absolute value, NaN if there is one."""
    return float(differences.abs().max()) if differences.numel() else 0.0


def _max(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
