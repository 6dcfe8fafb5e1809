"""Find the adapters of a model while `bind` walks its modules, refuse what is not exact, and watch what is left."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachment
from samebit.kernels.binding.bound_record import unwrapped
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.lora.forwards import LinearFacts, linear_forward, wrapped_forward
from samebit.kernels.binding.lora.peft_model import configs_of, inner_model, is_adapted, is_of_parameter, is_wrapped
from samebit.kernels.layout.lora.adapters import BASE, Adapter, Delta, RowAdapters

HOLDERS = ("lora_A", "lora_B", "lora_dropout", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Name the containers of a wrapped layer."""

ADAPTABLE = (
    "linear layers other than the head, routers, the kv_b_proj of latent attention, and the indexer of sparse "
    "attention, which has no gradient"
)
"""Says which layers an adapter may change."""

_MERGED = attrgetter("merged_adapters")

_OF_PARAMETERS = (
    'target_parameters, which peft makes of target_modules="all-linear" too, and of gate_proj, up_proj and down_proj, '
    "where experts have such weights: name layers of the attention alone, as target_modules="
    '["q_proj", "k_proj", "v_proj", "o_proj"], or with latent attention '
    '["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]'
)
"""Says where adapters of parameters come from that nobody has asked for."""

_NAMED_AT_ONCE = 4
"""The most reasons that an error spells out."""


@dataclass(frozen=True, eq=False)
class PeftAdapters:
    """Holds the adapters that peft has put into a model, as they were when it was bound.

    Attributes:
        layers: the wrapped linear layers by name.
        adapters: by peft's names.
    """

    layers: Mapping[str, Any]
    adapters: Mapping[str, Adapter]

    def active(self) -> Adapter | None:
        """Return the adapter that peft's flags on the modules name now; None where they are disabled.

        Raises:
            BindingError: two at once, or one that was not there when the model was bound, or was another.
        """
        flags = {(layer.disable_adapters, tuple(layer.active_adapters)) for layer in self.layers.values()}
        disabled, names = flags.pop()
        if flags:
            raise BindingError("the adapters of some layers are others than those of the rest, or disabled alone")
        if disabled or not names:
            return None
        if len(names) > 1:
            raise BindingError(f"the adapters {', '.join(names)} are active at once; exact is one: set_adapter(name)")
        if names[0] not in self.adapters:
            raise BindingError(f"the adapter {names[0]!r} {_ADDED}")
        self._check_not_replaced(names[0])
        return self.adapters[names[0]]

    def of_flags(self) -> RowAdapters:
        """Return the choice of `active` for all rows of a call."""
        return RowAdapters.all_through(self.active())

    def differ(self) -> bool:
        """Return whether peft has added, deleted or replaced an adapter."""
        names = any(set(layer.lora_A) != self._names_of(name) for name, layer in self.layers.items())
        return names or any(map(self._is_replaced, self.adapters))

    def check_unmerged(self) -> None:
        """Check that no weight of the model holds an adapter too; quick: it runs around each call of the model.

        Raises:
            BindingError: one that does, by name.
        """
        if not any(map(_MERGED, self.layers.values())):
            return
        for name, layer in self.layers.items():
            if layer.merged_adapters:
                merged = ", ".join(layer.merged_adapters)
                raise BindingError(
                    f"the adapter {merged} is merged into {name}: merged weights are another policy, and no log-"
                    "probability of theirs is that of the adapter. Call unmerge_adapter(), which restores the weights "
                    "but for rounding; what merge_and_unload() gave is to be saved and loaded as a model of its own"
                )

    def check(self) -> None:
        """Check that the adapters are those that were bound, unmerged and of the same scale.

        Raises:
            BindingError: what is not, by name.
        """
        self.check_unmerged()
        for adapter in self.adapters:
            self._check_not_replaced(adapter)
        for name, layer in self.layers.items():
            now = set(layer.lora_A)
            known = self._names_of(name)
            if now - known:
                raise BindingError(f"the adapter {', '.join(map(repr, sorted(now - known)))} {_ADDED}")
            if known - now:
                gone = ", ".join(map(repr, sorted(known - now)))
                raise BindingError(f"the adapter {gone} was deleted after bind: call samebit.kernels.bind again")
        for adapter, bound in self.adapters.items():
            for name, delta in bound.deltas.items():
                scale = self.layers[name].scaling[adapter]
                if scale != delta.scale:
                    raise BindingError(
                        f"the adapter {adapter!r} of {name} was bound with the scale {delta.scale}, and has {scale}: "
                        "undo that, or bind a model that has it from the start"
                    )

    def _check_not_replaced(self, adapter: str) -> None:
        if self._is_replaced(adapter):
            raise BindingError(f"the adapter {adapter!r} was replaced after bind: call samebit.kernels.bind again")

    def _is_replaced(self, adapter: str) -> bool:
        """Return whether peft has matrices under this name, and they are not those that were bound."""
        deltas = self.adapters[adapter].deltas
        there = any(adapter in layer.lora_A for layer in self.layers.values())
        return there and not all(_has(self.layers[name], adapter, delta) for name, delta in deltas.items())

    def _names_of(self, layer: str) -> set[str]:
        return {name for name, adapter in self.adapters.items() if layer in adapter.deltas}


_ADDED = "was added after bind: call samebit.kernels.bind again, which takes it in, before it is used"


def _has(layer: Any, adapter: str, delta: Delta) -> bool:
    """Return whether a wrapped layer has the matrices of an adapter that were bound; quick, as `check_unmerged`."""
    parts = layer._modules
    down, up = parts["lora_A"]._modules.get(adapter), parts["lora_B"]._modules.get(adapter)
    return unwrapped(down) is unwrapped(delta.down) and unwrapped(up) is unwrapped(delta.up)


class AdapterPlan:
    """Decides the forwards of layers that adapters change, in the order of the traversal."""

    def __init__(self) -> None:
        self.layers: dict[str, Any] = {}
        self._inside: dict[str, Attachment | None] = {}

    def adapters(self) -> PeftAdapters | None:
        """Return the adapters that were found; None without any."""
        if not self.layers:
            return None
        deltas: dict[str, dict[str, Delta]] = {}
        for name, layer in self.layers.items():
            for adapter in layer.lora_A:
                pair = layer.lora_A[adapter], layer.lora_B[adapter]
                deltas.setdefault(adapter, {})[name] = Delta(*pair, float(layer.scaling[adapter]))
        return PeftAdapters(self.layers, {name: Adapter(name, found) for name, found in deltas.items()})

    def computes(self, name: str) -> bool:
        """Return whether the module of this name is a part of a wrapped layer."""
        return name in self._inside

    def part(self, name: str) -> Attachment | None:
        """Return the forward of a part of a wrapped layer; None for what only holds others."""
        return self._inside[name]

    def wrapped(self, name: str, module: nn.Module) -> Attachment | None:
        """Plan a layer that peft wraps, and its parts; None for any other module."""
        if not is_adapted(module):
            return None
        self.layers[name] = module
        self._inside[f"{name}.base_layer"] = Attachment(linear_forward)
        for holder in HOLDERS:
            self._inside[f"{name}.{holder}"] = None
        layer: Any = module
        for adapter in layer.lora_A:
            self._inside[f"{name}.lora_A.{adapter}"] = Attachment(linear_forward)
            self._inside[f"{name}.lora_B.{adapter}"] = Attachment(linear_forward)
            self._inside[f"{name}.lora_dropout.{adapter}"] = None
        return Attachment(wrapped_forward, LinearFacts(name, wrapped=True))


def check_adapters(model: nn.Module, unreached: Container[nn.Module]) -> None:
    """Check that what peft has put into a model is LoRA on linear layers, and nothing beside it.

    Args:
        model: with or without adapters.
        unreached: modules that never run, in which adapters may be anything: an attention of a vision model has a
            projection that peft takes for a linear layer.

    Raises:
        BindingError: all that is not exact, by name.
    """
    check_configs(model)
    wrapped = {name: module for name, module in inner_model(model).named_modules() if is_wrapped(module)}
    reasons = refusals({name: module for name, module in wrapped.items() if module not in unreached})
    if reasons:
        raise BindingError(f"adapters that can not be bound exactly: {listed(reasons)}")


def listed(reasons: Sequence[str]) -> str:
    """Spell out the first reasons, and say how many there are besides."""
    more = f"; and {len(reasons) - _NAMED_AT_ONCE} more" if len(reasons) > _NAMED_AT_ONCE else ""
    return f"{'; '.join(reasons[:_NAMED_AT_ONCE])}{more}"


def check_configs(model: nn.Module) -> None:
    """Check what the adapters of a ``PeftModel`` are beside the layers that they wrap.

    Raises:
        BindingError: as `check_config`.
    """
    if not any(map(is_wrapped, inner_model(model).modules())):
        return
    for name, config in configs_of(model).items():
        check_config(name, config)


def check_config(name: str, config: Any) -> None:
    """Check what peft's config says of one adapter.

    Raises:
        BindingError: another method than LoRA, trained biases, copied layers, or an adapter with the name of none.
    """
    method = str(config.peft_type.value)
    if method != "LORA":
        raise BindingError(f"the adapter {name!r} is of the method {method}; exact is LORA")
    if config.bias != "none":
        raise BindingError(
            f"the adapter {name!r} trains biases of the base model (bias={config.bias!r}), which disable_adapter() "
            "would leave in place; exact is bias='none'"
        )
    if config.layer_replication:
        raise BindingError(
            f"the adapter {name!r} puts copies of layers into the model (layer_replication="
            f"{config.layer_replication}), which disable_adapter() would leave in place; exact is None"
        )
    if name == BASE:
        raise BindingError(f"an adapter is called {BASE!r}, which names the model without one")


def refusals(wrapped: Mapping[str, nn.Module]) -> list[str]:
    """Say what about the modules that peft has put in others' places is not exact; empty for plain LoRA.

    wrapped: the modules by name.
    """
    reasons = [reason for name, module in wrapped.items() for reason in _refusals(name, module)]
    return [_OF_PARAMETERS, *reasons] if any(map(is_of_parameter, wrapped.values())) else reasons


def _refusals(name: str, module: nn.Module) -> list[str]:
    """Say what about a module that peft has put in another's place is not exact; empty for plain LoRA."""
    if not is_adapted(module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        allowed = "exact is LoRA on linear layers: no embeddings, no modules_to_save, no target_parameters"
        return [f"{name} is a {kind} ({allowed})"]
    layer: Any = module
    if type(layer.base_layer) is not nn.Linear:
        return [f"{name} wraps a {type(layer.base_layer).__name__} (exact: nn.Linear)"]
    found = [
        f"a variant of LoRA ({type(one).__name__}) on {name} (exact is LoRA without one)"
        for one in layer.lora_variant.values()
    ]
    found += [
        f"a bias of the adapter (lora_bias=True) on {name}; exact: False"
        for one in layer.lora_B.values()
        if one.bias is not None
    ]
    found += [
        f"dropout of the adapter (lora_dropout={one.p}) on {name}; exact: 0.0"
        for one in layer.lora_dropout.values()
        if isinstance(one, nn.Dropout) and one.p != 0.0
    ]
    found += [f"the merged adapter {one} in {name}: call unmerge_adapter()" for one in layer.merged_adapters]
    for adapter in layer.lora_A:
        down, up = layer.lora_A[adapter].weight.dtype, layer.lora_B[adapter].weight.dtype
        if down != up or down not in (torch.float32, layer.base_layer.weight.dtype):
            found.append(
                f"matrices of the adapter {adapter} on {name} are {down} and {up}; exact are two of torch.float32 or "
                f"of the layer's {layer.base_layer.weight.dtype}"
            )
    if layer.fan_in_fan_out:
        found.append(f"a transposed weight (fan_in_fan_out) of {name}")
    return found
