"""Compute the projections of a Gated DeltaNet mixer's input inside of a kernel that computes a whole decoder layer, and
put them in order where they stand together per key head.

T rows, W hidden size, Hk key heads, Hv value heads, K and V their sizes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from samebit.kernels.cpu.base.memory import NO_END, elements
from samebit.kernels.cpu.base.part import inlined_part, kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.gemm.layers import NO_LAYER, NO_OTHERS
from samebit.kernels.cpu.layers.products import shared
from samebit.kernels.cpu.layers.terms import terms_at

_PRODUCTS = 16
"""Products that take the time of one element of a row-wise kernel."""


def with_projections(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make them from a product of up to three layers of one input, and what adds an adapter's terms to it."""

    @kernel_part
    def project(threads: int, x: int, weights: Any, sizes: Any, rows: int, places: Any, terms: int, kind: Any) -> None:
        """Multiply; where the outputs stand together per key head, put them in order.

        Args:
            threads: take shares of each kernel.
            x: address of T rows.
            weights: addresses of weight and bias of up to four layers.
            sizes: `mixer.Sizes`.
            rows: T.
            places: addresses of queries, keys and values ``[T, 2 Hk K + Hv V]``, of the gate ``[T, Hv V]``, of b and of
                a, ``[T, Hv]`` each; of rooms for the first two, and for the others, per key head.
            terms: where the `terms.Terms` of both groups of layers lie.
            kind: a number of the elements' type.
        """
        (
            first_weight, first_bias, second_weight, second_bias, third_weight, third_bias, fourth_weight, fourth_bias,
        ) = weights  # fmt: skip
        qkv, gate, b, a, qkvz, ba = places
        width, heads, inner = sizes.width, sizes.value_heads, sizes.value_heads * sizes.value_dim
        channels, no = 2 * sizes.key_heads * sizes.key_dim + inner, np.int64(0)
        if sizes.by_key_head > 0:
            multiply(
                threads, x, width, rows, width,
                (first_weight, first_bias, channels + inner, qkvz, second_weight, second_bias, 2 * heads, ba,
                 *NO_LAYER), kind,
            )  # fmt: skip
            add(threads, x, rows, width, terms_at(terms, 0), (qkvz, ba, no), kind)
            share_out(
                _put_in_order, rows, shared(rows * (channels + inner), threads),
                ((qkvz, ba, qkv, gate, b, a),
                 (sizes.key_heads, heads // sizes.key_heads, sizes.key_dim, sizes.value_dim), kind),
            )  # fmt: skip
        else:
            multiply(
                threads, x, width, rows, width,
                (first_weight, first_bias, channels, qkv, second_weight, second_bias, inner, gate,
                 third_weight, third_bias, heads, b), kind,
            )  # fmt: skip
            add(threads, x, rows, width, terms_at(terms, 0), (qkv, gate, b), kind)
            multiply(
                shared(rows * width * heads // _PRODUCTS, threads), x, width, rows, width,
                (fourth_weight, fourth_bias, heads, a, *NO_OTHERS), kind,
            )  # fmt: skip
            add(threads, x, rows, width, terms_at(terms, 1), (a, no, no), kind)

    made: Callable[..., None] = project
    return made


@kernel_part
def _put_in_order(row: int, places: Any, sizes: Any, kind: Any) -> None:
    """Copy a row of what stands together per key head to where each of its parts is read."""
    qkvz_at, ba_at, qkv_at, gate_at, b_at, a_at = places
    heads, each, key_dim, value_dim = sizes
    keys, values, place = heads * key_dim, each * value_dim, np.int64(row)
    qkvz, ba = _row(qkvz_at, place, 2 * (keys + heads * values), kind), _row(ba_at, place, 2 * heads * each, kind)
    qkv, gate = _row(qkv_at, place, 2 * keys + heads * values, kind), _row(gate_at, place, heads * values, kind)
    b, a = _row(b_at, place, heads * each, kind), _row(a_at, place, heads * each, kind)
    for head in range(heads):
        first = head * 2 * (key_dim + values)
        _copy(qkvz, first, key_dim, qkv, head * key_dim)
        _copy(qkvz, first + key_dim, key_dim, qkv, keys + head * key_dim)
        _copy(qkvz, first + 2 * key_dim, values, qkv, 2 * keys + head * values)
        _copy(qkvz, first + 2 * key_dim + values, values, gate, head * values)
        _copy(ba, head * 2 * each, each, b, head * each)
        _copy(ba, (head * 2 + 1) * each, each, a, head * each)


@inlined_part
def _row(address: int, row: int, width: int, kind: Any) -> Any:
    return elements(address, NO_END, kind)[row * width : (row + 1) * width]


@inlined_part
def _copy(source: Any, first: int, count: int, target: Any, place: int) -> None:
    one, other = source[first : first + count], target[place : place + count]
    for i in range(count):
        other[i] = one[i]
