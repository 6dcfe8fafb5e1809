"""Define the building blocks of the Triton kernels, float32 inside."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Tells that the interpreter runs: it multiplies matrices with NumPy, which knows no bfloat16."""

LOG2E = tl.constexpr(math.log2(math.e))

_CLEARED = tl.constexpr(1024)
"""Count of elements that are cleared at once."""

_LAUNCHES = threading.RLock()
"""Is held while a kernel is launched, and compiled and loaded before that."""


class LayerTooLargeError(OutOfResources, ValueError):  # type: ignore[misc]  # Triton has no types
    """Says that a GPU does not hold the tile of a layer, and in what it lacks room."""

    def __str__(self) -> str:
        return (
            f"this GPU does not hold a layer of these sizes and dtype: it takes {self.required} of {self.name}, "
            f"allowed: {self.limit}"
        )


class _Kernel(JITFunction[Any]):  # type: ignore[misc]  # Triton has no types
    """Launches from one thread at a time: Triton would let a second one launch a kernel that is not loaded yet. Refuses
    a layer whose tile the GPU does not hold."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        with _LAUNCHES:
            try:
                return super().run(*args, grid=grid, warmup=warmup, **options)
            except OutOfResources as error:
                what = f"{error.name} for a program of {self.fn.__name__}"
                raise LayerTooLargeError(error.required, error.limit, what) from None


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel, or what kernels call, of a function: as `triton.jit`, for several threads."""

    def made(function: Callable[..., Any]) -> Any:
        kind = triton.jit if INTERPRETED else _Kernel
        return kind(function, do_not_specialize=list(do_not_specialize))

    return made


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous at a multiple of sixteen bytes: kernels of other addresses are other kernels."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[T, W]`` itself if its rows, parts of wider ones even, are contiguous and aligned; else a copy."""
    strided = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.stride(0) * x.itemsize) % 16 == 0
    return x if strided else aligned(x)


@jit()
def dot(a: tensor, b: tensor, acc: tensor) -> Any:
    """Compute ``acc + a @ b`` in float32, without TF32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@jit()
def widened(x: tensor) -> Any:
    """Return ``x`` in float32; the compiler does not see that it had 16 bits.

    Of factors of which it sees that, Triton 3.6 and 3.7 make a product in TF32 for a B200, whatever `dot` asks for.
    """
    x = x.to(tl.float32)
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, is_pure=False, pack=1)
    return x


@jit()
def sigmoid(x: tensor) -> Any:
    """Compute 1 / (1 + e**-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@jit()
def tanh(x: tensor) -> Any:
    """Compute the hyperbolic tangent: a polynomial near zero (Cephes), from ``exp`` elsewhere."""
    size = tl.abs(x)
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = p * square * x + x
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 20.0)) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@jit()
def softplus(x: tensor) -> Any:
    """Compute log(1 + e**x); for small e**x a series, because 1 + e**x would round it away."""
    u = tl.exp(-tl.abs(x))
    w = u / (2.0 + u)
    square = w * w
    p = square * (1 / 15) + (1 / 13)
    p = p * square + (1 / 11)
    p = p * square + (1 / 9)
    p = p * square + (1 / 7)
    p = p * square + (1 / 5)
    p = p * square + (1 / 3)
    return tl.maximum(x, 0.0) + 2.0 * (p * square * w + w)


@jit()
def clear_if_idle(out: tensor, sequences: tensor, row: tensor, WIDTH: tl.constexpr) -> None:
    """Write zeros to a row ``[WIDTH]`` of ``out`` if it is of no sequence: a CUDA graph has room for more rows.

    Such a row goes on through norms and products, which are computed a row at a time. So it changes no other one, but
    it has to be numbers: what memory happens to hold may be NaN, and a router, say, has to choose something.
    """
    if tl.load(sequences + row) < 0:
        for first in range(0, WIDTH, _CLEARED):
            place = first + tl.arange(0, _CLEARED)
            tl.store(out + row * WIDTH + place, tl.zeros((_CLEARED,), out.dtype.element_ty), mask=place < WIDTH)


@jit()
def clear_idle_parts(
    out: tensor, sequences: tensor, rows: tensor, part: tensor, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Write zeros to one of the parts ``[WIDTH]`` of each such row: programs along axis 0 take turns."""
    place = tl.arange(0, PADDED)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(sequences + row) < 0:
            at = (tl.cast(row, tl.int64) * PARTS + part) * WIDTH + place
            tl.store(out + at, tl.zeros((PADDED,), out.dtype.element_ty), mask=place < WIDTH)


@jit()
def keep_state(
    state: tensor, in_state: tensor, real: tensor, own: tensor, states: tensor, block_states: tensor, captured: tensor,
    captures: tensor, first_capture: tensor, grid: tensor, sequence: tensor, head: tensor, done: tensor, end: tensor,
    HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Store a head's state at position ``done``, the end of a chunk, wherever it is wanted: as that of the sequence if
    the call, up to ``end``, has no whole chunk more; as that of its last block boundary; and as captures of it.

    ``in_state``, ``real``: places in the state's ``SIZE`` elements, and which are elements of it. ``own``: where those
    of the sequence's slot and head begin. ``grid``: of the block boundaries.
    """
    if done + CHUNK > end:
        tl.store(states + own + in_state, state, mask=real)
    if done == end // grid * grid:
        tl.store(block_states + own + in_state, state, mask=real)
    for capture in range(tl.load(first_capture + sequence), tl.load(first_capture + sequence + 1)):
        if tl.load(captures + 3 * capture + 1) == done:
            target = (tl.load(captures + 3 * capture + 2).to(tl.int64) * HEADS + head) * SIZE
            tl.store(captured + target + in_state, state, mask=real)
