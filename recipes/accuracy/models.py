"""Build the models: a DeepSeek-V3 (MLA), or a GLM-5 (DSA), of three dense layers, half a million parameters."""

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

LAYERS = 3
MODELS = ("mla", "dsa")

_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "attn_implementation": "eager",
}


def build(name: str, tokenizer: PreTrainedTokenizerFast, top_k: int = 0, seed: int = 0) -> PreTrainedModel:
    """Return a randomly initialised model in float32. `top_k`: tokens that one of "dsa" reads.

    Raises:
        ValueError: another name than "mla" or "dsa".
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r}; allowed: {', '.join(MODELS)}")
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        **_SHAPE,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if name == "mla":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, first_k_dense_replace=LAYERS))
    config = GlmMoeDsaConfig(
        **shape,
        mlp_layer_types=["dense"] * LAYERS,
        indexer_types=["full"] * LAYERS,
        index_topk=top_k,
        index_n_heads=8,
        index_head_dim=32,
    )
    return GlmMoeDsaForCausalLM(config)
