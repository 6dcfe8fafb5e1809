"""Define the forwards of linear layers that adapters may change, and of the layers of a decoder around them.

Invariants:

* Which adapters a call goes through stands in its context; peft's flags on the modules are not read here.
* A layer that is recomputed (gradient checkpointing) runs outside of the model's forward, where no context is
  installed or that of another call: it finds its own on its arguments, and installs it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from samebit.kernels.layout.forward_context import ForwardContext, LayoutMask, installed_context, use_context
from samebit.kernels.layout.lora.adapters import RowAdapters, Site
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.layers.gated import gated_linears
from samebit.kernels.ops.linear import (
    is_hooked,
    is_plain,
    linear,
    linears,
    multiply,
    some_listen_to_all,
    weight_and_bias,
)
from samebit.kernels.ops.lora.low_rank import add_checked, add_low_rank, known_terms
from samebit.kernels.ops.rope import RotaryTables


@dataclass(frozen=True)
class LinearFacts:
    """Names a linear layer as adapters do. ``wrapped``: by peft, so that its weight is that of its ``base_layer``."""

    layer: str
    wrapped: bool = False


class LayoutPositions(torch.Tensor):
    """Carries the layout to layers that get no mask, as the positions that they are handed."""

    context: ForwardContext
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(context: ForwardContext, positions: torch.Tensor) -> "LayoutPositions":
        """Return these positions, carrying the context."""
        carrying = positions.as_subclass(LayoutPositions)
        carrying.context = context
        return carrying


def layer_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a decoder layer's own forward inside the context that its arguments carry, also when it is recomputed.

    Newer transformers checkpoint inside of the class's forward: what they recompute installs the context itself.
    """
    forward = type(self).forward
    if not torch.is_grad_enabled():  # nothing is recomputed: the model's call around it has installed the context
        return forward(self, *args, **kwargs)
    carriers = (LayoutMask, LayoutPositions, RotaryTables)
    carried = next((one.context for one in (*args, *kwargs.values()) if isinstance(one, carriers)), None)
    if carried is None:
        return forward(self, *args, **kwargs)
    checkpointed = _checkpointed(forward)
    if checkpointed is not forward and self.gradient_checkpointing and self.training:
        return self._gradient_checkpointing_func(partial(_inside, carried, checkpointed, self, **kwargs), *args)
    return _inside(carried, forward, self, *args, **kwargs)


def _checkpointed(forward: Any) -> Any:
    """Return what transformers' wrapper of a layer's forward checkpoints; the forward itself without one."""
    while forward.__globals__["__name__"] == GradientCheckpointingLayer.__module__ and "__wrapped__" in vars(forward):
        forward = vars(forward)["__wrapped__"]
    return forward


def _inside(context: ForwardContext, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with use_context(context):
        return forward(*args, **kwargs)


def linear_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an nn.Linear, and what the adapters of the call add to it."""
    facts: LinearFacts | None = self.samebit
    out = linear(x, self.weight, self.bias)
    adapters = None if facts is None else _adapters_of_call()
    if facts is None or adapters is None or not adapters.groups:
        return out
    return _adapted(x, [out], (facts.layer,), adapters)[0]


def wrapped_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an nn.Linear that peft wraps, and what the adapters of the call add to it.

    Raises:
        ValueError: no context says which: the module was called by itself.
    """
    facts: LinearFacts = self.samebit
    adapters = _adapters_of_call()
    if adapters is None:
        raise ValueError(
            f"{facts.layer} has adapters, and no call of the model says which of them: layers of a bound model run "
            "only inside the model's forward (and under gradient checkpointing this version of transformers hands "
            "this layer nothing that carries the layout)"
        )
    base = _multiplied(self)
    plain = is_plain(base)
    out = linear(x, *weight_and_bias(base)) if plain else base(x).clone()  # who listens may hold what it was told
    return _adapted(x, [out], (facts.layer,), adapters)[0] if adapters.groups else out


def projections(x: torch.Tensor, modules: tuple[nn.Module, ...]) -> list[torch.Tensor]:
    """Make each module's own call on the same ``x``, or one call of all where no hook could tell: the same bits.

    Args:
        x: ``[..., K]``.
        modules: up to three bound linear layers, each ``[N, K]``.
    """
    adapters = _adapters_of_call()
    if adapters is None:
        return linears(x, modules)
    found = _by_sites(x, modules, adapters)
    if found is not None:
        return found
    if not all(map(_is_named, modules)):
        return linears(x, modules)
    bases = _bases_of(modules)
    if bases is None:
        return [module(x) for module in modules]
    out = linears(x, bases)
    return _adapted(x, out, tuple(map(_name_of, modules)), adapters) if adapters.groups else out


def gated_projections(activation: str, x: torch.Tensor, modules: tuple[nn.Module, ...]) -> torch.Tensor:
    """Compute ``activation(gate) * up`` of the modules' own calls, in one call where no hook could tell and the call
    goes through no adapter: the same bits.

    Args:
        activation: one of `ops.activation.ACTIVATIONS`.
        x: ``[..., K]``.
        modules: gate and up, two bound linear layers, each ``[N, K]``.
    """
    adapters, bases = _adapters_of_call(), modules
    if adapters is not None and all(map(_is_named, modules)):
        found = None if adapters.groups else _bases_of(modules)
        if found is None:
            return gated(activation, *projections(x, modules))
        bases = found
    return gated_linears(activation, x, bases)


def projection(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Make a bound linear layer's own call, or compute what it would: the same bits."""
    adapters = _adapters_of_call()
    found = None if adapters is None else _by_sites(x, (module,), adapters)
    out: torch.Tensor = module(x) if found is None else found[0]
    return out


def _by_sites(x: torch.Tensor, modules: tuple[nn.Module, ...], adapters: RowAdapters) -> list[torch.Tensor] | None:
    """Compute what the modules would, without calling them; None where a hook could tell."""
    if not adapters.sites or torch.is_grad_enabled():
        return None
    found = [sites.get(modules) for sites in adapters.sites]
    known = [site for site in found if site is not None]
    if len(known) < len(found):
        return _new_sites(x, modules, adapters)
    if any(any(site.hooks) for site in known) or some_listen_to_all():
        return None
    outs = multiply(x, known[0].layers)
    for site, (_, rows) in zip(known, adapters.groups, strict=True):
        if site.terms is not None:
            outs = _with_added(x, outs, site.places, rows, partial(add_checked, terms=site.terms))
    return outs


def _new_sites(x: torch.Tensor, modules: tuple[nn.Module, ...], adapters: RowAdapters) -> list[torch.Tensor] | None:
    """Keep what the next calls of these modules compute, and compute it with all checks."""
    if not all(map(_is_named, modules)):
        return None
    bases = [_multiplied(module) for module in modules]
    if not all(map(is_plain, bases)) or any(map(is_hooked, modules)):
        return None
    names, layers, new = tuple(map(_name_of, modules)), tuple(map(weight_and_bias, bases)), list[Site]()
    for adapter, _ in adapters.groups:
        deltas, places = adapter.of_layers(names)
        terms = known_terms(deltas, adapters.kept) if places else None
        if places and terms is None:
            return None
        parts = [part for delta in deltas.each for part in (delta.down, delta.up)]
        hooks = [hooks for one in (*modules, *bases, *parts) for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        new.append(Site(layers, places, terms, tuple(hooks)))
    outs = _adapted(x, multiply(x, layers), names, adapters)
    for sites, site in zip(adapters.sites, new, strict=True):
        sites[modules] = site
    return outs


def _adapters_of_call() -> RowAdapters | None:
    context = installed_context()
    return None if context is None else context.adapters


def _is_named(module: nn.Module) -> bool:
    """Return whether adapters can name it, which ``bind(exact=False)`` lets none do."""
    return isinstance(vars(module).get("samebit"), LinearFacts)


def _multiplied(module: Any) -> nn.Module:
    """Return the module that has the weight."""
    facts: LinearFacts = module.samebit
    multiplied: nn.Module = module._modules["base_layer"] if facts.wrapped else module
    return multiplied


def _bases_of(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...] | None:
    """Return what has the weights of named modules; None where calls of these are recorded, or hooks could tell."""
    bases = tuple(map(_multiplied, modules))
    called = torch.is_grad_enabled() or not all(map(is_plain, bases)) or any(map(is_hooked, modules))
    return None if called else bases


def _name_of(module: Any) -> str:
    facts: LinearFacts = module.samebit
    return facts.layer


def _adapted(
    x: torch.Tensor, outs: list[torch.Tensor], layers: tuple[str, ...], adapters: RowAdapters
) -> list[torch.Tensor]:
    """Add what the adapters of the call have for these layers, which share the input."""
    for adapter, rows in adapters.groups:
        deltas, places = adapter.of_layers(layers)
        if places:
            outs = _with_added(x, outs, places, rows, partial(add_low_rank, deltas=deltas, kept=adapters.kept))
    return outs


def _with_added(
    x: torch.Tensor, outs: list[torch.Tensor], places: tuple[int, ...], rows: torch.Tensor | None,
    add: Callable[..., Any],
) -> list[torch.Tensor]:  # fmt: skip
    """Return the results with those at these places as ``add`` makes them: in all rows, or in some."""
    some = [outs[place] for place in places]
    changed = dict(zip(places, add(some, x) if rows is None else _added_to_rows(x, some, rows, add), strict=True))
    return [changed.get(place, out) for place, out in enumerate(outs)]


def _added_to_rows(
    x: torch.Tensor, outs: list[torch.Tensor], rows: torch.Tensor, add: Callable[..., Any]
) -> list[torch.Tensor]:
    rows = rows.to(x.device)
    flat = [out.reshape(-1, out.shape[-1]) for out in outs]
    parts = add([out[rows] for out in flat], x.reshape(-1, x.shape[-1])[rows])
    return [whole.index_copy(0, rows, part).view(out.shape) for whole, part, out in zip(flat, parts, outs, strict=True)]
