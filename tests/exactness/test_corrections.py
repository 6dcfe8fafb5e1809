"""Corrections that routers choose by and do not hold themselves, those of their blocks and parameters of a module
inside, are those of the weights now, in rollouts with a cold cache and with a warm one.
"""

from __future__ import annotations

import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from .compare import assert_matches_trainer
from .families import bound_model, make_model, token_ids
from .test_expert_routes import ASKED, check_all

SEQUENCES = token_ids(1, 2, 17, 70, 16)
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
CORRECTIONS = {
    "MiniMaxM2": "mlp.e_score_correction_bias",
    "Lfm2Moe": "feed_forward.expert_bias",
    "Ernie4_5_Moe": "mlp.gate.moe_statics.e_score_correction_bias",
}


@pytest.mark.parametrize("family", CORRECTIONS)
def test_routes_cold_and_warm(family: str) -> None:
    config = RolloutConfig(max_num_batched_tokens=40, max_num_seqs=4)
    with RolloutWorker(bound_model(family, torch.bfloat16), config=config) as worker:
        for _ in range(2):
            outputs = worker.generate(token_ids(70, 3, 129), ASKED)
            check_all(worker.module, outputs)
        assert outputs[2].num_cached_tokens


@pytest.mark.parametrize("family", CORRECTIONS)
def test_a_correction_that_changes_moves_tokens_to_other_experts_and_is_seen(family: str) -> None:
    model, name = bind(make_model(family)), f"model.layers.1.{CORRECTIONS[family]}"
    with RolloutWorker(model) as worker:
        before = worker.generate(SEQUENCES, PARAMS)
        with worker.weight_update() as update, torch.no_grad():
            model.state_dict()[name].add_(torch.linspace(-0.3, 0.3, 15))
        assert update.report is not None
        assert update.report.changed == (name,)
        after = worker.generate(SEQUENCES, PARAMS)
        assert_matches_trainer(model, after, [PARAMS] * 5)
        assert [out.samples[0].logprobs for out in after] != [out.samples[0].logprobs for out in before]
