"""What is rotated, and in which pairs, is what Hugging Face's class of the family rotates."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.binding.attention.forwards import AttentionFacts
from samebit.kernels.binding.families.family import RECURRENT_MASKS

from .families import make_model, token_ids
from .gradients import hugging_face, relative_error
from .layouts import alone

SEQUENCES = token_ids(2, 17, 70)


def assert_near_hugging_face(family: str, **changes: Any) -> list[AttentionFacts]:
    """Check the log-probabilities, and return the facts of the layers' attention."""
    model = bind(make_model(family, **changes))
    with torch.no_grad():
        expected = hugging_face(make_model(family, **changes).double(), SEQUENCES)
        assert relative_error(torch.cat(alone(model, SEQUENCES)), torch.cat(expected)) < 3e-7
    facts = [vars(module).get("samebit") for module in model.modules()]
    return [found for found in facts if isinstance(found, AttentionFacts)]


@pytest.mark.parametrize(("window", "sliding"), [(20, (True, False)), (20, (False, False)), (None, (False, False))])
def test_exaone_rotates_layers_with_a_window_or_all_where_the_config_has_none(
    window: int | None, sliding: tuple[bool, ...]
) -> None:
    kinds = ["sliding_attention" if local else "full_attention" for local in sliding]
    facts = assert_near_hugging_face("Exaone4", sliding_window=window, layer_types=kinds)
    assert [layer.rotation != "none" for layer in facts] == [window is None or local for local in sliding]
    assert [layer.options.window for layer in facts] == [20 if local else 0 for local in sliding]


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_glm_rotates_neighbours_in_the_first_part_of_a_head(part: float) -> None:
    facts = assert_near_hugging_face("Glm4", head_dim=56, partial_rotary_factor=part)
    assert all(layer.rotation == "neighbours" for layer in facts)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_hunyuan_without_an_alpha_rotates_as_its_config_says(rope: dict[str, Any]) -> None:
    facts = assert_near_hugging_face("HunYuanDenseV1", rope_parameters={"rope_theta": 10000.0, **rope})
    assert all(layer.qk_norm == "rotated" for layer in facts)


@pytest.mark.parametrize(
    ("family", "alpha", "limited"),
    [
        ("HunYuanDenseV1", 0.0, True),
        ("HunYuanDenseV1", None, True),
        ("HunYuanDenseV1", 50.0, False),
        ("HunYuanMoEV1", 50.0, False),
        ("Llama", 50.0, True),
    ],
)
def test_a_dynamic_scaling_ends_with_the_configs_positions_but_where_the_class_reads_an_alpha(
    family: str, alpha: float | None, limited: bool
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "alpha": alpha}
    rope = {key: value for key, value in rope.items() if value is not None}
    assert_near_hugging_face(family, rope_parameters=rope)
    model = bind(make_model(family, rope_parameters=rope, max_position_embeddings=40))
    with nullcontext() if not limited else pytest.raises(ValueError, match="a model with dynamic rotary scaling the"):
        token_logprobs(model, torch.tensor(token_ids(41)))


@pytest.mark.skipif(RECURRENT_MASKS, reason="transformers 5.13 and later scale the other layers alone")
def test_a_scaling_of_olmos_local_layers_is_refused() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 80}
    with pytest.raises(BindingError, match=r"yarn rotary scaling of layers with a window too.*from 5\.13 on"):
        bind(make_model("Olmo3", rope_parameters=yarn))
    bind(make_model("Olmo3", rope_parameters=yarn, layer_types=["full_attention", "full_attention"]))
