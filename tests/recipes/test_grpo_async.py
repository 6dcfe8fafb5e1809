"""The recipe runs in two processes: tokens of two versions of the weights have each its own version's bits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.kernels import bind, token_logprobs
from samebit.recipes import grpo_async, sampling, tiny_model
from samebit.recipes.importance import Importance
from samebit.recipes.mismatch import MismatchError
from samebit.recipes.previous import PreviousPolicy
from samebit.recipes.settings import OffPolicy
from samebit.recipes.trajectory import Trajectory, collate

Tiny = Callable[..., Any]
STEPS = 5


def test_every_token_has_the_bits_of_its_own_version(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("ray")
    request.getfixturevalue("cluster")
    monkeypatch.setattr(sampling, "reward", lambda text, finished, problem, *_: len(set(text)) / 10)
    more = {"steps": STEPS, "prompts": 8, "samples": 8, "max_tokens": 40, "eval_every": STEPS, "max_num_seqs": 16}
    rows = grpo_async.run(tiny(tmp_path, OffPolicy, **more))
    steps = [row for row in rows if row["step"]]
    assert [row["weight_version"] for row in steps] == list(range(STEPS))
    assert all(row["training/tokens_compared"] > 64 for row in steps)
    assert {row["training/tokens_differing"] for row in steps} == {0}
    assert {row["training/rollout_logprobs_diff_max"] for row in steps} == {0.0}
    assert (steps[0]["staleness/max"], steps[0]["actor/ratio_max"]) == (0, 1.0)
    assert {row["staleness/max"] for row in steps[1:]} == {1}, "one step off policy"
    assert all(0 < row["staleness/mean"] <= 1 for row in steps[1:])
    assert all(row["actor/ratio_max"] > 1.0 and row["actor/ppo_kl"] > 0 for row in steps[1:])
    assert all(row["sync/sent_bytes"] > 0 and row["sync/changed_tensors"] > 30 for row in steps)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "seed0" / "policy" / "model.safetensors").is_file()


def test_the_previous_policy_is_the_one_before_the_update() -> None:
    tokenizer = tiny_model.build_tokenizer()
    policy = bind(tiny_model.build_model(tokenizer, seed=0, num_hidden_layers=1))
    previous = PreviousPolicy(policy)
    batch = collate([Trajectory([1, 5], [6, 7], [-1.0, -1.0], versions=[3, 3])], pad_id=0)
    before = token_logprobs(policy, batch.input_ids).detach()
    previous.keep(policy, 3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert torch.equal(previous.logprobs(batch, 3, 1.0), before)
    assert not torch.equal(token_logprobs(policy, batch.input_ids), before)
    with pytest.raises(MismatchError, match="sampled under version 2 of the weights; kept is version 3"):
        previous.logprobs(batch, 2, 1.0)


def test_importance_by_hand() -> None:
    rows = [Trajectory([1], [2, 3], [math.log(0.5), math.log(0.4)], 1.0), Trajectory([1], [2], [math.log(0.5)], -1.0)]
    importance = Importance()
    assert importance.metrics() == {}
    # Ratios 1.5 (clipped), 0.5 (not: the advantage is positive) and 0.5 (clipped).
    logprobs = torch.log(torch.tensor([[0.75, 0.2], [0.25, 0.9]]))
    importance.add(collate(rows, 0), logprobs, clip=0.2)
    metrics = importance.metrics()
    assert metrics["actor/ratio_mean"] == pytest.approx(2.5 / 3)
    assert metrics["actor/ratio_max"] == pytest.approx(1.5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    kl = (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    assert metrics["actor/ppo_kl"] == pytest.approx(kl / 3)
