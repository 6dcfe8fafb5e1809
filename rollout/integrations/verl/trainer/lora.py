"""Bind what verl makes of a model with `model.lora_rank`, and take its adapter apart from it for the servers.

Invariants
----------
* Nothing is merged: the base travels once, as it is, and then A and B alone, in the dtype of the forward.
* All ranks read the same tensors in the same order: gathering a sharded one is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from samebit.kernels import bind
from samebit.kernels.binding.lora.peft_model import inner_model
from samebit.rollout.integrations.verl.trainer.fused_forward import give_logprobs
from samebit.weight_sync import WeightStream

Model = TypeVar("Model", bound=nn.Module)

_BASE = ".base_layer."
_MATRICES = (".lora_A.", ".lora_B.")


def bind_adapted(module: Model) -> Model:
    """Bind a peft model, whose inner model then gives the log-probabilities; returns the peft model.

    Raises:
        BindingError: an adapter that is not exact, by name.
    """
    bound = bind(module)
    give_logprobs(inner_model(bound))
    return bound


def base_stream(module: nn.Module, dtype: torch.dtype) -> WeightStream:
    """Stream the model that the adapter is for, under the names that it has without one."""
    return _renamed(inner_model(module), dtype, _base_name)


def adapter_stream(module: nn.Module, dtype: torch.dtype) -> WeightStream:
    """Stream A and B, under the names of the model inside."""
    return _renamed(inner_model(module), dtype, _adapter_name)


def _renamed(module: nn.Module, dtype: torch.dtype, new_name: Callable[[str], str | None]) -> WeightStream:
    """Stream the tensors that have a new name; the others are not gathered."""
    whole = WeightStream.of(module, dtype=dtype, images=False)  # to servers of text
    names = {name: new for name in whole.specs if (new := new_name(name)) is not None}
    specs = {new: replace(whole.specs[name], name=new) for name, new in names.items()}
    return WeightStream(specs, ((names[name], weight) for name, weight in whole.weights() if name in names))


def _base_name(name: str) -> str | None:
    return None if _adapter_name(name) else name.replace(_BASE, ".")


def _adapter_name(name: str) -> str | None:
    return name if any(part in name for part in _MATRICES) else None
