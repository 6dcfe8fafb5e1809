"""Find out what the config of an adapter means for a model: which layers, of which rank and scale.

peft itself says it, on a model of the same class without memory (device "meta"), so that patterns, ranks by layer and
rsLoRA mean what they mean to a trainer. peft is loaded by the first adapter.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebit.kernels import BindingError
from samebit.kernels.binding import binding_of
from samebit.kernels.binding.lora.loaded import DeltaShape, delta_shapes, tower_shapes
from samebit.kernels.binding.lora.plan import check_config
from samebit.rollout.adapters.names_with_vision import layers_named, names_vision
from samebit.rollout.errors import AdapterError

CONFIG_FILE = "adapter_config.json"
_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of peft to begin an adapter that change the weights under it."""

NO_PEFT = "adapters are read by peft, which is not installed: pip install samebit[lora]"


@dataclass(frozen=True, eq=False)
class AdapterLayout:
    """Holds the layers that an adapter changes, by name, and the config that says so.

    of_images: layers of a vision tower that images go through, which it names and may not change.
    """

    shapes: Mapping[str, DeltaShape]
    config: Any
    of_images: Mapping[str, DeltaShape] = field(default_factory=dict)


def layout_of(config: object, module: nn.Module) -> AdapterLayout:
    """Return the layout of an adapter with this config, a ``LoraConfig`` or a dict of its fields, on a bound model.

    Raises:
        AdapterError: a config that peft refuses, another method than LoRA, or what is not exact, by name.
    """
    checked = _lora_config(config)
    check_beginning(checked.init_lora_weights)
    from peft import get_peft_model

    plain: Any = copy.deepcopy(checked)
    plain.init_lora_weights = True  # other ways read weights, which the model below has not
    plain.base_model_name_or_path = None  # peft warns of another path than the model's own, as of a snapshot's
    with torch.device("meta"):
        skeleton = type(module)(copy.deepcopy(module.config))
    try:
        check_config("default", checked)  # as peft calls it below
        wrapped = binding_of(module).family.wrapped is not None
        with layers_named(skeleton, vision=names_vision(checked) if wrapped else None):
            adapted = get_peft_model(skeleton, plain)
        shapes, of_images = delta_shapes(adapted, module), tower_shapes(adapted, module)
    except BindingError as error:
        raise AdapterError(str(error)) from None
    except ValueError as error:
        raise AdapterError(f"peft refuses the adapter's config for this model: {error}") from error
    return AdapterLayout(shapes, checked, of_images)


def check_beginning(way: object) -> None:
    """Check that an adapter which began in this way (``init_lora_weights``) belongs to the weights that it names.

    Raises:
        AdapterError: a way that changes the weights under the adapter.
    """
    if isinstance(way, str) and way.lower().startswith(_CHANGING):
        raise AdapterError(
            f"init_lora_weights={way!r} changes the weights of the model under the adapter; this model has those of "
            "before. Save plain LoRA (path_initial_model_for_weight_conversion of peft's save_pretrained), or give the "
            "worker the PeftModel; for a model that has the changed weights, set init_lora_weights to True"
        )


def config_of(folder: Path) -> dict[str, Any]:
    """Return what a folder in peft's format says of its adapter.

    Raises:
        AdapterError: it is no such folder.
    """
    path = folder / CONFIG_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{folder} holds no adapter in peft's format: {CONFIG_FILE}: {error}") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{path} must hold an object, and holds a {type(found).__name__}")
    return found


def _lora_config(config: object) -> Any:
    try:
        from peft import LoraConfig
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    except ImportError as error:
        raise AdapterError(NO_PEFT) from error
    if isinstance(config, LoraConfig):
        return config
    if not isinstance(config, Mapping):
        raise AdapterError(f"an adapter's config is a LoraConfig or a dict of its fields, got {type(config).__name__}")
    fields = dict(config)
    method = fields.pop("peft_type", "LORA")
    if method != "LORA":
        known = ", ".join(str(one.value) for one in PEFT_TYPE_TO_CONFIG_MAPPING)
        raise AdapterError(f"peft_type={method!r}; exact is LORA (peft knows {known})")
    try:
        return LoraConfig(**_known(fields, LoraConfig))
    except (TypeError, ValueError) as error:
        raise AdapterError(f"peft refuses the adapter's config: {error}") from error


def _known(fields: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the fields that the installed peft knows. Other versions write all of theirs: what is off says nothing.

    Raises:
        AdapterError: one that is not off, of which nobody here knows what it changes.
    """
    known = {one.name for one in dataclasses.fields(kind) if one.init}
    unknown = {name: value for name, value in fields.items() if name not in known}
    meant = [f"{name}={value!r}" for name, value in unknown.items() if not _is_off(value)]
    if meant:
        raise AdapterError(
            f"the installed peft knows no {', '.join(meant)} of the adapter's config; allowed are the fields of its "
            "LoraConfig, and others that are off (None, False or empty)"
        )
    return {name: value for name, value in fields.items() if name in known}


def _is_off(value: object) -> bool:
    return value is None or value is False or (isinstance(value, Sized) and not len(value))
