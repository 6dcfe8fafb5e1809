"""MiniMax-M2, whose blocks of experts hold the corrections that their routers choose by, is exact in what
`test_relatives` does not ask of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from samebit.kernels import BindingError, bind
from samebit.rollout import RolloutWorker, SamplingParams

from ..weight_sync.expert_models import differing
from .compare import assert_matches_trainer
from .families import bound_model, make_model, token_ids

FAMILY = "MiniMaxM2"
SEQUENCES = token_ids(1, 2, 17, 70, 16)
PARAMS = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
CORRECTION = "model.layers.1.mlp.e_score_correction_bias"


def test_published_folders_and_updates_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published folders hold each expert apart and a correction beside them, in float32, which transformers rounds
    where it loads the model in bfloat16: a worker keeps it, a trainer's class has to be told.
    """
    model = make_model(FAMILY, torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    stored = load_file(tmp_path / "first" / "model.safetensors")
    published = ("e_score_correction_bias", "experts.14.w1.weight", "gate.weight")
    assert {f"model.layers.1.block_sparse_moe.{name}" for name in published} <= stored.keys()
    with pytest.raises(BindingError, match=r"correction_bias is torch\.bfloat16; .* MiniMax-M2's does not"):
        bind(AutoModelForCausalLM.from_pretrained(tmp_path / "first"))
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", ["e_score_correction_bias"])
    trainer = bind(AutoModelForCausalLM.from_pretrained(tmp_path / "first"))
    monkeypatch.undo()
    assert differing(trainer, model) == []
    with RolloutWorker(tmp_path / "first") as worker:
        assert differing(worker.module, trainer) == []
        assert_matches_trainer(trainer, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
        with torch.no_grad():
            for tensor in trainer.state_dict().values():
                tensor.mul_(0.5)
        trainer.save_pretrained(tmp_path / "second")
        halves = {name: tensor * 0.5 for name, tensor in stored.items()}
        for source in (tmp_path / "second", dict(trainer.state_dict()), halves, trainer):
            worker.receive_weights(source, verify=True)
            assert differing(worker.module, trainer) == []
            assert_matches_trainer(trainer, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
            worker.receive_weights(tmp_path / "first")


def test_a_width_of_rotation_that_transformers_does_not_read(tmp_path: Path) -> None:
    """A published config says ``rotary_dim``; some versions of transformers do not read it, and rotate whole heads."""
    make_model(FAMILY).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rotary_dim": 26}
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    if model.config.rope_parameters.get("partial_rotary_factor") == 0.5:
        _check_folder(tmp_path)
        return
    says = r"rotary_dim=26, which .* not read: it rotates 52 of 52 elements of a head \(exact: .*=0\.5\)"
    with pytest.raises(BindingError, match=says):
        bind(model)
    with pytest.raises(BindingError, match=says):
        RolloutWorker(tmp_path)
    path.write_text(json.dumps(config | {"partial_rotary_factor": 0.5}))
    _check_folder(tmp_path)


def _check_folder(folder: Path) -> None:
    """Check that a folder, however its config says it, gives the samples of the model it was made of."""
    with RolloutWorker(folder) as worker:
        assert_matches_trainer(bound_model(FAMILY), worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)


def test_random_factors_are_refused() -> None:
    with pytest.raises(BindingError, match=r"router_jitter_noise=0\.1; exact: 0\.0"):
        bind(make_model(FAMILY, router_jitter_noise=0.1))
