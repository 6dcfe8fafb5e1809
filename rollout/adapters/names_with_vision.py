"""Let peft find the layers of a model by the names of the one that an adapter was trained on.

Hugging Face has a text model alone, its layers under `model.`, and inside of one with vision, under
`model.language_model.`. An adapter's config may name them either way, in lists or in regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

WITH_VISION = "language_model"
"""Names the text model in the model with vision."""

_ALONE = re.compile(r"\bmodel\\?\.layers\b")


class _Around(nn.Module):
    """Stands around a text model in the place of the one that also holds vision."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.add_module(WITH_VISION, text)

    @property
    def embed_tokens(self) -> nn.Module:
        """Return the embedding, which transformers finds here for peft where the head is tied to it."""
        return self.get_submodule(f"{WITH_VISION}.embed_tokens")


def names_vision(config: Any) -> bool | None:
    """Return whether a ``LoraConfig`` names layers of a model with vision; None where its names are those of both."""
    asked = (config.target_modules, config.exclude_modules, config.layers_pattern)
    patterns = [*config.rank_pattern, *config.alpha_pattern]
    for given in asked:
        patterns += [given] if isinstance(given, str) else list(given or ())
    if any(WITH_VISION in pattern for pattern in patterns):
        return True
    return False if any(map(_ALONE.search, patterns)) else None


@contextmanager
def layers_named(model: nn.Module, *, vision: bool | None) -> Iterator[None]:
    """Give the layers of a model the names that they have with vision around it, or without, for a while; None leaves
    its own."""
    own = dict(model.named_children()).get("model")  # Mamba2 calls it backbone, and has no vision
    text = None if own is None else dict(own.named_children()).get(WITH_VISION)
    if own is None or vision is None or vision is (text is not None):
        yield
        return
    model.add_module("model", _Around(own) if text is None else text)
    try:
        yield
    finally:
        model.add_module("model", own)
