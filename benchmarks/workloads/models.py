"""Build the models that are measured: Qwen3, Nemotron-H, Qwen3.5 and Qwen3-MoE, randomly initialised, by shape."""

from typing import Any

import torch
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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

HYBRID: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "attention", "mlp", "mamba", "mlp", "mamba", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "ssm_state_size": 128,
    "chunk_size": 16,  # of Hugging Face alone
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
"""Is a small Nemotron-H: heads and state of the size that the large ones have."""

DELTA: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
"""Is a small Qwen3.5: heads and state of the size that the large ones have, six layers of Gated DeltaNet, two of
attention."""

EXPERTS: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
"""Is a Qwen3-MoE of 60 M: each token has 4 of 32 experts in each of four layers."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(shape: dict[str, Any], dtype: torch.dtype, max_tokens: int) -> Qwen3ForCausalLM:
    """Build a model of this shape for sequences of up to `max_tokens`; no end token, so that nothing stops early."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config).to(dtype).eval()


def build_hybrid(shape: dict[str, Any], max_tokens: int) -> NemotronHForCausalLM:
    """Build the same for a Nemotron-H, in float32."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        **shape, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    config._attn_implementation = "sdpa"
    return NemotronHForCausalLM(config).eval()


def build_delta(shape: dict[str, Any], max_tokens: int) -> Qwen3_5ForCausalLM:
    """Build the same for a Qwen3.5, in float32."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **shape, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    config._attn_implementation = "sdpa"
    return Qwen3_5ForCausalLM(config).eval()


def build_experts(shape: dict[str, Any], dtype: torch.dtype, max_tokens: int) -> Qwen3MoeForCausalLM:
    """Build the same for a Qwen3-MoE, with the implementation of experts that is Hugging Face's default."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **shape, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
