"""Compute a row-invariant linear layer, with autograd.

Contract: ``linear(x, w, b)[i]`` depends on ``x[i]`` alone, not on how many rows are multiplied with it nor
on the number of threads. The order of the sum is written out (`cpu.gemm`): torch's GEMMs keep that promise in no dtype.
In float32 a thread's share of under four rows runs another kernel; in bfloat16, on processors with tile instructions
(AMX), the number of rows and of threads decides how the sum is cut. On the CPU gradients in bfloat16 are torch's own.
"""

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from samebit.kernels.layout import device
from samebit.kernels.layout.device import EXACT_EVERYWHERE, exact_dtypes, plain_backward
from samebit.kernels.layout.options import Layer
from samebit.kernels.layout.shape_checks import check_host
from samebit.kernels.ops.dispatch import Operations, operations_for


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` with bits that do not depend on the other rows.

    Args:
        x: ``[..., K]``, the dtype of ``weight``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]`` in the same dtype.

    Raises:
        ValueError: shapes that do not match.
        TypeError: dtypes that differ, or others than float32 and bfloat16 (on a GPU float16 too).
    """
    layers = ((weight, bias),)
    check_layers(x, layers)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        product: torch.Tensor = _Linear.apply(x, weight, bias)
        return product
    return operations_for(x).multiply(x, layers)[0]


def linear_part(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Compute again, without a gradient, what `linear` gave for a part of a layer's outputs.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, the part.
        bias: ``[N]``, the part's, or None.
        outputs: of the whole layer.
    """
    check_layers(x, ((weight, bias),))
    return operations_for(x).multiply_part(x, (weight, bias), outputs)


def linears(x: torch.Tensor, modules: Sequence[Any]) -> list[torch.Tensor]:
    """Make each module's own call on the same ``x``, or one call of all where no hook could tell: the same bits.

    Args:
        x: ``[..., K]``.
        modules: up to three, each ``[N, K]``. Those that are not bound (``exact=False``) are called.
    """
    if not only_multiply(modules):
        return [module(x) for module in modules]
    layers = [weight_and_bias(module) for module in modules]
    check_layers(x, layers)
    recorded = recorded_parts(x, layers)
    return operations_for(x).multiply(x, layers) if recorded is None else list(_Linears.apply(layers, *recorded))


def multiply(x: torch.Tensor, layers: Sequence[Layer]) -> list[torch.Tensor]:
    """Compute `linear` of up to three layers of one ``x`` in one call, without gradients."""
    check_layers(x, layers)
    return operations_for(x).multiply(x, layers)


def only_multiply(modules: Sequence[nn.Module]) -> bool:
    """Return whether the calls of these modules may be one: all are bound, and none does more than multiply."""
    return all(is_plain(module) and "forward" in vars(module) for module in modules)


def is_plain(module: nn.Module) -> bool:
    """Return whether a call does no more than multiply: no adapter in the module's place, no hook."""
    return type(module) is nn.Linear and not is_hooked(module)


def weight_and_bias(module: nn.Module) -> Layer:
    """Return weight and bias of a plain module, in a fifth of the time that attributes take."""
    parameters = module._parameters
    return parameters["weight"], parameters["bias"]  # type: ignore[return-value]


def is_hooked(module: nn.Module) -> bool:
    """Return whether a hook listens to the calls of a module, of it or of all modules, or to their gradients."""
    named = module.__dict__
    return bool(
        named["_forward_pre_hooks"]
        or named["_backward_hooks"]
        or named["_backward_pre_hooks"]
        or (named["_forward_hooks"] and some_listen(named["_forward_hooks"]))
        or some_listen_to_all()
    )


def some_listen_to_all() -> bool:
    """Return whether a hook listens to the calls of all modules of the process, or to their gradients."""
    return bool(torch_modules._has_any_global_hook())


def some_listen(hooks: Mapping[int, Any]) -> bool:
    """Return whether one of these hooks does something now."""
    return any(map(_listens, hooks.values()))


def _listens(hook: object) -> bool:
    """Return whether a hook does something: that which transformers leaves on a module, once somebody has asked for
    hidden states or router logits, does so only inside of a call that asks for them."""
    home = hook.__globals__ if isinstance(hook, FunctionType) else {}
    if home.get("__name__") != "transformers.utils.output_capturing" or "_active_collector" not in home:
        return True
    return bool(home["_active_collector"].get())


def gradient_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute ``grad.T @ x``, the gradient ``[N, K]`` of a weight.

    Args:
        grad: ``[T, N]``, of the result.
        x: ``[T, K]``, what was multiplied.
    """
    return operations_for(x).gradient_of_weight(grad, x)


def add_gradient_of_inputs(sums: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> None:
    """Add ``grad @ weight`` to the gradient of inputs, in float32 over the parts ``[N, K]`` of a weight.

    Args:
        sums: ``[T, K]`` float32.
        grad: ``[T, N]``, of the result of this part.
        weight: the part.
    """
    operations_for(grad).add_gradient_of_inputs(sums, grad, weight)


def check_layers(x: torch.Tensor, layers: Sequence[Layer]) -> None:
    """Check shapes and dtypes.

    Raises:
        ValueError: shapes that do not match.
        TypeError: dtypes that differ, or that are not exact.
    """
    if not x.dim():
        raise ValueError("x is a single number; allowed: [..., K]")
    width, dtype, by_cpu = x.size(-1), x.dtype, not device.on_gpu(x)
    exact = dtype in EXACT_EVERYWHERE or dtype in exact_dtypes(x)
    for weight, bias in layers:
        outputs, inputs = weight.shape if weight.dim() == 2 else (0, -1)
        if width != inputs or (bias is not None and bias.shape != (outputs,)):
            raise ValueError(
                f"x is {list(x.shape)}, weight {list(weight.shape)}, "
                f"bias {None if bias is None else list(bias.shape)}; allowed: [..., K], [N, K] and [N] or None"
            )
        if not (exact and dtype is weight.dtype and (bias is None or dtype is bias.dtype)):
            given = f"x is {dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
            raise TypeError(f"{given}; allowed: all alike, of {', '.join(map(str, exact_dtypes(x)))}")
        if by_cpu:
            check_host("weight", weight)
            if bias is not None:
                check_host("bias", bias)


def recorded_parts(x: torch.Tensor, layers: Sequence[Layer]) -> tuple[torch.Tensor | None, ...] | None:
    """Return what autograd is to see of a call of these layers: ``x``, all weights, all biases; None if it need not."""
    if not torch.is_grad_enabled():
        return None
    parts = (x, *(weight for weight, _ in layers), *(bias for _, bias in layers))
    return parts if any(part is not None and part.requires_grad for part in parts) else None


def gradients_of_layers(
    kernels: Operations, x: torch.Tensor, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Return the gradients of `recorded_parts`, None for each that is not ``needed``, from those of the results.

    The gradient of x is added up from the last layer to the first, as autograd does for separate layers.
    """
    of_x, *of_parts = needed
    inputs, grad_x = x.reshape(-1, x.shape[-1]), None
    rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    of_weights, of_biases = of_parts[: len(grads)], of_parts[len(grads) :]
    grad_weights = [
        kernels.gradient_of_weight(of_rows, inputs) if wanted else None
        for of_rows, wanted in zip(rows, of_weights, strict=True)
    ]
    grad_biases = [of_rows.sum(0) if wanted else None for of_rows, wanted in zip(rows, of_biases, strict=True)]
    if of_x:
        for grad, weight in zip(reversed(grads), reversed(weights), strict=True):
            product = kernels.gradient_of_inputs(grad, weight)
            grad_x = product if grad_x is None else grad_x.add_(product)
    return grad_x, *grad_weights, *grad_biases


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        kernels = ctx.kernels = operations_for(x)
        ctx.save_for_backward(x, weight)
        return kernels.multiply(x, ((weight, bias),))[0]

    @staticmethod
    @plain_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            ctx.kernels.gradient_of_inputs(grad, weight) if of_x else None,
            ctx.kernels.gradient_of_weight(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class _Linears(torch.autograd.Function):
    """Computes layers of one ``x``, given as `recorded_parts`; gradients are `_Linear`'s of each layer."""

    @staticmethod
    def forward(ctx: Any, layers: Sequence[Layer], x: torch.Tensor, *parts: torch.Tensor | None) -> Any:
        kernels = ctx.kernels = operations_for(x)
        ctx.save_for_backward(x, *(weight for weight, _ in layers))
        return tuple(kernels.multiply(x, layers))

    @staticmethod
    @plain_backward
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return None, *gradients_of_layers(ctx.kernels, x, weights, grads, ctx.needs_input_grad[1:])
