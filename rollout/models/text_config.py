"""Read the config of a folder as that of its text model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig


def read_text_config(folder: Path) -> Any:
    """Return a folder's config; of a model that is wrapped with vision, that of the text model in it.

    The whole says whether the head is tied: the text part of a published config leaves that out, and has no head.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text is config or model_class is None or model_class.config_class is not type(text):
        return config
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    return text
