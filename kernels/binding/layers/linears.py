"""Find what the linear layers of a decoder layer multiply with, where the whole layer is one call.

Nothing of a module is kept: its parameters are looked up at each call. Those of the adapters that rows go through are
in the sites that the modules' own calls made (`lora.forwards`), and are forgotten with them.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from samebit.kernels.binding.attached import Attachments
from samebit.kernels.binding.families.family import PROJECTIONS
from samebit.kernels.binding.layers.untouched import product_of
from samebit.kernels.binding.lora.forwards import LinearFacts
from samebit.kernels.binding.modules import MLPFacts
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.lora.adapters import GroupTerms, PlacedTerms, RowAdapters, Site
from samebit.kernels.layout.options import Layer
from samebit.kernels.ops.activation import IN_KERNELS, SILU
from samebit.kernels.ops.linear import weight_and_bias

Groups = tuple[tuple[Any, ...], ...]
"""Lists the linear layers of a decoder layer, those of one input together."""

Linears = tuple[Sequence[tuple[Layer, ...]], Sequence[PlacedTerms | None]]
"""Holds weights and biases of groups, and what adapters add to each."""


def facts_of_part(module: nn.Module, parts: Attachments) -> Any:
    """Return the facts that `bind` gives to a module; None for one that gets none."""
    attached = parts.get(module)
    return None if attached is None else attached.facts


def weight_of(module: nn.Module, parts: Attachments) -> torch.Tensor:
    """Return the weight of a linear layer, also of one that peft wraps."""
    facts = facts_of_part(module, parts)
    wrapped = isinstance(facts, LinearFacts) and facts.wrapped
    return (module.get_submodule("base_layer") if wrapped else module).get_parameter("weight")


def is_plain_mlp(facts: Any) -> bool:
    """Return whether these are the facts of a gated MLP without factors, which a layer's call computes."""
    if not isinstance(facts, MLPFacts):
        return False
    plain = facts.form == "separate" and facts.gate_multiplier == facts.down_multiplier == 1.0
    return plain and facts.activation in SILU and facts.names == PROJECTIONS


def is_fused_mlp(facts: Any) -> bool:
    """Return whether these are the facts of a gated MLP with silu, of an ``input_linear`` and an ``output_linear``."""
    return isinstance(facts, MLPFacts) and facts.form == "input_linear" and facts.activation in SILU


def is_gated_mlp(facts: Any) -> bool:
    """Return whether these are the facts of a gated MLP of any such activation, its gate and up perhaps one layer."""
    if not isinstance(facts, MLPFacts) or facts.activation not in IN_KERNELS or facts.adapter >= 0:
        return False
    return facts.form in ("separate", "fused") and facts.gate_multiplier == facts.down_multiplier == 1.0


def linears_of(groups: Groups, context: ForwardContext, wrapped: bool) -> Linears | None:
    """Return weights and biases of the groups' layers, and the terms of the adapters; None where a hook could tell,
    where their sites are not there yet, or where a model that peft has ``wrapped`` is called without a choice."""
    adapters = context.adapters
    if adapters is not None and adapters.groups:
        return _linears_of_sites(groups, adapters) if adapters.sites and adapters.on_host else None
    if adapters is None and wrapped:
        return None
    layers: list[tuple[Layer, ...]] = []
    for modules in groups:
        bases = [base for base in map(product_of, modules) if base is not None]
        if len(bases) < len(modules):
            return None
        layers.append(tuple(map(weight_and_bias, bases)))
    return layers, [None] * len(groups)


def in_parts(linears: Linears, sizes: tuple[int, ...]) -> Linears | None:
    """Return the linears with the first group, of one layer, as layers that have so many of its outputs each; None
    where it has not as many."""
    ((first,), *others), (placed, *terms) = linears
    weight, bias = first
    if len(weight) != sum(sizes):
        return None
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    parts = tuple(zip(weight.split(sizes), biases, strict=True))
    of_parts = None if placed is None else placed.in_parts(sizes)
    return [parts, *others], [of_parts, *terms]


def _linears_of_sites(groups: Groups, adapters: RowAdapters) -> Linears | None:
    layers: list[tuple[Layer, ...]] = []
    terms: list[PlacedTerms | None] = []
    for modules in groups:
        found = [sites.get(modules) for sites in adapters.sites]
        known = [site for site in found if site is not None and not any(site.hooks)]
        if len(known) < len(found):
            return None
        layers.append(known[0].layers)
        terms.append(_placed(known, adapters))
    return layers, terms


def _placed(sites: Sequence[Site], adapters: RowAdapters) -> PlacedTerms | None:
    """Return what is added to layers of one input; ``sites``: of each group's adapter."""
    first = sites[0]
    if adapters.one_for_all:
        return first.placed
    added = tuple(
        GroupTerms(site.places, site.terms, rows)
        for site, (_, rows) in zip(sites, adapters.groups, strict=True)
        if site.terms is not None
    )
    if not added:
        return None
    return PlacedTerms(added, first.dtype, tuple(chain.from_iterable(site.hooks for site in sites)))
