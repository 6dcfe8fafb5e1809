"""The models that are measured: Qwen3, randomly initialised, by shape."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "5m": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "100m": {
        "vocab_size": 32000,
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(shape: dict[str, Any], dtype: torch.dtype, max_tokens: int) -> Qwen3ForCausalLM:
    """A model of this shape for sequences of up to `max_tokens`; no end token, so that nothing stops early."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).to(dtype).eval()


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
