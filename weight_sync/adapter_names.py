"""Find where a tensor of an adapter goes, whichever of peft's three ways of writing its name it comes with.

A file of peft calls a matrix `base_model.model.` + layer + `.lora_A.weight`; the state dict of a peft model puts the
adapter's own name behind `lora_A`; the model inside has neither the prefix nor leaves the name out.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from samebit.weight_sync.folder_names import FolderNames, Place

PREFIX = "base_model.model."

_NAMED = re.compile(r"(.*\.lora_[AB])\.([^.]+)\.weight")


@dataclass(frozen=True)
class AdapterNames(FolderNames):
    """Knows the names that the tensors of one adapter may come with."""

    def place(self, name: str, known: Container[str]) -> Place | None:
        found = _NAMED.fullmatch(name)
        short = f"{found[1]}.weight" if found else name
        own = short if short.startswith(PREFIX) else PREFIX + short
        return Place(own) if own in known else None
