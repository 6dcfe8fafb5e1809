"""ERNIE-4.5-MoE, whose routers choose by a softmax with a correction that is a parameter, is exact in what
`test_relatives` does not ask of it.
"""

from __future__ import annotations

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

FAMILY = "Ernie4_5_Moe"
SEQUENCES = token_ids(1, 17, 70)
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
CORRECTION = "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"


def test_a_correction_that_is_exchanged_without_a_word_is_seen() -> None:
    model = bind(make_model(FAMILY))
    with RolloutWorker(model) as worker:
        worker.generate(SEQUENCES, PARAMS)
        correction = model.get_parameter(CORRECTION)
        correction.data = correction.data + torch.linspace(-0.3, 0.3, 15)  # torch does not count it
        worker.reset_prefix_cache()
        assert_matches_trainer(model, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 3)


def test_published_folders_and_updates_from_them(tmp_path: Path) -> None:
    """Published folders hold each expert apart, and the correction in the block; routers and corrections stay in
    float32 in a model of bfloat16.
    """
    make_model(FAMILY, torch.bfloat16).save_pretrained(tmp_path / "first")
    stored = load_file(tmp_path / "first" / "model.safetensors")
    assert {f"model.layers.1.mlp.{name}" for name in ("experts.14.up_proj.weight", "gate.weight")} <= stored.keys()
    trainer = bind(AutoModelForCausalLM.from_pretrained(tmp_path / "first"))
    assert trainer.get_parameter(CORRECTION).dtype is torch.float32
    published = {name.replace("gate.moe_statics", "moe_statics"): tensor * 0.5 for name, tensor in stored.items()}
    with RolloutWorker(tmp_path / "first") as worker:
        assert differing(worker.module, trainer) == []
        with torch.no_grad():
            for tensor in trainer.parameters():  # the head is the embedding
                tensor.mul_(0.5)
        trainer.save_pretrained(tmp_path / "second")
        for source in (published, tmp_path / "second", trainer):
            worker.receive_weights(source, verify=True)
            assert differing(worker.module, trainer) == []
            worker.receive_weights(tmp_path / "first")
        worker.receive_weights(trainer)
        assert_matches_trainer(trainer, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 3)


def test_what_is_refused() -> None:
    rounded = make_model(FAMILY).to(torch.bfloat16)
    with pytest.raises(BindingError, match=rf"{CORRECTION} is torch\.bfloat16; exact is torch\.float32"):
        bind(rounded)
    says = r"moe_norm_min=0\.1 of model\.layers\.1\.mlp, the least that weights are divided by; allowed: up to 1e-12"
    with pytest.raises(BindingError, match=says):
        bind(make_model(FAMILY, moe_norm_min=0.1))
