"""Make Llamas of random weights: the smallest that a folder can hold, and one that another process loads or is sent;
and a tokenizer that falls back to bytes as Llama's does.
"""

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


def byte_fallback_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few letters, a token for each byte of all other characters, and more tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc", *more]
    backend = Tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=False
    )
