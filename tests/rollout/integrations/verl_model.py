"""Make a tiny model folder with a tokenizer, for the tests of the plugin for verl."""

from pathlib import Path

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from samebit.recipes import tiny_model
from samebit.recipes.accuracy import models
from samebit.recipes.verl_grpo.task import TEMPLATE

SIZES = {"hidden_size": 100, "intermediate_size": 129, "num_hidden_layers": 2, "max_position_embeddings": 256}


def save_model(folder: Path, *, tied: bool = True, architecture: str = "dense") -> Path:
    """Save random weights of odd widths, with a tokenizer of one token a character."""
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(
        tiny_model.build_model(tokenizer, 0, architecture, **SIZES, tie_word_embeddings=tied), tokenizer, folder
    )
    return folder


def save_sparse_model(folder: Path) -> Path:
    """Save a GLM-5 that reads 9 tokens."""
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(models.build("dsa", tokenizer, top_k=9), tokenizer, folder)
    return folder


def save_wrapped_model(folder: Path) -> Path:
    """Save the same with Gated DeltaNet layers, wrapped with a vision model that gives NaN."""
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text = tiny_model.build_model(tokenizer, 0, "gdn", **SIZES)
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 100,
        "num_position_embeddings": 16,
        "patch_size": 4,
    }
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=True)
    model = Qwen3_5ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.fill_(torch.nan)
    tiny_model.save(model, tokenizer, folder)
    return folder
