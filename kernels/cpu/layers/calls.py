"""Compute decoder layers one after the other in one call.

Between two layers nothing of Python runs: it took .05 ms a layer of a small model, in which threads that wait fell
asleep. The kernels of layers, which are of several kinds, have one signature, and are called at their addresses; what
they are given lies in memory, eight bytes a number.

Invariant: a layer is computed by the same kernel whether it is alone in a call or not.
"""

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import typeof, types

from samebit.kernels.cpu.base.callee import address_of, call_at
from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import kind_of, read
from samebit.kernels.cpu.base.part import inlined_part
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.weights import LayerWeights
from samebit.kernels.openmp import num_threads

Angles = tuple[torch.Tensor, torch.Tensor]
"""Holds cosines and sines."""


class Call(NamedTuple):
    """Holds the addresses of a layer's kernel, of its x, its result, its norm where another MLP follows, a room for
    what is between its own kernels, the layer's record and the `Step`."""

    kernel: int
    x: int
    out: int
    normed: int
    room: int
    record: int
    step: int


class Step(NamedTuple):
    """Holds what layers of a call share that have the same angles: T, cosines, sines and their number, tokens a block;
    of each row its block and its place there; sequences, and captures. Behind it lies the `Work`."""

    rows: int
    cos: int
    sin: int
    angles: int
    block_size: int
    blocks: int
    offsets: int
    sequences: int
    num_sequences: int
    captures: int
    num_captures: int


class Work(NamedTuple):
    """Holds block tables, tiles and bunches, as attention takes them."""

    block_tables: int
    num_tables: int
    table_width: int
    tiles: int
    num_tiles: int
    bunches: int
    num_bunches: int


_KEPT, _ROOM = "call", ("room",)
_CALL, _STEP, _WORK = len(Call._fields), len(Step._fields), len(Work._fields)


@inlined_part
def call_and_step(call_at: int) -> Any:
    """Read the `Call` at an address, and its `Step`."""
    call = Call(*read(call_at, _CALL, np.int64(0)))
    return call, Step(*read(call.step, _STEP, np.int64(0)))


@inlined_part
def work_of(call: Any) -> Any:
    """Read the `Work` of a `Call`."""
    return Work(*read(call.step + 8 * _STEP, _WORK, np.int64(0)))


def _run(threads: int, calls: Any, kind: Any) -> None:
    """Compute the layers of ``calls`` ``[n, 7]``, each a `Call`."""
    for place in range(len(calls)):
        call_at(calls[place, 0], (threads, np.int64(calls[place].ctypes.data), kind))


_kernel = compile_kernel(_run)


def kernel_at(kernel: Any, dtype: torch.dtype) -> int:
    """Return the address of a layer's kernel: of threads, the address of a `Call`, and a number of the dtype's kind."""
    return address_of(kernel, (types.int64, types.int64, typeof(kind_of(dtype))))


def kept_call(
    weights: LayerWeights, places: tuple[int, ...], terms: Iterable[object], make: Callable[[], LayerCall]
) -> LayerCall:
    """Return the call of a layer, made once for as long as its weights are where they are, what it keeps is at these
    places in memory, and adapters' terms are these."""
    made_of = places, tuple(terms)
    if _KEPT not in weights.worked_out or weights.worked_out[_KEPT][0] != made_of:
        weights.worked_out[_KEPT] = made_of, make()
    call: LayerCall = weights.worked_out[_KEPT][1]
    return call


def record(layout: Struct, *numbers: object) -> npt.NDArray[np.int64]:
    """Return numbers as `base.memory.read` reads them, of a layout of eight bytes each."""
    return np.frombuffer(layout.pack(*numbers), np.int64)


def run_layers(
    x: torch.Tensor, calls: Sequence[LayerCall], angles: Sequence[Angles], context: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement `dispatch.run_layers`."""
    x, rooms = x.contiguous(), [call.room for call in calls]
    out, behind = torch.empty_like(x), torch.empty_like(x) if any(call.apart for call in calls) else None
    room = _room(context, max(context.num_rows * of_row + of_layer for of_row, of_layer in rooms))
    steps = {id(pair): pair for pair in angles}
    step_at = {place: _step(context, pair).ctypes.data for place, pair in steps.items()}
    places = out.data_ptr(), 0 if behind is None else behind.data_ptr(), room.data_ptr()
    table = np.array(
        [
            (call.kernel, places[0], *places, call.record_at, step_at[id(pair)])
            for call, pair in zip(calls, angles, strict=True)
        ],
        np.int64,
    )
    table[0, 1] = x.data_ptr()  # the others go on where the one before has written
    _kernel(num_threads(), table, kind_of(x.dtype))
    return out, behind if calls[-1].apart else None


def _room(context: ForwardContext, size: int) -> torch.Tensor:
    """Return at least so many bytes for what is between the kernels of a layer; the layers of a step share them."""
    kept = context.worked_out.get(_ROOM)
    if kept is None or len(kept) < size:
        kept = context.worked_out[_ROOM] = torch.empty(size, dtype=torch.uint8, device="cpu")
    room: torch.Tensor = kept
    return room


def _step(context: ForwardContext, angles: Angles) -> npt.NDArray[np.int64]:
    """Return `Step` and `Work` of a call, made once."""
    cos, sin = angles
    key = "step", cos.data_ptr(), sin.data_ptr(), cos.size(1)
    if key not in context.worked_out:
        blocks, offsets, sequences, block_tables, tiles, bunches = arrays = [
            np.ascontiguousarray(part, np.int32) for part in (*context.read_by_layers, context.bunches)
        ]
        captures = len(context.captures)
        step = np.array([
            context.num_rows, *key[1:], context.block_size, blocks.ctypes.data, offsets.ctypes.data,
            sequences.ctypes.data, sequences.shape[1], context.captured.data_ptr() if captures else 0, captures,
            block_tables.ctypes.data, *block_tables.shape, tiles.ctypes.data, len(tiles), bunches.ctypes.data,
            len(bunches),
        ])  # fmt: skip
        context.worked_out[key] = step, arrays
    found: npt.NDArray[np.int64] = context.worked_out[key][0]
    return found
