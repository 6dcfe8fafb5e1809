"""Find where a tensor of an adapter goes, whichever of peft's three ways of writing its name it comes with.

A file of peft calls a matrix `base_model.model.` + layer + `.lora_A.weight`; the state dict of a peft model puts the
adapter's own name behind `lora_A`; the model inside has neither the prefix nor leaves the name out. A text model that
Hugging Face also wraps with vision has its layers under `model.`, or, inside the other, under `model.language_model.`,
before transformers 4.52 `language_model.model.`.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from samebit.weight_sync.folder_names import FolderNames, Place

PREFIX = "base_model.model."

_NAMED = re.compile(r"(.*\.lora_[AB])\.([^.]+)\.weight")
_OUTSIDE = re.compile(r"^(?:(?:model\.)?language_model\.)?(?:model\.)?")
_HOLDERS = ("model.", "model.language_model.", "")
"""Begin what the layers of a text model, or its head, are called alone and with vision around it."""


@dataclass(frozen=True)
class AdapterNames(FolderNames):
    """Knows the names that the tensors of one adapter may come with.

    wrapped: Hugging Face also wraps the model with vision: an adapter of either is one of the other.
    optional: names of tensors that need not come.
    """

    wrapped: bool = False
    optional: frozenset[str] = frozenset()

    def place(self, name: str, known: Container[str]) -> Place | None:
        found = _NAMED.fullmatch(name)
        own = (f"{found[1]}.weight" if found else name).removeprefix(PREFIX)
        names = [holder + _OUTSIDE.sub("", own) for holder in _HOLDERS] if self.wrapped else [own]
        return next((Place(PREFIX + one) for one in names if PREFIX + one in known), None)

    def ignores(self, name: str) -> bool:
        return name in self.optional or super().ignores(name.removeprefix(PREFIX))
