"""What GLM-4.1V and GLM-4.5V read otherwise than GLM-4 and GLM-4.5, as which their folders load, changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import BindingError, bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.errors import ModelLoadError

from .compare import assert_matches_trainer
from .families import make_wrapped, token_ids
from .gradients import hugging_face, relative_error
from .layouts import alone

DENSE, EXPERTS = "Glm4, as inside of GLM-4.1V", "Glm4Moe, biases"
SEQUENCES = token_ids(40, 3, 70)
FEW = SamplingParams(max_tokens=7, seed=5, ignore_eos=True)
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 80}


def saved(folder: Path, name: str, **text: Any) -> PreTrainedModel:
    """Save a model whose text config says only this of a rotated part, and as published ones no size of heads that its
    attention does not read; return it as loaded."""
    made = make_wrapped(name)
    made.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("partial_rotary_factor", *(("head_dim",) if name == DENSE else ())):
        config["text_config"].pop(key, None)
    config["text_config"].update(text)
    path.write_text(json.dumps(config))
    loaded: PreTrainedModel = type(made).from_pretrained(folder)
    if name == EXPERTS:
        loaded.set_experts_implementation("eager")
    return loaded


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (DENSE, {"rope_parameters": {**DEFAULT, "mrope_section": [9, 8, 8]}}),  # all of a head is rotated
        (DENSE, {"rope_parameters": {**YARN, "mrope_section": [4, 5, 3], "partial_rotary_factor": 0.48}}),
        (DENSE, {"rope_parameters": {**DEFAULT, "mrope_section": [3, 2, 1]}, "partial_rotary_factor": 0.24}),
        (EXPERTS, {"rope_parameters": {**DEFAULT, "mrope_section": [3, 2, 1], "partial_rotary_factor": 0.24}}),
        (EXPERTS, {"rope_parameters": {**YARN, "mrope_section": [3, 2, 1]}, "partial_rotary_factor": 0.24}),
        (EXPERTS, {"rope_parameters": {**DEFAULT, "mrope_section": [4, 5, 4]}, "use_qk_norm": True}),  # not read
    ],
)
def test_what_the_text_config_says(name: str, text: dict[str, Any], tmp_path: Path) -> None:
    with torch.no_grad():
        exact = hugging_face(saved(tmp_path, name, **text).double(), SEQUENCES)
        trainer = bind(saved(tmp_path, name, **text))
        assert relative_error(torch.cat(alone(trainer, SEQUENCES)), torch.cat(exact)) < 1e-6
    with RolloutWorker(tmp_path, config=RolloutConfig(block_size=64)) as worker:
        assert type(worker.module).__name__ == f"{name.partition(',')[0]}ForCausalLM"
        assert_matches_trainer(trainer, worker.generate(SEQUENCES, FEW), [FEW] * len(SEQUENCES))


def test_no_token_ends_a_text_that_the_config_does_not_name(tmp_path: Path) -> None:
    """The config of GLM-4 has end tokens of its own where a file names none."""
    saved(tmp_path, DENSE, eos_token_id=None)
    with RolloutWorker(tmp_path) as worker:
        assert worker.module.config.eos_token_id is None


def test_heads_of_another_size_than_they_are_rotated_by_are_refused(tmp_path: Path) -> None:
    """GLM-4.1V's attention reads no ``head_dim``, and its rotary embedding does."""
    model = saved(tmp_path, DENSE, head_dim=30)
    with pytest.raises(BindingError, match=r"has \d+ frequencies, .*; here heads have 50"):
        bind(model)
    with pytest.raises(
        ModelLoadError, match=r"misshapen: .*q_proj\.bias: offered \[200\] float32, the model has \[120\]"
    ):
        RolloutWorker(tmp_path)
