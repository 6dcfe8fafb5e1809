"""Tell what is peft's in a model, without loading peft: who has none of it in the process has no peft model."""

import sys
from typing import Any

from torch import nn


def inner_model(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model that a ``PeftModel`` wraps; any other module as it is."""
    peft: Any = sys.modules.get("peft.peft_model")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    inner: nn.Module = model.get_base_model()
    return inner


def configs_of(model: nn.Module) -> dict[str, Any]:
    """Return the configs of the adapters of a model by name, which peft leaves on the model inside too."""
    return dict(vars(inner_model(model)).get("peft_config") or {})


def is_adapted(module: nn.Module) -> bool:
    """Return whether this is a linear layer that LoRA wraps."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and type(module) is layers.Linear


def is_of_parameter(module: nn.Module) -> bool:
    """Return whether LoRA changes a parameter of what this wraps (``target_parameters``)."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    return layers is not None and isinstance(module, layers.ParamWrapper)


def is_wrapped(module: nn.Module) -> bool:
    """Return whether peft has put this in another module's place: an adapter of any kind, or a copy to train."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    others: Any = sys.modules.get("peft.utils.other")
    kinds = [] if tuners is None else [tuners.BaseTunerLayer]
    kinds += [] if others is None else [others.AuxiliaryTrainingWrapper]
    return isinstance(module, tuple(kinds))
