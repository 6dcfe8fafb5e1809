"""A layer that rotates nothing (NoPE), beside layers that do, sees no angle and keeps its layout."""

from typing import Any

import pytest
import torch

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.rollout import SamplingParams

from .compare import assert_same_samples, run
from .families import make_model, token_ids
from .gradients import assert_equal, gradients, loss, take_gradients
from .layouts import LAYOUTS, alone, assert_same_bits
from .test_layouts import checkpointing

SEQUENCES, OTHERS = token_ids(65, 2, 30), token_ids(17, 66, 5, seed=1)
PARAMS = [SamplingParams(max_tokens=8, seed=3, ignore_eos=True)] * 3


def theta(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


def test_angles_do_not_reach_a_layer_that_rotates_nothing() -> None:
    """No bit of a model of such layers depends on the angles, in training and in a rollout; of others all do."""
    without = {"no_rope_layers": [0, 0, 0]}
    one, other = (bind(make_model("SmolLM3", **without, **theta(base))) for base in (1e4, 50.0))
    with torch.no_grad():
        assert_same_bits(alone(one, SEQUENCES), alone(other, SEQUENCES))
        ids = torch.tensor(SEQUENCES[:1])
        beside = [token_logprobs(bind(make_model("SmolLM3", **theta(base))), ids) for base in (1e4, 50.0)]
    assert not torch.equal(*beside)
    assert_same_samples(run(one, SEQUENCES, PARAMS)[0], run(other, SEQUENCES, PARAMS)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_has_the_layout_of_its_own_call(reentrant: bool) -> None:
    model = bind(make_model("SmolLM3"))
    expected = gradients(model, LAYOUTS["packed"], SEQUENCES, OTHERS)
    with checkpointing(model, reentrant):
        losses = [loss(LAYOUTS["packed"](model, batch)) for batch in (SEQUENCES, OTHERS)]
        for each in losses:
            each.backward()
    assert_equal(take_gradients(model), expected)


def test_a_window_of_the_mask_alone_is_refused() -> None:
    model = make_model("SmolLM3", use_sliding_window=False)
    with pytest.raises(BindingError, match=r"'sliding_attention' with use_sliding_window=False.*exact: .*=True, or"):
        bind(model)
