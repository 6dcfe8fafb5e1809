"""Translate the names of tensors in a checkpoint's files into their names in the module.

Hugging Face renames some on the way in (Nemotron-H's `backbone.` is `model.` in the module); the same table
is applied here.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key


def module_names(module: nn.Module, known: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Return the module's name for each stored name; a name that the module knows, or no rule changes, stays."""
    names = {name: name for name in stored}
    unknown = names.keys() - set(known)
    if not unknown or not isinstance(module, PreTrainedModel):
        return names
    rules = [rule for rule in get_model_conversion_mapping(module) if isinstance(rule, WeightRenaming)]
    return {name: rename_source_key(name, rules, [])[0] if name in unknown else name for name in names}
