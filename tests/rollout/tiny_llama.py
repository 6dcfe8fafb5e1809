"""Llamas of random weights: the smallest that a folder can hold, and one that another process loads or is sent."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMALLEST: dict[str, object] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40,
}


def smallest(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SMALLEST, **changes}))


def tiny(seed: int) -> LlamaForCausalLM:
    return smallest(
        seed,
        vocab_size=101,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
