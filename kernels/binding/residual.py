"""Let a residual sum wait for the norm that reads it, so that both are one launch, in a rollout on a GPU.

Hugging Face's layers add (``hidden = residual + hidden``) and call a norm with the sum. Here what is added is an
`Addend`, which turns that into a `WaitingSum`; a bound norm computes it together with its own result.

Invariants:

* Any function or method of torch that reads a sum first finds it added: it only looks like a tensor that
  was computed. What is computed from it is a plain tensor.
* It lives within one forward of a rollout, without gradients: nothing saves it, and nothing differentiates it.
* The sum has the bits of torch's: one addition an element, rounded once to the dtype.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from samebit.kernels.layout import device
from samebit.kernels.layout.forward_context import installed_context
from samebit.kernels.ops.norm import add_rms_norm


class Addend(torch.Tensor):
    """Is a plain tensor but for one thing: added to another one from the right, it makes a `WaitingSum`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(x: torch.Tensor) -> torch.Tensor:
        """Return what a layer hands to its residual; ``x`` itself where sums are computed at once."""
        context = installed_context()
        in_rollout = context is not None and context.pages is not None and not torch.is_grad_enabled()
        return x.as_subclass(Addend) if in_rollout and device.on_gpu(x) else x

    def __radd__(self, residual: Any) -> torch.Tensor:
        """Compute ``residual + self`` when it is read."""
        return _sum_of(residual, self)


class WaitingSum(torch.Tensor):
    """Has room for a sum, and what is to be added until it is read."""

    parts: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add first, then compute what was asked for, as of a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, WaitingSum):
                    one._settle()
            return func(*args, **(kwargs or {}))

    def __add__(self, other: Any) -> torch.Tensor:
        """Compute ``self + other``, when it is read if that is a sum that may wait."""
        if isinstance(other, Addend):
            with torch._C.DisableTorchFunctionSubclass():
                self._settle()
                return _sum_of(self.as_subclass(torch.Tensor), other)
        return super().__add__(other)

    def _settle(self) -> None:
        if self.parts is not None:
            parts, self.parts = self.parts, None
            torch.add(*parts, out=self.as_subclass(torch.Tensor))


def normed_sum(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor | None:
    """Compute a sum that waits, and its RMSNorm, which is returned; None if ``x`` is no such sum."""
    if not isinstance(x, WaitingSum) or x.parts is None or torch.is_grad_enabled():
        return None
    parts, x.parts = x.parts, None
    with torch._C.DisableTorchFunctionSubclass():
        return add_rms_norm(*parts, x.as_subclass(torch.Tensor), weight, eps, offset)


def _sum_of(residual: Any, addend: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        added = addend.as_subclass(torch.Tensor)
        alike = (
            isinstance(residual, torch.Tensor)
            and (residual.shape, residual.dtype, residual.device) == (added.shape, added.dtype, added.device)
            and residual.is_contiguous()
            and added.is_contiguous()
        )
        if torch.is_grad_enabled() or not alike:
            return torch.add(residual, added)
        total = torch.empty_like(added).as_subclass(WaitingSum)
        total.parts = residual, added
        return total
