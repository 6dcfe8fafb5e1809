"""Compute what stands before and behind the decoder layers of a rollout's step, as calls of their own kind: the rows of
the embedding, times a factor; and of the rows that reach the head the norm, the product with the head, and that in
float32.

Invariant: an element is computed by the parts that the operations of the modules run, and rounded where they round. A
row depends on itself alone, so those that do not reach the head need no norm.

T rows, K of them reach the head, W hidden size.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import copy, elements, longs, read, whole_lines
from samebit.kernels.cpu.base.numeric import narrow, widen
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import NO_OTHERS
from samebit.kernels.cpu.layers.calls import call_and_step, kernel_at, record
from samebit.kernels.cpu.layers.products import (
    ROW_PARTS,
    Kernels,
    product,
    product_by_tiles,
    product_of_pairs,
    shared,
    write_widened,
)
from samebit.kernels.cpu.norm.forward import layer_norm_row, rms_norm_row
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.ends import EndNumbers, EndWeights

_FLOAT, _ONE = np.float32(0), np.float32(1)
_FLOAT_BYTES = 4


class Places(NamedTuple):
    """Holds addresses of token ids, of the rows that reach the head (0 for all of them, in order), and of the logits;
    K; tokens of the embedding, W, outputs of the head; and the addresses of `EndWeights.flat`, 0 for no bias."""

    ids: int
    kept: int
    logits: int
    num_kept: int
    tokens: int
    width: int
    outputs: int
    embedding: int
    norm: int
    norm_bias: int
    head: int
    bias: int


_PLACES = len(Places._fields)
_NUMBERS = len(EndNumbers._fields)
_LAYOUT = Struct(f"={_PLACES}q" + "f4x" * _NUMBERS)
"""Lays out the record of both calls: `Places`, and `EndNumbers`."""


@inlined_part
def _places_of(call: Any) -> Any:
    return Places(*read(call.record, _PLACES, np.int64(0)))


@inlined_part
def _numbers_of(call: Any) -> Any:
    return EndNumbers(*read(call.record + 8 * _PLACES, _NUMBERS, _FLOAT))


@inlined_part
def _all_below(numbers: Any, end: int) -> bool:
    """Return whether all numbers are from 0 on and below ``end``."""
    fit = True
    for i in range(len(numbers)):
        fit = fit and 0 <= numbers[i] < end
    return fit


@kernel_part
def _embed_part(part: int, places: Places, rows: int, factor: Any, out_at: int, kind: Any) -> None:
    """Copy the embeddings of a share of the rows, times a factor."""
    width, ids = places.width, longs(places.ids, rows)
    embedding, out = elements(places.embedding, places.tokens * width, kind), elements(out_at, rows * width, kind)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        first = ids[row] * width
        source, target = embedding[first : first + width], out[row * width : (row + 1) * width]
        if factor == _ONE:
            copy(source, target)
        else:
            for i in range(width):
                target[i] = narrow(widen(source[i]) * factor, target[i])


def _embed(threads: int, call_at: int, kind: Any) -> None:
    """Write the embeddings of a step's tokens."""
    call, step = call_and_step(call_at)
    places = _places_of(call)
    if not _all_below(longs(places.ids, step.rows), places.tokens):
        raise IndexError("a token id is not one of the embedding's")
    share_out(
        _embed_part, ROW_PARTS, shared(step.rows * places.width, threads),
        (places, step.rows, _numbers_of(call).factor, call.out, kind),
    )  # fmt: skip


@kernel_part
def _norm_part(part: int, call: Any, places: Places, rows: int, numbers: Any, kind: Any) -> None:
    """Write the norms of a share of the rows that reach the head, one after the other."""
    width, count = places.width, places.num_kept
    x, out = elements(call.x, rows * width, kind), elements(call.room, count * width, kind)
    kept = longs(places.kept, count if places.kept else 0)
    weight, lanes = elements(places.norm, width, kind), np.empty(LANES, np.float32)
    for place in range(count * part // ROW_PARTS, count * (part + 1) // ROW_PARTS):
        row = kept[place] if len(kept) > 0 else place
        source = x[row * width : (row + 1) * width]
        to = out[place * width : (place + 1) * width]
        if places.norm_bias:
            layer_norm_row(source, weight, elements(places.norm_bias, width, kind), numbers.eps, lanes, to)
        else:
            rms_norm_row(source, weight, numbers.offset, numbers.eps, lanes, to)


def _with_product(multiply: Callable[..., None]) -> Callable[..., None]:
    """Make norm and head from a product of up to three layers of one input."""

    @kernel_part
    def head(threads: int, call_at: int, kind: Any) -> None:
        """Compute the logits of the `calls.Call` at an address."""
        call, step = call_and_step(call_at)
        places, itemsize = _places_of(call), elements(0, 0, kind).itemsize
        numbers = _numbers_of(call)
        count, width, outputs, at = places.num_kept, places.width, places.outputs, places.logits
        if places.kept and not _all_below(longs(places.kept, count), step.rows):
            raise IndexError("a row that is to reach the head is not one of the step's")
        share_out(
            _norm_part, ROW_PARTS, shared(count * width, threads), (call, places, step.rows, numbers, kind)
        )  # fmt: skip
        if itemsize < _FLOAT_BYTES:
            at = call.room + whole_lines(count * width) * itemsize
        multiply(threads, call.room, width, count, width, (places.head, places.bias, outputs, at, *NO_OTHERS), kind)
        if itemsize < _FLOAT_BYTES:
            write_widened(threads, at, count * outputs, places.logits, kind)

    made: Callable[..., None] = head
    return made


_head = _with_product(product)
_head_by_pairs = _with_product(product_of_pairs)
_head_by_tiles = _with_product(product_by_tiles)


def _run(threads: int, call_at: int, kind: Any) -> None:
    """Compute norm and head, multiplying in float32."""
    _head(threads, call_at, kind)


def _run_by_pairs(threads: int, call_at: int, kind: Any) -> None:
    """Compute norm and head in bfloat16, multiplying in pairs of inputs."""
    _head_by_pairs(threads, call_at, kind)


def _run_by_tiles(threads: int, call_at: int, kind: Any) -> None:
    """Compute norm and head in bfloat16, multiplying with tile instructions."""
    _head_by_tiles(threads, call_at, kind)


_embedding_kernel = compile_kernel(_embed)
_kernels = Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles)))
_KEPT = "ends"


def end_calls(
    ids: torch.Tensor, kept: torch.Tensor | None, weights: EndWeights, numbers: EndNumbers, logits: torch.Tensor
) -> tuple[LayerCall, LayerCall]:
    """Implement `dispatch.WholeCalls.end_calls`."""
    (tokens, width), (count, outputs), dtype = weights.embedding.shape, logits.shape, weights.embedding.dtype
    if _KEPT not in weights.worked_out:
        weights.worked_out[_KEPT] = kernel_at(_embedding_kernel, dtype), kernel_at(_kernels.of(dtype), dtype)
    first, last = weights.worked_out[_KEPT]
    read_by_both = record(
        _LAYOUT, ids.data_ptr(), 0 if kept is None else kept.data_ptr(), logits.data_ptr(), count, tokens, width,
        outputs, *weights.addresses, *numbers,
    )  # fmt: skip
    narrow = outputs * (dtype.itemsize < _FLOAT_BYTES)  # rounded to their dtype first, and float32 behind that
    room = (count * (width + narrow) + LANES) * dtype.itemsize
    return LayerCall(first, read_by_both, (0, 0), apart=False), LayerCall(last, read_by_both, (0, room), apart=False)
