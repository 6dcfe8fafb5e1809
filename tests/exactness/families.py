"""Tiny random-weight models of every bound family, with odd widths and logits that are not flat."""

from functools import cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

DTYPES = (torch.float32, torch.bfloat16)
VOCAB = 1009
MAX_LEN = 320

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 200,
    "intermediate_size": 500,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LOCAL_AND_GLOBAL = {"sliding_window": 20, "query_pre_attn_scalar": 40}


def _scaled_rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"head_dim": 32, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}}


_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"head_dim": 80}),
    "Llama, biases, rope llama3": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            **_scaled_rope(
                "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=MAX_LEN // 4
            ),
        },
    ),
    "Llama, rope yarn": ("Llama", _scaled_rope("yarn", original_max_position_embeddings=MAX_LEN // 4)),
    "Qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "Qwen3": ("Qwen3", {"head_dim": 128}),
    "Mistral": ("Mistral", {"head_dim": 64, "sliding_window": 24}),
    "Phi3": ("Phi3", {}),
    "Phi3, half of the head rotated": ("Phi3", {"partial_rotary_factor": 0.5}),
    "Gemma2": (
        "Gemma2",
        {"head_dim": 32, **_LOCAL_AND_GLOBAL, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma3": (
        "Gemma3",
        {"head_dim": 64, **_LOCAL_AND_GLOBAL, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Olmo2": ("Olmo2", {}),
    "StableLm": ("StableLm", {"partial_rotary_factor": 0.25}),
}

FAMILIES = tuple(_OWN)


def _config_class(family: str) -> type:
    return getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")


def make_config(name: str, **changes: Any) -> Any:
    family, own = _OWN[name]
    return _config_class(family)(**{**_COMMON, **own, **changes}, attn_implementation="eager")


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A new, unbound model in evaluation mode; always the same weights."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{_OWN[name][0]}ForCausalLM")(make_config(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4)
    return model.to(dtype).eval()


@cache
def bound_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A bound model that tests share: they don't change it."""
    from samebit.kernels import bind

    return bind(make_model(name, dtype))


def token_ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
