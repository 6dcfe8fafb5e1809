"""Build the built-in policy, a Hugging Face folder: a character tokenizer, and a Qwen3 of 0.6 M parameters, a hybrid
with Mamba2 or Gated DeltaNet layers, or a model of routed experts, with keys and values or with latents."""

from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from samebit.rollout.models.saving import save_model

END = "<eos>"
SPECIAL = ("<pad>", "<bos>", END, "<unk>")
CHARACTERS = "0123456789+-=;[]"

_MAMBA = {
    "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
}

_DELTA = {
    "full_attention_interval": 2,
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": True,
}

_EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 4,
    "topk_group": 2,
}
_CORRECTION = 0.05
"""Spread of the routers' correction biases, which choose experts and are no parameters."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a character, with `<bos>` in front of every text."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token=END, unk_token="<unk>"
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, architecture: str = "dense", **sizes: int
) -> PreTrainedModel:
    """Return a randomly initialised model in float32; `sizes` replaces entries of its configuration.

    "dense": a Qwen3. "hybrid": a Nemotron-H, two Mamba2 layers around an attention layer. "gdn": a Qwen3.5, two Gated
    DeltaNet layers around an attention layer. "moe": a GLM-4.5, a dense layer and two of 16 experts, 4 a token. "mla":
    a DeepSeek-V3 of such layers, with latent attention.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.05,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if architecture == "hybrid":
        hybrid: dict[str, Any] = {**shape, **_MAMBA, **sizes}
        return NemotronHForCausalLM(NemotronHConfig(**hybrid))
    if architecture == "gdn":
        delta: dict[str, Any] = {**shape, **_DELTA, **sizes}
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**delta))
    if architecture in ("moe", "mla"):
        return _with_experts(architecture, {**shape, **_EXPERTS}, sizes)
    dense: dict[str, Any] = {**shape, "num_hidden_layers": 3, "tie_word_embeddings": True, **sizes}
    return Qwen3ForCausalLM(Qwen3Config(**dense))


def _with_experts(architecture: str, shape: dict[str, Any], sizes: dict[str, int]) -> PreTrainedModel:
    """Return a GLM-4.5, or a DeepSeek-V3, whose heads have keys of their own, whatever the sizes say."""
    model: PreTrainedModel
    if architecture == "moe":
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**{**shape, "use_qk_norm": True, **sizes}))
    else:
        latent = {**shape, **_LATENT, **sizes}
        del latent["head_dim"]  # here that of the rotated key alone, which the class sets
        latent["num_key_value_heads"] = latent["num_attention_heads"]
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**latent))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=_CORRECTION)
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that `load`, or anyone's `from_pretrained`, reads."""
    save_model(model, folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return model (float32, because it will be trained), on a device, and tokenizer of any local Hugging Face
    folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    cast(nn.Module, model).to(device)
    return cast(PreTrainedModel, model), cast(PreTrainedTokenizerFast, tokenizer)


def pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the token that fills the trainer's rows; any will do, because it is masked."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
