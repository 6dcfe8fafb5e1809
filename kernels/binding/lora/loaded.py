"""Make adapters that live beside a model: its modules, names and weights stay what they are.

A layer finds such an adapter in the context of a call, by its name, as it finds those of peft.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.binding import binding_of
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.lora.forwards import LinearFacts, linear_forward
from samebit.kernels.binding.lora.peft_model import inner_model, is_wrapped
from samebit.kernels.binding.lora.plan import ADAPTABLE, check_configs, listed, refusals
from samebit.kernels.binding.wrapped import modules_of_vision, wrapping_module
from samebit.kernels.layout.lora.adapters import Delta


@dataclass(frozen=True)
class DeltaShape:
    """Describes what an adapter adds to one layer: rank, inputs and outputs, and the factor on the product."""

    rank: int
    inputs: int
    outputs: int
    scale: float


class _Matrix(nn.Linear):
    """Computes as a bound matrix does. The forward is the class's: one of the instance, as `attach` gives, holds the
    instance, and a matrix of an adapter that was dropped or replaced would wait until Python collects circles."""

    samebit: LinearFacts | None = None
    forward = linear_forward  # type: ignore[assignment]  # its argument has another name


def delta_shapes(peft_model: nn.Module, model: nn.Module) -> dict[str, DeltaShape]:
    """Return the layers that the one adapter of ``peft_model`` changes, by name, all bound linear layers of ``model``;
    without those of vision, which no text reaches (`tower_shapes`).

    Args:
        peft_model: of the class and config of ``model``; it may be on the device "meta".
        model: bound.

    Raises:
        BindingError: an adapter that is not exact, or a layer that ``model`` has not, by name.
    """
    check_configs(peft_model)
    inner, binding = inner_model(model), binding_of(model)
    places = dict(inner.named_modules())
    unreached = modules_of_vision(wrapping_module(binding.family, inner))
    wrapped = {name: layer for name, layer in inner_model(peft_model).named_modules() if is_wrapped(layer)}
    reached = {name: layer for name, layer in wrapped.items() if places.get(name) not in unreached}
    reasons = refusals(reached)
    misplaced = [name for name in reached if not (binding.exact and _takes_adapters(places.get(name)))]
    if misplaced:
        reasons.append(f"{listed(misplaced)} (exact are {ADAPTABLE})")
    if reasons:
        raise BindingError(f"the adapter can not be served exactly: {listed(reasons)}")
    return {name: _shape(layer) for name, layer in reached.items()}


def tower_shapes(peft_model: nn.Module, model: nn.Module) -> dict[str, DeltaShape]:
    """Return the layers of vision that the one adapter of ``peft_model`` changes, by name, where ``model`` computes
    images: none of them is bound with an adapter, so what the adapter has there must be without effect.

    Args:
        peft_model: of the class and config of ``model``; it may be on the device "meta".
        model: bound.

    Raises:
        BindingError: an adapter that is no plain LoRA, by name.
    """
    inner, binding = inner_model(model), binding_of(model)
    if binding.images is None:
        return {}
    places, of_vision = dict(inner.named_modules()), modules_of_vision(wrapping_module(binding.family, inner))
    wrapped = {name: layer for name, layer in inner_model(peft_model).named_modules() if is_wrapped(layer)}
    found = {name: layer for name, layer in wrapped.items() if places.get(name) in of_vision}
    reasons = refusals(found)
    if reasons:
        raise BindingError(f"the adapter can not be served exactly: {listed(reasons)}")
    return {name: _shape(layer) for name, layer in found.items()}


def new_delta(shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> Delta:
    """Return matrices of zeros that compute as those of a bound adapter do."""
    down = _Matrix(shape.inputs, shape.rank, bias=False, dtype=dtype, device="meta")
    up = _Matrix(shape.rank, shape.outputs, bias=False, dtype=dtype, device="meta")
    for matrix in (down, up):
        matrix.weight = nn.Parameter(torch.zeros(matrix.weight.shape, dtype=dtype, device=device), requires_grad=False)
    return Delta(down, up, shape.scale, fixed=True)


def tree_of(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that holds these under their dotted names."""
    root = nn.Module()
    for name, module in modules.items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(last, module)
    return root


def _takes_adapters(own: nn.Module | None) -> bool:
    """Return whether this is a linear layer that `bind` has given a name for adapters."""
    return own is not None and isinstance(own.__dict__.get("samebit"), LinearFacts)


def _shape(layer: Any) -> DeltaShape:
    ((adapter, down),) = layer.lora_A.items()
    return DeltaShape(down.out_features, down.in_features, layer.lora_B[adapter].out_features, layer.scaling[adapter])
