"""LFM2-MoE, whose blocks of experts hold the corrections that their routers choose by, under another name than others',
is exact in what `test_short_conv_families` does not ask of it.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from samebit.kernels import BindingError, bind
from samebit.rollout import RolloutWorker, SamplingParams

from ..weight_sync.expert_models import differing
from .compare import assert_matches_trainer
from .families import make_model, token_ids
from .gradients import assert_near_the_oracle, relative_error

FAMILY = "Lfm2Moe"
SEQUENCES = token_ids(1, 2, 17, 70, 16)
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
CORRECTION = "model.layers.1.feed_forward.expert_bias"


@pytest.mark.parametrize("key", ["use_expert_bias", "norm_topk_prob"])
def test_without_a_correction_and_without_a_division(key: str) -> None:
    assert_near_the_oracle(FAMILY, torch.float32, token_ids(45, 2, 18), (5e-7, 1e-5), **{key: False})


def test_what_is_added_to_sums_of_small_scores() -> None:
    """Weights are divided by the sum of their scores and a millionth, which counts where all scores are that small."""
    block = make_model(FAMILY).model.layers[1].feed_forward
    with torch.no_grad():
        block.gate.weight.normal_(std=1e-3).sub_(14 / 200)
        x = 1 + torch.randn(1, 5, 200) / 30
        expected = copy.deepcopy(block).double()(x.double())
        model = make_model(FAMILY)
        model.model.layers[1].feed_forward.load_state_dict(block.state_dict())
        found = bind(model).model.layers[1].feed_forward(x)
    assert relative_error(found, expected) < 1e-5


def test_a_rounded_correction_is_refused() -> None:
    with pytest.raises(BindingError, match=r"expert_bias is torch\.bfloat16; exact is torch\.float32"):
        bind(make_model(FAMILY).to(torch.bfloat16))


def test_published_folders_and_updates_from_them(tmp_path: Path) -> None:
    """Published folders hold each expert apart and a correction beside them, which stays float32 where transformers, or
    a worker, loads the model in bfloat16.
    """
    model = make_model(FAMILY, torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    stored = load_file(tmp_path / "first" / "model.safetensors")
    published = ("expert_bias", "experts.14.w1.weight", "gate.weight")
    assert {f"model.layers.1.feed_forward.{name}" for name in published} <= stored.keys()
    trainer = bind(AutoModelForCausalLM.from_pretrained(tmp_path / "first"))
    assert trainer.get_buffer(CORRECTION).dtype is torch.float32
    assert differing(trainer, model) == []
    with RolloutWorker(tmp_path / "first") as worker:
        assert differing(worker.module, trainer) == []
        assert_matches_trainer(trainer, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
        with torch.no_grad():
            for name, tensor in trainer.state_dict().items():
                if name != "lm_head.weight":  # tied
                    tensor.mul_(0.5)
        trainer.save_pretrained(tmp_path / "second")
        halves = {name: tensor * 0.5 for name, tensor in stored.items()}
        for source in (tmp_path / "second", dict(trainer.state_dict()), halves, trainer):
            worker.receive_weights(source, verify=True)
            assert differing(worker.module, trainer) == []
            assert_matches_trainer(trainer, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
            worker.receive_weights(tmp_path / "first")
