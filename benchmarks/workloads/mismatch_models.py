"""Make the models whose mismatch is measured: one of each kind, small enough to be run in minutes on two cores.

Weights are random and representable in bfloat16, so that float32 and bfloat16 compute the same model. Those of the head
are so large that logits have a standard deviation of 3, an entropy of 3 to 4 nats: with Hugging Face's initial weights
every token would be nearly as likely as any other.
"""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from samebit.benchmarks.workloads.models import EXPERTS, SHAPES

_NEXT: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "dense": (Qwen3Config, SHAPES["5m"] | {"tie_word_embeddings": False}),
    "hybrid": (Qwen3NextConfig, _NEXT),
    "experts": (Qwen3MoeConfig, EXPERTS | {"vocab_size": 2048}),
}
"""Qwen3; Qwen3-Next, three layers of Gated DeltaNet for one of attention, with the smallest heads that vLLM takes on a
CPU; Qwen3-MoE."""

LOGIT_DEVIATION = 3.0


def build(kind: str, max_tokens: int) -> PreTrainedModel:
    """Return the model of this kind, in float32, without an end token."""
    torch.manual_seed(0)
    config, fields = CONFIGS[kind]
    made = config(**fields, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.normal_(std=LOGIT_DEVIATION * head.shape[1] ** -0.5)
    return model.to(torch.bfloat16).float().eval()
