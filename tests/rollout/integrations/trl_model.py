"""Make folders in the format of Qwen3's for tests of TRL: a small random model, and a tokenizer of bytes with the chat
template of the real one, as TRL knows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_chat_template

END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, "<tool_call>", "</tool_call>", "<think>", "</think>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, with Qwen3's special tokens and chat template."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=qwen3_chat_template,
    )


def qwen3_folder(folder: Path, *, seed: int = 0) -> Path:
    """Write config.json, safetensors, the tokenizer and a generation config; return the folder."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=36,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_end_tokens(folder: Path, copy: Path, end_tokens: list[int]) -> Path:
    """Copy a folder, with these end tokens in its generation config; return the copy."""
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end_tokens}))
    return copy
