"""Advantages and loss are those worked out by hand, and batches hold what they should."""

import math

import pytest
import torch

from samebit.recipes.grpo_loss import group_advantages, grpo_loss, truncated_loss
from samebit.recipes.trajectory import Trajectory, collate, micro_batches


def test_advantages_of_a_group_by_hand() -> None:
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    # mean 1/4; standard deviation sqrt((9/16 + 3/16) / 3) = 1/2
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / 0.5001
    torch.testing.assert_close(advantages[0], expected)
    assert advantages[1].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_loss_by_hand() -> None:
    # Row 0 (advantage 2): ratios 1 and 1.5, the second clipped to 1.2. Row 1 (advantage -1): ratio 0.5, clipped to
    # 0.8; the pessimistic choice is the lower objective, -0.8. The masked entry would be huge if it counted.
    rollout = torch.log(torch.tensor([[0.2, 0.2], [0.4, 0.1]]))
    logprobs = torch.log(torch.tensor([[0.2, 0.3], [0.2, 0.9]])).requires_grad_()
    sampled = torch.tensor([[True, True], [True, False]])
    loss = grpo_loss(logprobs, rollout, torch.tensor([2.0, -1.0]), sampled, total_tokens=3, clip=0.2)
    assert loss.item() == pytest.approx(-(2.0 + 2.4 - 0.8) / 3)
    loss.backward()
    # Only the unclipped token has a gradient: -(advantage * ratio) / tokens.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-2.0 / 3, 0.0], [0.0, 0.0]]))


def test_truncated_loss_by_hand() -> None:
    # Row 0 (advantage 2): weights 1.5 and 3, cut to 2. Row 1 (advantage -1): weight 0.5. The masked entry is none.
    rollout = torch.log(torch.tensor([[0.2, 0.1], [0.4, 0.1]]))
    logprobs = torch.log(torch.tensor([[0.3, 0.3], [0.2, 0.9]])).requires_grad_()
    sampled = torch.tensor([[True, True], [True, False]])
    loss = truncated_loss(logprobs, rollout, torch.tensor([2.0, -1.0]), sampled, total_tokens=3, most=2.0)
    assert loss.item() == pytest.approx(-(3.0 + 4.0 - 0.5) / 3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-3.0 / 3, -4.0 / 3], [0.5 / 3, 0.0]]))


def test_with_an_exact_rollout_every_correction_is_the_same_loss_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(5, 9, generator=generator)
    sampled, advantages = torch.rand(5, 9, generator=generator) > 0.3, torch.randn(5, generator=generator)
    found = []
    for loss in (
        lambda now: grpo_loss(now, rollout, advantages, sampled, 31, 0.2),
        lambda now: truncated_loss(now, rollout, advantages, sampled, 31, 2.0),
        lambda now: grpo_loss(now, now.detach(), advantages, sampled, 31, 0.2),
    ):
        logprobs = rollout.clone().requires_grad_()
        total = loss(logprobs)
        total.backward()
        found.append((total.detach(), logprobs.grad))
    for total, gradient in found[1:]:
        assert torch.equal(total, found[0][0])
        assert torch.equal(gradient, found[0][1])


def test_entries_that_were_not_sampled_give_no_nan() -> None:
    logprobs = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    loss = grpo_loss(
        logprobs, torch.tensor([[-1.0, 0.0]]), torch.ones(1), torch.tensor([[True, False]]), total_tokens=1, clip=0.2
    )
    loss.backward()
    assert loss.item() == -1.0
    assert torch.isfinite(logprobs.grad).all()


def test_collate_marks_the_entries_that_predict_sampled_tokens() -> None:
    batch = collate([Trajectory([5, 6], [7, 8, 9], [-1.0, -2.0, -3.0], 0.5), Trajectory([5], [4], [-4.0], -0.5)], 0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 4, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.sampled.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert batch.rollout_logprobs.tolist() == [[0.0, -1.0, -2.0, -3.0], [-4.0, 0.0, 0.0, 0.0]]
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_a_batch_goes_to_a_device_as_a_whole() -> None:
    batch = collate([Trajectory([5, 6], [7, 8], [-1.0, -2.0], 0.5)], 0).on(torch.device("meta"))
    assert {part.device.type for part in vars(batch).values()} == {"meta"}


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    rows = [Trajectory([1], list(range(10, 10 + n)), [-1.0] * n, float(n)) for n in (3, 1, 9, 2, 2, 7, 20)]
    batches = list(micro_batches(rows, max_tokens=18, pad_id=0))
    # Longest first; the row of 21 tokens is over the budget by itself.
    assert [batch.advantages.tolist() for batch in batches] == [[20.0], [9.0], [7.0, 3.0], [2.0, 2.0, 1.0]]
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 21), (1, 10), (2, 8), (3, 3)]
