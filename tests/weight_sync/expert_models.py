"""Make tiny models of every family with routed experts, as Hugging Face builds them: odd widths, nothing bound."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 18,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "moe_intermediate_size": 11,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_GROUPED = {"n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6}
_MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 6, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}

EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 5, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "Qwen2Moe": {"num_experts": 5, "shared_expert_intermediate_size": 13},
    "Mixtral": {"num_local_experts": 5},
    "Ernie4_5_Moe": {"moe_num_experts": 5, "moe_k": 2, "moe_layer_start_index": 0},
    "MiniMaxM2": {"num_local_experts": 5},
    "Olmoe": {"num_experts": 5},
    "Lfm2Moe": {"num_experts": 5, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "Glm4Moe": _GROUPED,
    "Dots1": _GROUPED,
    "SolarOpen": _GROUPED,
    "DeepseekV3": {**_GROUPED, **_LATENT, "head_dim": 4},
    "DeepseekV2": {**_GROUPED, **_LATENT, "head_dim": 4, "topk_method": "greedy"},
    "Glm4MoeLite": {**_GROUPED, **_LATENT, "head_dim": 4},
    "NemotronH": {
        "n_routed_experts": 5,
        "layers_block_type": ["mamba", "moe", "attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 6,
        "n_groups": 1,
        "ssm_state_size": 8,
        "moe_latent_size": 13,
        "moe_shared_expert_intermediate_size": 15,
        "n_group": 1,
        "topk_group": 1,
    },
    "GraniteMoeHybrid": {
        "num_local_experts": 5,
        "shared_intermediate_size": 15,
        "layer_types": ["mamba", "attention"],
        **_MAMBA,
    },
    "GraniteMoe": {"num_local_experts": 5},
    "GraniteMoeShared": {"num_local_experts": 5, "shared_intermediate_size": 15},
    "GptOss": {"num_local_experts": 5, "head_dim": 6, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Holds what each family's config adds to the common sizes, by the prefix of its classes."""

IN_PARTS = (
    *("Qwen3Moe", "Qwen2Moe", "Mixtral", "MiniMaxM2", "Ernie4_5_Moe", "Olmoe", "Glm4Moe", "Dots1", "SolarOpen"),
    *("DeepseekV3", "DeepseekV2", "Glm4MoeLite", "NemotronH", "Lfm2Moe"),
)
"""Lists the families whose checkpoints hold one tensor for each expert."""


def expert_model(family: str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """Return a model with values of its own: another seed gives other values in every tensor, biases included."""
    config: Any = getattr(transformers, f"{family}Config")
    kind: Any = getattr(transformers, f"{family}ForCausalLM")
    model: PreTrainedModel = kind(config(**{**_COMMON, **EXPERT_MODELS[family], **sizes})).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.data = buffer.data.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all that a model's state dict holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of the tensors whose dtype or bits are not equal."""
    theirs = other.state_dict()
    return [
        name
        for name, tensor in model.state_dict().items()
        if tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name])
    ]
