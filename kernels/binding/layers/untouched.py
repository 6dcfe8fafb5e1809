"""Find out whether a call of a module does what `bind` gave it and no more: then its parameters are all that it is."""

from types import MethodType
from typing import Any

from torch import nn

from samebit.kernels.binding.lora.forwards import LinearFacts, linear_forward, wrapped_forward
from samebit.kernels.ops.linear import is_hooked


def product_of(module: Any) -> nn.Module | None:
    """Return the module whose weight a call of this linear layer, without an adapter, multiplies with; None where a
    call does more."""
    base = multiplied(module)
    plain = type(base) is nn.Linear and runs(base, linear_forward)
    return base if plain and (module is base or runs(module, wrapped_forward)) else None


def multiplied(module: Any) -> nn.Module:
    """Return the module that has the weight: the one that peft has wrapped, or the module itself."""
    facts = module.__dict__.get("samebit")
    wrapped = isinstance(facts, LinearFacts) and facts.wrapped
    multiplied: nn.Module = module._modules["base_layer"] if wrapped else module
    return multiplied


def passes_on(dropout: Any) -> bool:
    """Return whether a call of the dropout gives what it is given, and no hook listens."""
    plain = type(dropout) is nn.Dropout and dropout.p == 0.0 and "forward" not in dropout.__dict__
    return plain and not is_hooked(dropout)


def runs(module: Any, forward: Any) -> bool:
    """Return whether a call of the module is the forward that `bind` gave it, and no hook listens."""
    own = module.__dict__.get("forward")
    return type(own) is MethodType and own.__func__ is forward and not is_hooked(module)
