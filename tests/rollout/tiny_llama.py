"""A Llama of random weights that a worker in another process loads or is sent."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=101,
            hidden_size=64,
            intermediate_size=100,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
