"""Decide which kind of device computes, and in which dtypes: by the tensor's device, here and nowhere else."""

import functools
from collections.abc import Callable
from typing import Any

import torch

EXACT_EVERYWHERE = (torch.float32, torch.bfloat16)
"""Lists the dtypes that are computed exactly on every device."""

_GPU_DTYPES = (*EXACT_EVERYWHERE, torch.float16)

DTYPES = {"cpu": EXACT_EVERYWHERE, "cuda": _GPU_DTYPES, "meta": _GPU_DTYPES}
"""Lists the dtypes that are computed exactly on a type of device. Parameters on "meta" get their memory later: ranks of
a sharded model that do not load it start so."""


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether the kernels of a GPU compute on this tensor.

    Raises:
        ValueError: neither these nor those of the CPU do: it is on "meta", where there is no memory, say.
    """
    if tensor.is_cpu:
        return False
    if not tensor.is_cuda:
        raise ValueError(f"a tensor is on {tensor.device}; there are kernels for cpu and cuda")
    return True


def check_current(tensor: torch.Tensor) -> None:
    """Check that kernels launched now run on the GPU that the tensor is on: they go to the thread's current one.

    Raises:
        ValueError: it is on another one, by their numbers.
    """
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        current = f"cuda:{torch.cuda.current_device()}"
        raise ValueError(
            f"a tensor is on {tensor.device}, while this thread's current device is {current}, where kernels would "
            f"read it: compute inside of `with torch.cuda.device({tensor.device.index})`"
        )


def exact_dtypes(tensor: torch.Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes that are computed exactly where this tensor is."""
    return DTYPES["cuda" if on_gpu(tensor) else "cpu"]


def plain_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of a function: it refuses to be differentiated itself, and computes in the dtypes of what
    it is given, also where a loss is differentiated inside autocast.

    The backward raises RuntimeError under ``create_graph=True``. `torch.autograd.function.once_differentiable` would
    raise only where the incoming gradient has one itself, which that of a sum has not: the penalty of a gradient, or a
    product with the Hessian, would be 0.
    """

    @functools.wraps(backward)
    def plain(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients that can be differentiated, and samebit's kernels have first "
                "derivatives alone"
            )
        kind = next((grad.device.type for grad in grads if grad is not None), "cpu")
        if not torch.is_autocast_enabled(kind):
            return backward(ctx, *grads)
        with torch.autocast(kind, enabled=False):
            return backward(ctx, *grads)

    return plain
