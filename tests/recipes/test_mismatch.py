"""The claim's own check works: one bit in one token is found, reported, and stops the update."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from samebit.kernels import bind, token_logprobs
from samebit.recipes import tiny_model
from samebit.recipes.learner import Learner
from samebit.recipes.mismatch import Mismatch, MismatchError, require_none
from samebit.recipes.settings import Settings
from samebit.recipes.trajectory import Batch, Trajectory, collate
from samebit.weight_sync import SyncReport


def one_row(logprobs: list[float]) -> Batch:
    return collate([Trajectory([1, 2], [3] * len(logprobs), logprobs)], pad_id=0)


def test_equal_bits_are_no_mismatch() -> None:
    mismatch = Mismatch()
    mismatch.add(one_row([-0.5, -1.5]), torch.tensor([[9.0, -0.5, -1.5]]), 0)
    assert (mismatch.tokens, mismatch.differing, mismatch.logprobs_diff_max) == (2, 0, 0.0)
    require_none(1, mismatch.metrics())


@pytest.mark.parametrize("other", [float(np.nextafter(np.float32(-1.5), np.float32(0))), -3.0, math.nan])
def test_any_other_bit_is_one(other: float) -> None:
    mismatch = Mismatch()
    mismatch.add(one_row([-0.5, -1.5]), torch.tensor([[9.0, -0.5, other]]), 0)
    assert (mismatch.tokens, mismatch.differing) == (2, 1)
    with pytest.raises(MismatchError, match="step 7: 1 of 2 sampled tokens"):
        require_none(7, mismatch.metrics())


def test_nan_on_both_sides_is_one() -> None:
    mismatch = Mismatch()
    mismatch.add(one_row([math.nan]), torch.tensor([[0.0, math.nan]]), 0)
    assert mismatch.differing == 1


def test_sizes_of_the_difference() -> None:
    mismatch = Mismatch()
    mismatch.add(one_row([math.log(0.5), math.log(0.25)]), torch.tensor([[0.0, math.log(0.25), math.log(0.25)]]), 0)
    assert mismatch.logprobs_diff_max == pytest.approx(math.log(2))
    assert mismatch.probs_diff_max == pytest.approx(0.25)
    found = mismatch.metrics()
    assert found["training/rollout_logprobs_diff_mean"] == pytest.approx(math.log(2) / 2)
    assert found["actor/entropy_of_samples"] == pytest.approx(math.log(4))


def test_only_tokens_of_that_version_are_compared() -> None:
    mismatch = Mismatch()
    batch = collate([Trajectory([1], [3, 3], [-0.5, -1.5], versions=[4, 5])], pad_id=0)
    mismatch.add(batch, torch.tensor([[9.0, -1.5]]), 5)
    assert (mismatch.tokens, mismatch.differing, mismatch.logprobs_diff_max) == (1, 0, 0.0)
    mismatch.add(batch, torch.tensor([[-0.5, 9.0]]), 4)
    assert (mismatch.tokens, mismatch.differing, mismatch.logprobs_diff_max) == (2, 0, 0.0)
    mismatch.add(batch, torch.tensor([[9.0, 9.0]]), 4)
    assert (mismatch.tokens, mismatch.differing) == (3, 1)


class RecordingUpdate:
    """Stands in for a worker: counts the updates."""

    def __init__(self) -> None:
        self.updates = 0

    def __call__(self, change: Callable[[], object]) -> SyncReport:
        self.updates += 1
        change()
        return SyncReport(self.updates, tensors=1, bytes=0, seconds=0.0, changed=("weight",), casts=())


@pytest.mark.parametrize("flip", [False, True])
def test_the_learner_updates_only_when_every_token_agrees(flip: bool) -> None:
    tokenizer = tiny_model.build_tokenizer()
    policy = bind(tiny_model.build_model(tokenizer, seed=0, num_hidden_layers=1))
    before = policy.lm_head.weight.detach().clone()
    prompt, sampled = [1, 5, 6], [7, 8, 2]
    logprobs = token_logprobs(policy, torch.tensor([prompt + sampled]))[0, 2:].tolist()
    wrong = [float(np.nextafter(np.float32(logprobs[0]), np.float32(0))), *logprobs[1:]]
    rows = [
        Trajectory(prompt, sampled, logprobs, 1.0, [0, 0, 0]),
        Trajectory(prompt, sampled, logprobs, -0.5, [0, 0, 0]),
        Trajectory(prompt, sampled, wrong if flip else logprobs, 0.0, [0, 0, 0]),
    ]
    update = RecordingUpdate()
    row = Learner(policy, update, tokenizer, Settings()).step(1, rows)
    assert row["training/tokens_compared"] == 9
    assert row["training/tokens_differing"] == int(flip)
    assert update.updates == int(not flip)
    assert torch.equal(before, policy.lm_head.weight) == flip
    Learner(policy, update, tokenizer, Settings(), exact=False).step(2, rows)
    assert update.updates == 1 + int(not flip), "who studies differences learns from them"
