"""Families that differ from others in a line or two, and that `FAMILIES` leaves to `make soak`, are exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from samebit.kernels import bind
from samebit.rollout import RolloutWorker, SamplingParams

from .compare import assert_cold_and_warm_match_the_trainer, assert_matches_trainer
from .families import DTYPES, bound_model, make_model, paired, token_ids
from .gradients import assert_near_the_oracle, hugging_face, relative_error
from .layouts import LAYOUTS, alone, assert_same_bits
from .relatives import RELATIVES

SEQUENCES = token_ids(1, 2, 17, 70, 16)
PARAMS = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
NEAR = {torch.float32: 4e-7, torch.bfloat16: 0.02}


@pytest.mark.parametrize(("family", "dtype"), paired(list(RELATIVES), DTYPES))
def test_near_hugging_face_and_warm_is_cold_is_trainer(family: str, dtype: torch.dtype) -> None:
    model = bound_model(family, dtype)
    with torch.no_grad():
        expected = alone(model, SEQUENCES)
        assert_same_bits(LAYOUTS["left padded"](model, SEQUENCES), expected)
        exact = hugging_face(make_model(family, dtype).double(), SEQUENCES)
    assert relative_error(torch.cat(expected), torch.cat(exact)) < NEAR[dtype]
    assert_cold_and_warm_match_the_trainer(model, SEQUENCES, PARAMS)


@pytest.mark.parametrize("family", RELATIVES)
def test_gradients_near_float64(family: str) -> None:
    assert_near_the_oracle(family, torch.float32, SEQUENCES, (5e-7, 1e-5))


@pytest.mark.parametrize(("family", "dtype"), paired(list(RELATIVES), DTYPES, shift=1))
def test_a_folder_gives_the_samples_of_its_module(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = bind(make_model(family, dtype))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    asks = {name: 0.1 for name in ("attention_dropout", "residual_dropout") if name in vars(model.config)}
    file.write_text(json.dumps(json.loads(file.read_text()) | asks))  # as published ones do, and training alone has
    with RolloutWorker(tmp_path) as worker:
        assert_matches_trainer(model, worker.generate(SEQUENCES, PARAMS), [PARAMS] * 5)
