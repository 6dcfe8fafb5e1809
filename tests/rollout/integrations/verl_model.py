"""A tiny model folder with a tokenizer, for the tests of the plugin for verl."""

from pathlib import Path

from samebit.recipes import tiny_model
from samebit.recipes.verl_grpo.task import TEMPLATE

SIZES = {"hidden_size": 100, "intermediate_size": 129, "num_hidden_layers": 2, "max_position_embeddings": 256}


def save_model(folder: Path, *, tied: bool = True, architecture: str = "dense") -> Path:
    """Random weights, odd widths, one token a character."""
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(
        tiny_model.build_model(tokenizer, 0, architecture, **SIZES, tie_word_embeddings=tied), tokenizer, folder
    )
    return folder
