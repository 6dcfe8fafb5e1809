"""Check what a caller says about a score: which token ids, at which temperatures, and that nobody compiles it or asks
for tangents."""

from collections.abc import Sequence

import numpy as np
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # loads nothing of torch._dynamo
from torch.autograd import forward_ad

from samebit.kernels.layout.shape_checks import check_readable


def check_not_compiled(what: str) -> None:
    """Raise ValueError if `what` runs inside of a function that torch.compile compiles.

    What lies between the kernels would be compiled, and rounded in other places: a product that is added, say. The
    tracer asks no function whether it may: this one stands in no graph, and so is called when the graph has run.
    """
    if get_eval_frame_callback():  # None, and False where only what was compiled before runs compiled
        raise ValueError(
            f"{what} is called inside of a function that torch.compile compiles, where it does not keep its bits: call "
            "it outside and compile what follows, or put the call into a function that is decorated with "
            "torch.compiler.disable"
        )


def check_no_tangents(what: str) -> None:
    """Raise ValueError inside of a `torch.autograd.forward_ad.dual_level`: kernels would drop the tangents of weights
    that need no gradient, where torch would raise for others."""
    if forward_ad._current_level >= 0:
        raise ValueError(
            f"{what} is called inside of torch.autograd.forward_ad.dual_level: its kernels have gradients, by "
            "backward(), and no tangents"
        )


def check_ids(name: str, ids: object) -> None:
    """Raise TypeError unless these are a tensor of integers (no bools), which token ids are."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(ids).__name__}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, as torch.int64, got {ids.dtype}")
    check_readable(name, ids)


def check_in_vocabulary(name: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError unless all ids are in the vocabulary."""
    if ids.numel():
        least, greatest = int(ids.min()), int(ids.max())
        if least < 0 or greatest >= vocab_size:
            raise ValueError(f"{name} must lie in [0, {vocab_size}), got {least}..{greatest}")


def temperatures_of(given: object, shape: Sequence[int], device: torch.device, axes: str = "") -> torch.Tensor:
    """Return ``shape`` float32 of a number, or of what broadcasts to this shape; the values are not looked at.

    Args:
        given: what a caller gave.
        axes: what the axes of the shape are, for the error.

    Raises:
        ValueError: no number and no numbers, of a shape that does not broadcast, or numbers that wait for a gradient.
        TypeError: a tensor without values, or a sparse one.
    """
    wanted = f"{axes or 'the shape of the tokens'}, {list(shape)}"
    is_array = isinstance(given, torch.Tensor | np.ndarray | np.generic)
    try:
        if isinstance(given, bool | str):
            raise TypeError("that is no number")
        on = given.device if isinstance(given, torch.Tensor) else "cpu"
        numbers = torch.as_tensor(given, dtype=None if is_array else torch.float64, device=on)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"temperature must be a positive number, or a tensor that broadcasts to {wanted}, got {given!r}"
        ) from error
    check_readable("temperature", numbers)
    if numbers.dtype.is_complex or numbers.dtype is torch.bool:
        raise ValueError(f"temperature must be of real numbers, got {numbers.dtype}")
    if numbers.requires_grad and torch.is_grad_enabled():
        raise ValueError("temperature requires grad, and would get none: scores are differentiable in the logits alone")
    fits = numbers.dim() <= len(shape) and all(
        own in (1, wide) for own, wide in zip(reversed(numbers.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"temperature must broadcast to {wanted}, got the shape {list(numbers.shape)}")
    return numbers.to(dtype=torch.float32, device=device).expand(shape)


def check_temperatures(temperatures: torch.Tensor) -> None:
    """Raise ValueError unless all are positive, and finite as float32."""
    good = (temperatures > 0) & (temperatures < torch.inf)
    if not bool(good.all()):
        bad = temperatures[~good].reshape(-1)[0].item()
        raise ValueError(f"temperature must be positive and finite as a float32, got {bad}")
