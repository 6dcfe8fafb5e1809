"""Queries that are scaled by their positions (Ministral 3) have the same factors in every call, and no other model has
them.
"""

from typing import Any

import pytest
import torch

from samebit.kernels import BindingError, bind
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.ops.rope import QueryFactors, rotary_tables, scale_queries
from samebit.rollout import SamplingParams

from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, make_model, token_ids
from .layouts import alone, assert_same_bits
from .relatives import RELATIVES

SEQUENCES = token_ids(65, 2, 130)
PARAMS = [SamplingParams(max_tokens=8, seed=3, ignore_eos=True)] * 3
ROPE: dict[str, Any] = RELATIVES["Ministral3"][1]["rope_parameters"]


def scaled_by(beta: float | None) -> dict[str, Any]:
    return {"rope_parameters": {**ROPE, "llama_4_scaling_beta": beta}}


def test_a_position_has_one_factor() -> None:
    factors, positions = QueryFactors(0.5, 16), torch.tensor([0, 15, 16, 31, 32, 319, 1 << 20])
    found = factors.at(positions)
    expected = 1 + 0.5 * torch.log(1 + torch.floor(positions.double() / 16))
    assert torch.equal(found, expected.float())
    assert torch.equal(torch.cat([factors.at(one) for one in positions.split(1)]), found)
    with pytest.raises(IndexError):
        factors.at(torch.tensor([1 << 25]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_zero_changes_no_bit(dtype: torch.dtype) -> None:
    """Factors of 1 leave the bits of Mistral, whose layers a rollout computes in one call each, and others do not."""
    scaled, with_one = bind(make_model("Ministral3", dtype)), bind(make_model("Ministral3", dtype, **scaled_by(0.0)))
    plain = make_model("Mistral", dtype, **{**RELATIVES["Ministral3"][1], **scaled_by(0.0)}, rms_norm_eps=1e-5)
    plain.load_state_dict(scaled.state_dict())
    bind(plain)
    with torch.no_grad():
        found, expected = alone(with_one, SEQUENCES), alone(plain, SEQUENCES)
        assert_same_bits(found, expected)
        assert not torch.equal(alone(scaled, SEQUENCES)[0], expected[0])
    outputs, _ = run(with_one, SEQUENCES, PARAMS)
    assert_same_samples(outputs, run(plain, SEQUENCES, PARAMS)[0])
    assert_matches_trainer(scaled, run(scaled, SEQUENCES, PARAMS)[0], PARAMS)


def test_a_config_without_the_factor_is_refused() -> None:
    with pytest.raises(BindingError, match=r"llama_4_scaling_beta=None and original_max.*=16 .*exact: a number, and"):
        bind(make_model("Ministral3", **scaled_by(None)))


def test_angles_without_factors_scale_nothing() -> None:
    tables = rotary_tables(torch.ones(2), 1.0, training_context((1, 3), None, None))
    with pytest.raises(ValueError, match="no factors on queries"):
        scale_queries(torch.ones(3, 1, 4), tables)
