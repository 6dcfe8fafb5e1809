"""Give a Hugging Face causal language model samebit's forward, in place: ``bind(model)``.

Invariants:

* Only the instance changes: the ``forward`` of modules that are known by class. Nothing of torch or
  transformers is patched, parameters and state dict stay what they were, ``copy.deepcopy`` works.
* A module that computes and is not known is an error that names it. Nothing is dropped silently.
* Derived values (rotary frequencies, embedding scales) come from the config in float32; the module's own
  buffers are ignored, because ``.to(bfloat16)`` truncates them and no state dict holds them.
* Autocast does not reach the operations: a bound model computes in the dtype of its parameters.
* The modules stay what was bound (`bound_record`), or the next one who uses the model raises.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from samebit.kernels.binding import modules as bound
from samebit.kernels.binding.attached import attach
from samebit.kernels.binding.bound_record import BoundModules, check_no_own_forwards, check_not_compiled
from samebit.kernels.binding.causal_lm import Forward, own_forward
from samebit.kernels.binding.experts.plan import check_corrections
from samebit.kernels.binding.experts.routes import RouteLayout
from samebit.kernels.binding.families.family import BindingError, Family
from samebit.kernels.binding.families.inexact import inexact_features
from samebit.kernels.binding.families.known import KNOWN_CLASSES, family_of
from samebit.kernels.binding.lora.peft_model import inner_model
from samebit.kernels.binding.lora.plan import HOLDERS, AdapterPlan, PeftAdapters, check_adapters
from samebit.kernels.binding.plan import Plan
from samebit.kernels.binding.users import Users
from samebit.kernels.binding.wrapped import modules_of_vision, unread_keys, wrapping_module
from samebit.kernels.layout.device import DTYPES
from samebit.kernels.layout.images.image_layout import ImageLayout
from samebit.kernels.layout.kv_pages import PageLayout
from samebit.kernels.layout.states.memory import StateLayout
from samebit.kernels.ops.activation import ACTIVATIONS, PLAIN_ACTIVATIONS

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Binding:
    """Holds what `bind` found out about a model.

    Attributes:
        modules: the model's modules as they were bound.
        users: the workers that generate with this model itself.
        adapters: those that peft has put into it; None without any.
        images: what it takes images as; None where it computes text alone, and why.
    """

    family: Family
    kv_layout: PageLayout
    vocab_size: int
    exact: bool
    modules: BoundModules = field(repr=False)
    state_layout: StateLayout | None = None
    route_layout: RouteLayout | None = None
    users: Users[Any] = field(default_factory=Users, repr=False)
    adapters: PeftAdapters | None = field(default=None, repr=False)
    images: ImageLayout | None = None
    why_no_images: str = ""

    def check(self) -> None:
        """Check that modules and adapters are those that were bound.

        Raises:
            BindingError: what is not, by name.
        """
        if self.adapters is not None:
            self.adapters.check()
        self.modules.check()

    @property
    def ssm_chunk(self) -> int | None:
        """Return the grid of its recurrent layers' states, which a block must be a multiple of; None without such
        layers."""
        return None if self.state_layout is None else self.state_layout.chunk


def bind(model: Model, *, ssm_chunk: int = 64, exact: bool = True) -> Model:
    """Give ``model`` the forward whose bits do not depend on the batch; binding twice changes nothing.

    The same module then serves trainer and rollout. It takes ``input_ids``, ``attention_mask`` (left or right
    padded), ``position_ids`` (packed batches), ``logits_to_keep``; it gives float32 logits (those
    of torch's own head with ``exact=False``) and keeps no Hugging Face cache. Gradient checkpointing works as before.

    Args:
        model: a Hugging Face causal language model on the CPU or on a CUDA device, float32 or bfloat16, on CUDA
            also float16; or one with adapters of peft, LoRA on linear layers. One that is wrapped with vision
            (``Qwen3_5ForConditionalGeneration``) is bound for text. On a bound model, adapters that were added,
            deleted or replaced since are taken in.
        ssm_chunk: the grid of the states of recurrent layers in tokens, where there are such layers: a power of two, at
            least 16, that divides the rollout's block size. It changes no bit.
            It is part of the arithmetic, and it is recorded on the model: trainer and rollout can not differ.
        exact: False leaves norms, activations and GEMMs to torch. For measuring what exactness costs.

    Returns:
        The model itself.

    Raises:
        BindingError: a family, feature, module, dtype or device that is not exact, a module with a forward of its own
            that would not run, by name, or a bound model whose modules are not those that were bound. The model is left
            as it was.
    """
    _check_chunk(ssm_chunk)
    if is_bound(model):
        family = binding_of(model).family
        check_adapters(model, modules_of_vision(wrapping_module(family, inner_model(model))))
        _take_in_adapters(model)
        bound_before = checked_binding_of(model)
        _check_tensors(model)
        if bound_before.exact != exact:
            raise BindingError(f"the model is already bound with exact={not exact}")
        if bound_before.ssm_chunk not in (None, ssm_chunk):
            raise BindingError(f"the model is already bound with ssm_chunk={bound_before.ssm_chunk}")
        return model
    inner = inner_model(model)
    family = _family_of(inner)
    check_adapters(model, modules_of_vision(wrapping_module(family, inner)))
    check_not_compiled(model)
    _check_tensors(inner)
    plan = Plan(family, _text_config(inner), inner, ssm_chunk, exact)
    planned = [(part, plan.attachment_of(name, part)) for name, part in inner.named_modules()]
    computed = {inside for part, attached in planned if attached is not None for inside in part.modules()}
    planned += plan.of_model(inner, dict(planned))
    computed |= {part for part, attached in planned if attached is not None}
    _check_none_is_dropped(inner, computed - {inner, plan.wrapping})
    for part, attached in planned:
        if attached is not None:
            attach(part, attached.forward, attached.facts)
    head: nn.Linear = inner.get_submodule("lm_head")  # type: ignore[assignment]
    inner.__dict__["samebit"] = Binding(
        family,
        plan.kv_layout(),
        vocab_size=head.weight.shape[0],
        exact=exact,
        modules=_recorded(inner),
        state_layout=plan.state_layout(),
        route_layout=plan.route_layout(),
        adapters=plan.lora.adapters(),
        images=plan.vision.layout,
        why_no_images=plan.vision.why_none,
    )
    return model


def is_bound(model: nn.Module) -> bool:
    """Return whether `bind` has been applied to this model."""
    return _known(model) is not None


def binding_of(model: nn.Module) -> Binding:
    """Return the model's `Binding`.

    Raises:
        ValueError: the model is not bound.
        TypeError: it is no model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a bound Hugging Face model, got {type(model).__name__}")
    binding = _known(model)
    if binding is None:
        for name, child in model.named_children():
            if any(map(is_bound, child.modules())):  # of torch.compile, around DistributedDataParallel too
                raise ValueError(f"{type(model).__name__} is not bound, but what it wraps is: give its {name}")
        raise ValueError(f"{type(model).__name__} is not bound: call samebit.kernels.bind(model) first")
    return binding


def _known(model: nn.Module) -> Binding | None:
    found = inner_model(model).__dict__.get("samebit")
    return found if isinstance(found, Binding) else None


def checked_binding_of(model: nn.Module) -> Binding:
    """Return the model's `Binding`, if its modules are still those that were bound.

    Raises:
        ValueError: the model is not bound.
        BindingError: a module, forward or class is not what was bound, by name.
    """
    binding = binding_of(model)
    binding.check()
    return binding


def wrap_forward(model: nn.Module, wrapped: Callable[[Forward], Forward]) -> None:
    """Give a bound model the forward that ``wrapped`` makes of the bound one: it counts as bound.

    Both take the model first. A method of it in the place of either would run this model in each of its copies.
    """
    binding = checked_binding_of(model)
    inner = inner_model(model)
    inner.__dict__["forward"] = MethodType(wrapped(own_forward(inner)), inner)
    inner.__dict__["samebit"] = replace(binding, modules=_recorded(inner))


def _recorded(model: nn.Module) -> BoundModules:
    decoders = [part for part in model.modules() if isinstance(part.__dict__.get("samebit"), bound.DecoderFacts)]
    return BoundModules.of(model, decoders)


def _take_in_adapters(model: nn.Module) -> None:
    """Bind what peft has added to a bound model since, and forget what it has deleted, where all else is as it was."""
    inner, binding = inner_model(model), binding_of(model)
    if binding.adapters is None or not binding.adapters.differ():
        return
    layers = binding.adapters.layers
    binding.modules.apart_from(f"{name}.{holder}" for name in layers for holder in HOLDERS).check()
    plan = AdapterPlan()
    for name, layer in layers.items():
        plan.wrapped(name, layer)
    for name, module in inner.named_modules():
        attached = plan.part(name) if plan.computes(name) else None
        if attached is not None:
            attach(module, attached.forward, attached.facts)
    adapters = plan.adapters()
    for module in inner.modules():
        facts = module.__dict__.get("samebit")
        if isinstance(facts, bound.DecoderFacts):
            attach(module, bound.decoder_forward, replace(facts, adapters=adapters))
    inner.__dict__["samebit"] = replace(binding, modules=_recorded(inner), adapters=adapters)


def _check_none_is_dropped(model: nn.Module, computed: set[nn.Module | None]) -> None:
    """Check that no module whose forward will not run has one of its own; that of the whole model runs."""
    check_no_own_forwards((name, module) for name, module in model.named_modules() if module in computed)


def _check_chunk(given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 16 or given & (given - 1):
        raise BindingError(f"ssm_chunk must be a power of two, at least 16, got {given!r}")


def _family_of(model: nn.Module) -> Family:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise BindingError(f"{name} is not a Hugging Face model; bound families: {', '.join(KNOWN_CLASSES)}")
    config = {**_text_config(model).to_dict()}
    whole = model.config.to_dict()
    config.setdefault("quantization_config", whole.get("quantization_config"))
    config["is_causal"] = config.get("is_causal", True) and whole.get("is_causal", True)
    family = family_of(model)
    reasons = inexact_features(family, config, [key for key, _ in model.named_parameters()])
    if family is None:
        reasons.insert(0, "it is of no known family")
    else:
        exact = PLAIN_ACTIVATIONS if family.mlp.form == "plain" else ACTIVATIONS
        activation = family.mlp.activation_of(config)
        if activation not in exact:
            reasons.append(f"activation {activation!r} (exact: {', '.join(exact)})")
        reasons += unread_keys(family, name, config)
    if family is None or reasons:
        raise BindingError(
            f"{name} can not be bound exactly: {'; '.join(reasons)}. Bound families: {', '.join(KNOWN_CLASSES)}"
        )
    return family


def _text_config(model: Any) -> Any:
    """Return the config of the model, or of the text model in it."""
    return model.config.get_text_config()


def _check_tensors(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type not in DTYPES:
            raise BindingError(f"{name} is on device {parameter.device}; there are kernels for cpu and cuda")
        exact = DTYPES[parameter.device.type]
        if parameter.dtype not in exact:
            allowed = ", ".join(map(str, exact))
            raise BindingError(f"{name} is {parameter.dtype}; exact on {parameter.device.type} are {allowed}")
    check_corrections(model)
