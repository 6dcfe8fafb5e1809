"""Find where a tensor of an adapter goes, whichever of peft's three ways of writing its name it comes with.

A file of peft calls a matrix `base_model.model.` + layer + `.lora_A.weight`; the state dict of a peft model puts the
adapter's own name behind `lora_A`; the model inside has neither the prefix nor leaves the name out. A text model that
Hugging Face also wraps with vision has its layers under `model.`, or, inside the other, under `model.language_model.`.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from samebit.weight_sync.folder_names import FolderNames, Place

PREFIX = "base_model.model."

_NAMED = re.compile(r"(.*\.lora_[AB])\.([^.]+)\.weight")
_ALONE, _WITH_VISION = "model.", "model.language_model."


@dataclass(frozen=True)
class AdapterNames(FolderNames):
    """Knows the names that the tensors of one adapter may come with.

    wrapped: Hugging Face also wraps the model with vision: an adapter of either is one of the other.
    """

    wrapped: bool = False

    def place(self, name: str, known: Container[str]) -> Place | None:
        found = _NAMED.fullmatch(name)
        own = (f"{found[1]}.weight" if found else name).removeprefix(PREFIX)
        names = [own, _other_name(own)] if self.wrapped else [own]
        return next((Place(PREFIX + one) for one in names if PREFIX + one in known), None)

    def ignores(self, name: str) -> bool:
        return super().ignores(name.removeprefix(PREFIX))


def _other_name(name: str) -> str:
    """Return what the same tensor is called with vision around the text model, or without."""
    if name.startswith(_WITH_VISION):
        return _ALONE + name.removeprefix(_WITH_VISION)
    return _WITH_VISION + name.removeprefix(_ALONE)
