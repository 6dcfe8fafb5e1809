"""Write a policy as a folder in which no weights are tied, for engines that do not tie them, or not again.

vLLM (0.32) reads a tied GLM-4.5 without a word and leaves its output layer as memory was; of a tied Qwen3 it reads all,
but leaves the output layer stale when weights are reloaded.
"""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.recipes import tiny_model

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_untied(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, factor: float = 1.0) -> None:
    """Write the folder. factor: of every weight, for a policy that is certainly another."""
    tiny_model.save(policy, tokenizer, folder)
    path = folder / "model.safetensors"
    tensors = {name: factor * tensor for name, tensor in load_file(path).items()}
    if _HEAD not in tensors:
        tensors[_HEAD] = tensors[_EMBEDDING].clone()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
