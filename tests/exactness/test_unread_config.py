"""No bit changes with what a config holds and Hugging Face's class of the family does not read."""

from typing import Any

import pytest
import torch

from samebit.kernels import bind, token_logprobs

from .families import make_model

IDS = torch.arange(40)[None] * 7 + 3
WINDOW: dict[str, Any] = {"sliding_window": 7}
LAYERS: dict[str, Any] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CAP: dict[str, Any] = {"attn_logit_softcapping": 2.0}
SCALE: dict[str, Any] = {"query_pre_attn_scalar": 144}
FACTORS: dict[str, Any] = {"key_multiplier": 3.0, "mlp_multipliers": [2.0, 3.0]}
SSM_FACTORS: dict[str, Any] = {"ssm_in_multiplier": 2.0, "ssm_multipliers": [2.0, 3.0, 4.0, 5.0, 6.0]}


def scores(name: str, **config: Any) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(bind(make_model(name, **config)), IDS)


@pytest.mark.parametrize(
    ("name", "unread"),
    [
        ("Llama", WINDOW), ("Llama", LAYERS), ("Llama", CAP), ("Llama", SCALE), ("Llama", FACTORS),
        ("Olmo2", WINDOW), ("StableLm", WINDOW), ("Glm4Moe", WINDOW), ("Olmoe", WINDOW), ("Gemma3", CAP),
        ("Bamba", {**FACTORS, **SSM_FACTORS}), ("Bamba", {**WINDOW, **CAP, **SCALE}),
    ],
)  # fmt: skip
def test_what_the_class_does_not_read_changes_nothing(name: str, unread: dict[str, Any]) -> None:
    assert torch.equal(scores(name, **unread), scores(name))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("Mistral", WINDOW), ("Phi3", WINDOW), ("Mixtral", WINDOW), ("Gemma2", CAP), ("Gemma3", SCALE),
        ("Qwen3", {**LAYERS, "use_sliding_window": True}), ("Qwen3Moe", {**WINDOW, "use_sliding_window": True}),
        ("FalconH1", FACTORS), ("FalconH1", SSM_FACTORS),
    ],
)  # fmt: skip
def test_what_it_reads_does(name: str, read: dict[str, Any]) -> None:
    assert not torch.equal(scores(name, **read), scores(name))


@pytest.mark.parametrize("name", ["Mistral", "Mixtral", "Phi3"])
def test_a_window_of_all_layers_is_one_whatever_the_config_calls_them(name: str) -> None:
    assert torch.equal(scores(name, **LAYERS), scores(name, **WINDOW))
