"""Several optimizer steps learn from one batch: it is compared before the first, and old probabilities stay old."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.kernels import bind, token_logprobs
from samebit.recipes import tiny_model
from samebit.recipes.learner import Learner
from samebit.recipes.metrics import Row
from samebit.recipes.previous import PreviousPolicy
from samebit.recipes.settings import OffPolicy, OnPolicy
from samebit.recipes.trajectory import Trajectory

from .test_mismatch import RecordingUpdate

PROMPT = [1, 5, 6]
SAMPLED = [[7, 8, 2], [9, 2], [3, 4, 5, 2], [6, 6, 2]]
ADVANTAGES = [1.0, -0.5, 0.75, -1.0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_model.build_tokenizer()


@pytest.fixture(scope="module")
def untrained(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return bind(tiny_model.build_model(tokenizer, seed=0, num_hidden_layers=1))


@pytest.fixture
def rows(untrained: PreTrainedModel) -> list[Trajectory]:
    """Return four prompts of one sample each, with the trainer's own log-probabilities."""
    samples = zip(SAMPLED, ADVANTAGES, strict=True)
    return [Trajectory(PROMPT, ids, own(untrained, ids), advantage, [0] * len(ids)) for ids, advantage in samples]


@torch.no_grad()
def own(policy: PreTrainedModel, ids: list[int]) -> list[float]:
    return token_logprobs(policy, torch.tensor([PROMPT + ids]))[0, len(PROMPT) - 1 :].tolist()  # type: ignore[no-any-return]


class Run:
    """Learns once from the rows, with weights and optimizer of its own."""

    def __init__(
        self, untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[Trajectory],
        *, updates: int, correction: str = "clip", exact: bool = True,
    ) -> None:  # fmt: skip
        self.policy = bind(copy.deepcopy(untrained))
        self.update = RecordingUpdate()
        settings = OnPolicy(correction=correction, updates=updates, prompts=4, lr=0.05)
        learner = Learner(self.policy, self.update, tokenizer, settings, exact=exact, updates=updates)
        self.row: Row = learner.step(5, rows)

    def same_weights(self, other: "Run") -> bool:
        pairs = zip(self.policy.parameters(), other.policy.parameters(), strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


def test_each_update_learns_from_its_share(
    untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[Trajectory]
) -> None:
    found = Run(untrained, tokenizer, rows, updates=2)
    assert found.update.updates == 2
    assert (found.row["training/tokens_compared"], found.row["training/tokens_differing"]) == (12, 0)
    # Tokens of each share, by the updates before it: 3 + 2, then 4 + 3.
    assert (found.row["staleness/mean"], found.row["staleness/max"]) == (7 / 12, 1)
    assert found.row["actor/ppo_kl"] > 0.0, "the second share is learned from with weights that have moved"
    assert not found.same_weights(Run(untrained, tokenizer, rows, updates=1))


@pytest.mark.parametrize("place", range(4))
def test_a_token_that_differs_in_any_share_stops_all_updates(
    untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[Trajectory], place: int
) -> None:
    first, *others = rows[place].rollout_logprobs
    rows[place] = replace(
        rows[place], rollout_logprobs=[float(np.nextafter(np.float32(first), np.float32(0))), *others]
    )
    found = Run(untrained, tokenizer, rows, updates=4)
    assert found.update.updates == 0
    assert found.row["training/tokens_differing"] == 1


def test_old_probabilities_are_those_before_the_first_update(
    untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[Trajectory]
) -> None:
    """Old probabilities are the rollout's where that is exact, and without a correction always the trainer's own."""
    exact = Run(untrained, tokenizer, rows, updates=4)
    assert exact.same_weights(Run(untrained, tokenizer, rows, updates=4, correction="none"))
    other = [replace(row, rollout_logprobs=[one - 0.3 for one in row.rollout_logprobs]) for row in rows]
    assert exact.same_weights(Run(untrained, tokenizer, other, updates=4, correction="none", exact=False))
    assert not exact.same_weights(Run(untrained, tokenizer, other, updates=4, exact=False))


@pytest.mark.parametrize(("off", "truncated"), [(0.3, 0.0), (1.0, 1.0)])
def test_clipped_are_the_tokens_whose_ratio_the_loss_cuts(
    untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[Trajectory], off: float, truncated: float
) -> None:
    """The share of clipped tokens counts those whose ratio the loss cuts: all ratios are e**.3, beyond 1 + --clip, or
    e, beyond --truncation too.
    """
    other = [replace(row, rollout_logprobs=[one - off for one in row.rollout_logprobs]) for row in rows]
    found = {
        correction: Run(untrained, tokenizer, other, updates=1, correction=correction, exact=False).row
        for correction in ("clip", "truncate", "none")
    }
    shares = {correction: row["actor/pg_clipfrac"] for correction, row in found.items()}
    # --clip cuts what grows of a positive advantage alone.
    assert shares == {"clip": 7 / 12, "truncate": truncated, "none": 0.0}


@pytest.mark.parametrize("correction", ["clip", "none"])
def test_one_step_off_policy_nothing_is_clipped_without_a_correction(
    correction: str, untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[Trajectory]
) -> None:
    policy = bind(copy.deepcopy(untrained))
    settings = OffPolicy(correction=correction, lr=0.05)
    learner = Learner(policy, RecordingUpdate(), tokenizer, settings, PreviousPolicy(policy))
    found = [learner.step(5, rows) for _ in range(2)][1]
    assert (found["training/tokens_differing"], found["staleness/max"]) == (0, 1)
    assert found["actor/ratio_max"] > 1.2
    assert (found["actor/pg_clipfrac"] > 0.0) == (correction == "clip")


@pytest.mark.parametrize("updates", [0, -1, 3, 64])
def test_updates_that_do_not_divide_the_prompts_are_refused(updates: int) -> None:
    with pytest.raises(ValueError, match=rf"--updates must divide --prompts \(32\), got {updates}"):
        OnPolicy(updates=updates)
