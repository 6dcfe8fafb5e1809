"""Write a model's folder, whatever its generation config says.

Invariant: what transformers reads of a folder and only warns about, as a temperature without `do_sample`, is written
again as it was. Its own `save_pretrained` refuses it before it writes the weights.
"""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config and weights."""
    given = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = given
    if given is not None:
        given.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
