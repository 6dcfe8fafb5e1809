"""Record what the modules of a model were when `bind` was done, and check that they still are that.

Invariants:

* Legal afterwards is what leaves the arithmetic to the bound forwards: hooks, ``train()`` and ``eval()``, parameters
  that are other tensors of the same shapes, gradient checkpointing (its wrapper too), FSDP2, which changes classes, and
  the wrappers of `_TRANSPARENT`, which only switch autocast on.
* Everything else is named: a module, forward, class or parameter that was added, replaced or removed, a module that
  is compiled in place, a dropout that was idle, and a number of a part (a float, as `scaling` or a norm's eps; of the
  modules of transformers an int or a bool too, as a router's `top_k`): bound forwards have most of them from `bind`,
  and would not see another.
* A check costs one comparison of dictionaries a module; it builds names only where something differs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

from samebit.kernels.binding.families.family import BindingError

_TRANSPARENT = ("torch.amp.autocast_mode", "accelerate.utils.operations", "transformers.modeling_layers")
"""Wrappers of a forward in these modules hand its arguments and results on: those of mixed precision the results in
float32, that of gradient checkpointing, which newer transformers put around the forward of every subclass of a layer,
without caches."""

_FREE = ("training", "gradient_checkpointing", "layer_idx", "padding_idx", "max_seq_len_cached")
"""Numbers whose names end so may change: legal calls set them, nothing is computed with them, or bound forwards read
them at each call."""

_NAMED_AT_ONCE = 4
"""The most differences that an error spells out."""

_REMEDY = (
    "Undo that, or change a model that is not bound, and call samebit.kernels.bind on it as it is to stay; adapters, "
    "parametrizations and torch.compile are not bound exactly"
)


@dataclass(frozen=True, eq=False)
class BoundModule:
    """Holds one module as it was.

    Attributes:
        name: in the model; empty for the model itself.
        module: the object.
        kind: its class.
        class_forward: the forward of its class.
        forward: the forward of the instance, None where that of the class runs.
        children: its submodules by name.
        shapes: those of its parameters by name.
        idle: whether it is a dropout.
        factors: its attributes that are numbers, by name; none of the model itself, which has those of losses.
    """

    name: str
    module: nn.Module
    kind: type[nn.Module]
    class_forward: object
    forward: object
    children: dict[str, nn.Module | None]
    shapes: dict[str, torch.Size]
    idle: bool
    factors: dict[str, int | float]

    @classmethod
    def of(cls, name: str, module: nn.Module) -> "BoundModule":
        """Return the module as it is now."""
        kind = type(module)
        own = module.__dict__.get("forward")
        idle = isinstance(module, nn.Dropout)
        factors = _factors(module) if name and not idle else {}
        shapes = _shapes(module._parameters)
        return cls(name, module, kind, kind.forward, own, dict(module._modules), shapes, idle, factors)

    def is_as_it_was(self) -> bool:
        """Return whether there is certainly no difference; quick: it runs for each module at each use of a model."""
        now = self.module.__dict__
        return (
            type(self.module) is self.kind
            and now["_modules"] == self.children
            and now.get("forward") == self.forward
            and now.get("_compiled_call_impl") is None
            and self.kind.forward is self.class_forward
            and (_shapes(now["_parameters"]) == self.shapes if now["_parameters"] else not self.shapes)
            and not self.idle
            and (not self.factors or self.factors.items() <= now.items())
        )

    def differences(self) -> Iterator[str]:
        """Say what is not as it was."""
        module, kind = self.module, type(self.module)
        title = self.name or "the model"
        if module._modules != self.children:
            yield from self._other_children()
        if kind is not self.kind and kind.__bases__ != (FSDPModule, self.kind):
            yield f"{title} was a {_name(self.kind)}, and its class is {_name(kind)}"
        elif not _leads_to(kind.forward, self.class_forward):
            yield f"the forward of {title}'s class {_name(self.kind)} was replaced"
        if not _leads_to(module.__dict__.get("forward"), self.forward):
            yield f"the forward of {title} ({_name(self.kind)}) was replaced, or is that of the module it is a copy of"
        if module._compiled_call_impl is not None:
            yield f"{title} ({_name(self.kind)}) was compiled in place, by its compile()"
        if _shapes(module._parameters) != self.shapes:
            yield from self._other_parameters()
        if self.idle and module.p != 0.0:
            yield f"{title}, a Dropout that did nothing, has p={module.p}"
        now = vars(module)
        for name in (name for name, factor in self.factors.items() if now.get(name) != factor):
            yield f"{title}.{name} was {self.factors[name]}, and is {now.get(name)}"

    def _other_children(self) -> Iterator[str]:
        now = {name: unwrapped(child) for name, child in self.module._modules.items()}
        prefix = f"{self.name}." if self.name else ""
        for name in {**self.children, **now}:
            before, after = self.children.get(name), now.get(name)
            if before is after:
                continue
            if before is None:
                yield f"{prefix}{name} was added, a {_name(type(after))}"
            elif after is None:
                yield f"{prefix}{name}, a {_name(type(before))}, was removed"
            else:
                yield f"{prefix}{name} was a {_name(type(before))}, and is another module: a {_name(type(after))}"

    def _other_parameters(self) -> Iterator[str]:
        now = _shapes(self.module._parameters)
        prefix = f"{self.name}." if self.name else ""
        for name in {**self.shapes, **now}:
            if name not in now:
                yield f"{prefix}{name} is a parameter no more"
            elif name not in self.shapes:
                yield f"{prefix}{name} was added, a parameter"
            elif now[name] != self.shapes[name]:
                yield f"{prefix}{name} had the shape {list(self.shapes[name])}, and has {list(now[name])}"


@dataclass(frozen=True, eq=False)
class BoundModules:
    """Holds all modules of a model as `bind` left them.

    Attributes:
        decoders: those that run all layers.
    """

    modules: tuple[BoundModule, ...]
    decoders: tuple[nn.Module, ...]

    @classmethod
    def of(cls, model: nn.Module, decoders: Iterable[nn.Module]) -> "BoundModules":
        """Return the modules as they are now."""
        return cls(tuple(BoundModule.of(name, module) for name, module in model.named_modules()), tuple(decoders))

    def apart_from(self, names: Iterable[str]) -> "BoundModules":
        """Return the record without these modules and what is in them."""
        left_out = tuple(f"{name}." for name in names)
        kept = tuple(one for one in self.modules if not f"{one.name}.".startswith(left_out))
        return BoundModules(kept, self.decoders)

    def check(self) -> None:
        """Raise if a module is not as `bind` left it.

        Raises:
            BindingError: something is not as it was bound, by name.
        """
        others = [module for module in self.modules if not module.is_as_it_was()]
        found = [difference for module in others for difference in module.differences()]
        found += [said for module in others for said in self._recomputed(module)]
        if found:
            more = len(found) - _NAMED_AT_ONCE
            named = "; ".join(found[:_NAMED_AT_ONCE]) + (f"; and {more} more" if more > 0 else "")
            raise BindingError(f"the model is not what was bound: {named}. {_REMEDY}")

    def _recomputed(self, parent: BoundModule) -> Iterator[str]:
        """Say which children would run all layers again in the backward, where no call of the model around them says
        which sequences there are."""
        for name, child in parent.module._modules.items():
            if child is None or unwrapped(child) is child:
                continue
            if any(part in self.decoders for part in child.modules()):
                yield (
                    f"{parent.name}{'.' if parent.name else ''}{name} is in a checkpoint_wrapper as a whole, and would "
                    "be recomputed without its layout (allowed: one around each layer, or "
                    "gradient_checkpointing_enable())"
                )


def check_residual_is_not_cast(layers: Iterable[nn.Module]) -> None:
    """Refuse layers that FSDP2 lets round what goes from one to the next, of a model whose residual stream is float32.

    Raises:
        BindingError: one does, with its policy.
    """
    parts: list[object] = [part for layer in layers for part in (layer, unwrapped(layer))]
    for module in parts:
        if not isinstance(module, FSDPModule):
            continue
        policy = module._get_fsdp_state()._mp_policy
        taken = policy.param_dtype if policy.cast_forward_inputs else None
        if {taken, policy.output_dtype} - {None, torch.float32}:
            raise BindingError(
                f"the residual stream of this model is float32, and {_name(type(module))} is sharded with {policy}, "
                "which rounds it: allowed is cast_forward_inputs=False with output_dtype None or torch.float32"
            )


def check_not_compiled(model: nn.Module) -> None:
    """Refuse what would run the modules through torch.compile.

    Raises:
        BindingError: a module or a forward that is compiled, by name.
    """
    for name, module in model.named_modules():
        forward = _function(module.__dict__.get("forward"))
        if module._compiled_call_impl is not None or "_torchdynamo_orig_callable" in _attributes(forward):
            raise BindingError(
                f"{name or 'the model'} ({_name(type(module))}) is compiled (torch.compile, or its compile()), which "
                "can not be bound exactly: bind a model that is not compiled"
            )


def check_no_own_forwards(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse instances whose forward does something else than that of their class: it would run no more.

    Raises:
        BindingError: one that does, by name.
    """
    for name, module in modules:
        kind = type(module)
        if "forward" in vars(module) and not _leads_to(vars(module)["forward"], kind.forward):
            raise BindingError(
                f"{name} ({_name(kind)}) has a forward of its own, which would not run: bind computes what its class "
                "does. Take it off (del module.forward); hooks do run, and so does what replaces the forward of the "
                "whole model"
            )


def _shapes(parameters: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in parameters.items() if tensor is not None}


def _factors(module: nn.Module) -> dict[str, int | float]:
    """Return the numbers that a part computes with; of torch's and peft's modules, where ints and bools say what the
    tensors are and how to call them, floats alone."""
    home = next(base.__module__ for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    kinds = (float,) if home.partition(".")[0] in ("torch", "peft") else (float, int, bool)
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is float or (type(value) in kinds and not name.startswith("_") and not name.endswith(_FREE))
    }


def unwrapped(module: nn.Module | None) -> nn.Module | None:
    """Return what the wrapper of gradient checkpointing holds, which computes nothing else."""
    while isinstance(module, CheckpointWrapper) and type(module).forward is CheckpointWrapper.forward:
        module = module._checkpoint_wrapped_module
    return module


def _leads_to(forward: object, recorded: object) -> bool:
    """Return whether a forward is the recorded one, or a transparent wrapper of it.

    A wrapper that is no method holds that of the module that it was made for, also in a copy of the module.
    """
    if forward == recorded:
        return True
    wanted = _function(recorded)
    while forward is not None and _is_of(forward, recorded):
        function = _function(forward)
        if function is wanted:
            return True
        home = function.__globals__["__name__"] if isinstance(function, FunctionType) else type(function).__module__
        forward = _attributes(function).get("__wrapped__") if home in _TRANSPARENT else None
    return False


def _is_of(forward: object, recorded: object) -> bool:
    """Return whether this is no method of another module than that of the recorded method, if it is one."""
    if not (isinstance(forward, MethodType) and isinstance(recorded, MethodType)):
        return True
    return forward.__self__ is recorded.__self__


def _function(forward: object) -> Any:
    return forward.__func__ if isinstance(forward, MethodType) else forward


def _attributes(thing: Any) -> dict[str, Any]:
    return {} if thing is None else thing.__dict__


def _name(kind: type) -> str:
    """Shorten the names of torch and transformers, which `bind` knows."""
    known = kind.__module__.partition(".")[0] in ("torch", "transformers")
    return kind.__qualname__ if known else f"{kind.__module__}.{kind.__qualname__}"
