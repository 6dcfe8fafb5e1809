"""Odd head sizes have no pairs to rotate and are refused by name; all others are computed."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels import BindingError, bind, token_logprobs
from samebit.kernels.binding.binding import is_bound

IDS = torch.arange(7)[None] + 3
WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
ROTATED = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {}, "Phi3": {}, "Gemma2": {}, "Gemma3": {}, "Olmo2": {},
    "StableLm": {"partial_rotary_factor": 1.0}, "Glm4": {"partial_rotary_factor": 1.0},
    "Bamba": {"attn_layer_indices": [0], "rope_parameters": WHOLE},
    "FalconH1": {"mamba_d_ssm": 16},
    "GraniteMoeHybrid": {
        "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"],
        "position_embedding_type": "rope",
    },
}  # fmt: skip
"""Lists families that rotate, with what their smallest model needs."""

MIXER = {"mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_expand": 1}
PARTS = ("Phi3", "StableLm", "Glm4")
"""Lists families that rotate a part of each head."""


def tiny(family: str, head_dim: int, **changes: Any) -> transformers.PreTrainedModel:
    """Return a model of one layer with two heads of this size."""
    torch.manual_seed(0)
    hybrid = family in ("Bamba", "FalconH1", "GraniteMoeHybrid")
    fields = {
        "vocab_size": 40, "hidden_size": 16 if hybrid else 2 * head_dim, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0,
        "head_dim": head_dim, "bos_token_id": 1, "eos_token_id": 2, **(MIXER if hybrid else {}),
        **ROTATED.get(family, {}), **changes,
    }  # fmt: skip
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**fields, attn_implementation="eager")
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def assert_computed(model: transformers.PreTrainedModel) -> None:
    """Check that a sequence has the same bits alone, and beside another one."""
    with torch.no_grad():
        alone = token_logprobs(model, IDS)
        both = token_logprobs(model, torch.cat([IDS.flip(1), IDS]))
    assert bool(alone.isfinite().all())
    assert torch.equal(both[1:], alone)


def assert_refused(family: str, head_dim: int, rotated: int, **changes: Any) -> None:
    """Check that `bind` refuses, and leaves the model as it was, where transformers' own config does not refuse it
    before.
    """
    model = None
    with suppress(StrictDataclassClassValidationError):
        model = tiny(family, head_dim, **changes)
    if model is None:
        return
    with pytest.raises(BindingError, match=f"{family}: of heads of {head_dim} elements {rotated} are rotated, an odd"):
        bind(model)
    assert not is_bound(model)
    assert not any("samebit" in module.__dict__ for module in model.modules()), "left as it was"


@pytest.mark.parametrize("head_dim", [19, 21, 43, 129])
@pytest.mark.parametrize("family", ROTATED)
def test_an_odd_head_that_is_rotated_is_refused_by_its_number(family: str, head_dim: int) -> None:
    assert_refused(family, head_dim, rotated=head_dim)


@pytest.mark.parametrize("family", ROTATED)
def test_an_even_head_is_computed(family: str) -> None:
    assert_computed(bind(tiny(family, 22)))


@pytest.mark.parametrize("head_dim", [19, 21])
def test_an_odd_head_that_is_not_rotated_is_computed(head_dim: int) -> None:
    model = tiny(
        "NemotronH", head_dim, layers_block_type=["attention"], mamba_num_heads=4, mamba_head_dim=4, n_groups=2,
        ssm_state_size=4, hidden_size=16,
    )  # fmt: skip
    assert_computed(bind(model))


@settings(max_examples=15, deadline=None)
@given(family=st.sampled_from(sorted({*ROTATED} - {*PARTS})), head_dim=st.integers(4, 140))
def test_whatever_the_head_size_is_it_is_computed_or_named(family: str, head_dim: int) -> None:
    if head_dim % 2:
        assert_refused(family, head_dim, rotated=head_dim)
    else:
        assert_computed(bind(tiny(family, head_dim)))


@settings(max_examples=15, deadline=None)
@given(family=st.sampled_from(PARTS), head_dim=st.integers(4, 140), part=st.floats(0.26, 1.0))
def test_whatever_part_of_a_head_is_rotated_it_is_computed_or_named(family: str, head_dim: int, part: float) -> None:
    rotated = int(head_dim * part)
    if rotated % 2:
        assert_refused(family, head_dim, rotated, partial_rotary_factor=part)
    else:
        assert_computed(bind(tiny(family, head_dim, partial_rotary_factor=part)))


def test_a_norm_over_all_heads_is_as_wide_as_they_are_or_named() -> None:
    """A norm over all heads is as wide as they are, or is named: OLMoE's class takes a head_dim for its heads, and
    hidden_size for their norms.
    """
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    assert_computed(bind(tiny("Olmoe", 8, **experts)))
    model = tiny("Olmoe", 8, hidden_size=32, **experts)
    with pytest.raises(BindingError, match=r"q_norm has 32 weights; here 2 heads of 8 elements \(head_dim\) have 16"):
        bind(model)
    assert not is_bound(model)


def test_queries_that_do_not_share_keys_evenly_are_refused() -> None:
    with pytest.raises(BindingError, match="num_attention_heads=4 is no multiple of num_key_value_heads=3"):
        bind(tiny("Llama", 8, num_attention_heads=4, num_key_value_heads=3))
