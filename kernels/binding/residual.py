"""Let a residual sum wait for the norm that reads it, so that both are one launch on a GPU, in training too.

Hugging Face's layers add (``hidden = residual + hidden``) and call a norm with the sum. Here what is added is an
`Addend`, which turns that into a `WaitingSum`; a bound norm computes it together with its own result.

Invariants:

* A sum's place in the graph of autograd is that of torch's sum, from the beginning: only its values wait.
* Any function or method of torch that reads a sum first finds it added, also what torch does without asking Python
  (saving, making views). What is computed from it is a plain tensor.
* The sum has the bits of torch's: one addition an element, rounded once to the dtype; its gradient is that of both.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from samebit.kernels.layout import device
from samebit.kernels.ops.norm import add_rms_norm

_OF_MEMORY = frozenset(
    [
        torch.Tensor.__array__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__repr__,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
    ]
)
"""What torch does for plain tensors only, and without gradients."""


class Addend(torch.Tensor):
    """Makes a `WaitingSum` when it is added to a tensor from the right; in all else it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(x: torch.Tensor) -> torch.Tensor:
        """Return what a layer hands to its residual; ``x`` itself on the CPU, where sums are computed at once."""
        if not device.on_gpu(x):
            return x
        plain = x.view_as(x) if isinstance(x, WaitingSum) else x
        return plain.as_subclass(Addend)

    def __radd__(self, residual: Any) -> torch.Tensor:
        """Compute ``residual + self`` when it is read."""
        return _sum_of(residual, self)


class WaitingSum(torch.Tensor):
    """Holds memory for a sum, and the two tensors that are added there when it is first read."""

    room: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor] | None
    versions: tuple[int, int]

    @staticmethod
    def of(residual: torch.Tensor, addend: torch.Tensor) -> "WaitingSum":
        """Make one without gradient of two plain tensors without gradient, alike and contiguous."""
        room = torch.empty_like(addend)
        total: WaitingSum = torch.Tensor._make_subclass(WaitingSum, room)
        total.room, total.parts, total.versions = room, (residual, addend), (residual._version, addend._version)
        return total

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add first, then compute what was asked for, as of a plain tensor."""
        plain, named = tree_map_only(WaitingSum, WaitingSum.added, (args, dict(kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **named) if func in _OF_MEMORY else func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what stands in where there is none
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute below autograd, of the memory: this is where calls arrive that `__torch_function__` does not see."""
        plain, named = tree_map_only(WaitingSum, WaitingSum.added, (args, dict(kwargs or {})))
        return func(*plain, **named)

    def __add__(self, other: Any) -> torch.Tensor:
        """Compute ``self + other``, when it is read if that is a sum that may wait."""
        return _sum_of(self, other) if isinstance(other, Addend) else super().__add__(other)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return itself, which goes on waiting, if its own dtype is asked for: some layers do so before their norm."""
        same = not args and kwargs == {"dtype": self.room.dtype}
        return self if same else super().to(*args, **kwargs)

    def added(self) -> torch.Tensor:
        """Return the sum without gradient: a plain tensor with the same memory.

        Autograd may have saved the sum already; it does not count this as a modification, as nothing has read the sum.
        """
        parts = self.taken()
        if parts is not None:
            with _unsafe_preserve_version_counter(self.room):
                torch.add(*parts, out=self.room)
        return self.room

    def taken(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hand the two tensors over to the caller, who adds them; None if they have been added.

        Raises:
            RuntimeError: one of them was modified in place since: the sum would be another one.
        """
        if self.parts is None:
            return None
        one, other = self.parts
        if (one._version, other._version) != self.versions:
            raise RuntimeError(
                "a layer's residual, or what was added to it, was modified in place before their sum was read; "
                "allowed: to read the sum first"
            )
        self.parts = None
        return one, other


class _Sum(torch.autograd.Function):
    """Stands where torch's sum stands: the gradient of the sum is that of both."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, addend: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return WaitingSum.of(*parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        return grad, grad, None


def normed_sum(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor | None:
    """Compute a sum that waits, and its RMSNorm, which is returned; None if ``x`` is no such sum."""
    parts = x.taken() if isinstance(x, WaitingSum) else None
    if parts is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return add_rms_norm(*parts, x, weight, eps, offset)


def _sum_of(residual: Any, addend: torch.Tensor) -> torch.Tensor:
    one, other = _detached(residual), addend.detach()
    with torch._C.DisableTorchFunctionSubclass():
        if one is None or not _may_wait(one, other):
            return torch.add(residual, addend)
        if torch.is_grad_enabled() and (residual.requires_grad or addend.requires_grad):
            total: torch.Tensor = _Sum.apply(residual, addend, (one, other))
            return total
        return WaitingSum.of(one, other)


def _detached(x: Any) -> torch.Tensor | None:
    """Return a plain tensor without gradient; None of what is no tensor."""
    if isinstance(x, WaitingSum):
        return x.added()
    return x.detach() if isinstance(x, torch.Tensor) else None


def _may_wait(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        and one.is_contiguous()
        and other.is_contiguous()
        and not (one.is_inference() or other.is_inference())
    )
