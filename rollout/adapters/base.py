"""Find out which model to load where an adapter was given in the place of one: a folder in peft's format, or its name.

Invariant: a name of the hub is resolved once; the model of an adapter is loaded in the revision that its config names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from samebit.rollout.adapters.layout import CONFIG_FILE, check_beginning, config_of
from samebit.rollout.errors import AdapterError
from samebit.rollout.models.hub import model_folder
from samebit.rollout.models.tokenizers import folder_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Base:
    """Says what to load: a model, and its revision where that is a name. adapter: the folder of the one on it."""

    model: str | Path | nn.Module
    revision: str | None
    adapter: Path | None = None

    @classmethod
    def of(cls, given: str | Path | nn.Module, revision: str | None) -> Base:
        """Return what to load for what was given as a model. revision: of a name, or of the model under a folder's
        adapter.

        Raises:
            AdapterError: an adapter whose config does not say which model it is for, or which is for changed weights.
            ModelLoadError: a name that is not known, or not to be reached.
        """
        if not isinstance(given, str | Path):
            return cls(given, revision)
        folder = Path(given)
        if not (given and folder.is_dir()):
            folder, revision = model_folder(given, revision), None
        if not (folder / CONFIG_FILE).is_file():
            return cls(folder, revision)
        return cls._under(folder, revision)

    @classmethod
    def _under(cls, adapter: Path, revision: str | None) -> Base:
        config = config_of(adapter)
        model, own = (config.get(name) for name in ("base_model_name_or_path", "revision"))
        if not (isinstance(model, str) and model):
            path = adapter / CONFIG_FILE
            raise AdapterError(f"{path} does not say base_model_name_or_path, the model that it is for")
        check_beginning(config.get("init_lora_weights"))
        if revision is None and isinstance(own, str) and not Path(model).is_dir():
            revision = own or None
        return cls(model, revision, adapter)

    def resolved(self) -> Base:
        """Return the same with the folder of a name of the hub, so that all that is read of it is of one commit.

        Raises:
            ModelLoadError: the name is not known, or not to be reached; or there is no such folder.
        """
        if not isinstance(self.model, str | Path):
            return self
        return replace(self, model=model_folder(self.model, self.revision), revision=None)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer of the adapter's folder, or of the model's where it has none; None where neither has
        one, and for a module.

        Raises:
            ModelLoadError: it can not be read.
        """
        if not isinstance(self.model, str | Path):
            return None
        model = model_folder(self.model, self.revision)
        return folder_tokenizer(model) if self.adapter is None else folder_tokenizer(self.adapter, model)
