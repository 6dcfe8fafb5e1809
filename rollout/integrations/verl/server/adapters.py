"""Say what the trained adapter of verl's options is to a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.fs import copy_to_local

from samebit.rollout.adapters.layout import config_of
from samebit.rollout.integrations.verl.options import AdapterOption


def adapter_config(asked: AdapterOption) -> Mapping[str, Any]:
    """Return the fields of the adapter's config.

    Raises:
        AdapterError: `model.lora_adapter_path` is no folder in peft's format.
    """
    return asked.fields if asked.folder is None else config_of(Path(copy_to_local(asked.folder)))
