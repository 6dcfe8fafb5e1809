"""Compute a decoder layer of attention over latents in one call, for the steps of a rollout on the CPU: all of it where
a gated MLP follows, and up to the norm before the MLP elsewhere.

Invariant: as in `layer`, an element is computed by the parts that the operations of the layer's modules run, in their
order, and rounded where they round. What is not copied here has the same bits: absorbed queries are written where the
rotated ones are put behind them, latents are normalised into their page.

T rows, W hidden size, H heads; rank, rope, nope and value are sizes as in `LatentLayerOptions`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray

from samebit.kernels.cpu.base.jit import array, compile_kernel
from samebit.kernels.cpu.base.memory import NO_END, elements, floats, kind_of, pointer, whole_lines
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.base.share_out import share_out
from samebit.kernels.cpu.dense.mlp import ROW_PARTS, normed, with_mlp
from samebit.kernels.cpu.dense.products import Kernels, product, product_by_tiles, product_of_pairs, shared
from samebit.kernels.cpu.dense.terms import NO_TERMS, add_adapter, add_nothing, terms_of
from samebit.kernels.cpu.gemm import heads as products_of_heads
from samebit.kernels.cpu.latent.forward import attend_part
from samebit.kernels.cpu.latent.operation import heads_together
from samebit.kernels.cpu.norm import rms_norm_row
from samebit.kernels.cpu.rope import rotate_to_halves
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import LANES
from samebit.kernels.layout.layers.latent import LatentLayerOptions, LatentTerms, LatentWeights
from samebit.kernels.openmp import num_threads

_heads = products_of_heads.multiply.part
_heads_by_pairs = products_of_heads.multiply_by_pairs.part
_heads_by_tiles = products_of_heads.multiply_by_tiles.part

_WEIGHTS = 19
"""Counts the parameters of `LatentWeights.flat` that are not an indexer's."""

_ROOMS = 12
"""The most arrays that lie in the room, each from a multiple of sixteen elements on."""

_NO_LISTS = np.empty((0, 0), np.int32)
NO_INDEX = (0, 0, 0, 0), (0, 0, 0, 0), ()
"""Stands for what a layer has that does not choose tokens itself: see `with_product`."""

_NO_LSE = np.empty((0, 0), np.float32)


class Sizes(NamedTuple):
    """Holds T, W, H, the sizes of heads and latents, and the width of the MLP, 0 where another one follows."""

    rows: int
    width: int
    heads: int
    nope: int
    value: int
    rank: int
    rope: int
    query_rank: int
    inner: int


class Call(NamedTuple):
    """Holds the addresses of x, of the result, of its norm where another MLP follows, of cos and sin, and of a room for
    what is between the kernels."""

    x: int
    out: int
    normed: int
    cos: int
    sin: int
    room: int


class Numbers(NamedTuple):
    """Holds the eps of each norm, and what is added to its weight."""

    first_eps: Any
    first_offset: Any
    second_eps: Any
    second_offset: Any
    query_eps: Any
    query_offset: Any
    latent_eps: Any
    latent_offset: Any


@kernel_part
def _place_rows(
    part: int, tensors: Any, sizes: Any, norm: Any, neighbours: bool, pages: Any, places: Any, kind: Any
) -> None:
    """Put the rotated parts of a share of the rows behind their absorbed queries, and their latents, normalised, and
    rotated keys into the pages.

    ``tensors``: addresses of queries ``[T, H, nope + rope]``, of latents and keys ``[T, rank + rope]``, of absorbed
    queries ``[T, H, rank + rope]``, of the norm's weight, of cos and sin.
    """
    q_at, given_at, absorbed_at, weight_at, cos_at, sin_at = tensors
    rows, count, rank, half = sizes.rows, sizes.heads, sizes.rank, sizes.rope // 2
    width, size = rank + sizes.rope, sizes.nope + sizes.rope
    q, given = elements(q_at, rows * count * size, kind), elements(given_at, rows * width, kind)
    absorbed, weight = elements(absorbed_at, rows * count * width, kind), elements(weight_at, rank, kind)
    cos, sin = floats(cos_at, rows * half), floats(sin_at, rows * half)
    memory = elements(pages.ctypes.data, NO_END, kind)
    eps, offset = norm
    block_of_row, offset_of_row = places
    lanes = np.empty(LANES, np.float32)
    for row in range(rows * part // ROW_PARTS, rows * (part + 1) // ROW_PARTS):
        at = row * width
        to = (np.int64(block_of_row[row]) * pages.shape[1] + offset_of_row[row]) * width
        along, across = cos[row * half : (row + 1) * half], sin[row * half : (row + 1) * half]
        rms_norm_row(given[at : at + rank], weight, offset, eps, lanes, memory[to : to + rank])
        rotate_to_halves(given, at + rank, neighbours, along, across, memory, to + rank)
        for head in range(row * count, (row + 1) * count):
            rotate_to_halves(
                q, head * size + sizes.nope, neighbours, along, across, absorbed, head * width + rank
            )  # fmt: skip


@kernel_part
def choose_nothing(
    threads: int, x: int, sizes: Any, angles: Any, indexer: Any, layout: Any, lists: Any, kind: Any
) -> None:
    """Choose tokens for a layer that has no indexer."""


class Multiply(NamedTuple):
    """Holds a product of up to three layers of one input, and that of heads."""

    layers: Callable[..., None]
    heads: Callable[..., None]


PLAIN = Multiply(product, _heads)
BY_PAIRS = Multiply(product_of_pairs, _heads_by_pairs)
BY_TILES = Multiply(product_by_tiles, _heads_by_tiles)


def with_product(
    products: Multiply, add: Callable[..., None], choose: Callable[..., None] = choose_nothing
) -> Callable[..., None]:
    """Make the layer from its products, what adds an adapter's terms to them, and what chooses the tokens to read."""
    multiply, multiply_heads = products
    finish = with_mlp(multiply, add)

    @kernel_part
    def layer(
        threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any,
        no_lse: Any, kind: Any,
    ) -> None:  # fmt: skip
        """Compute the layer; ``given``: `Call`, the addresses of `LatentWeights.flat` (0 for what the layer does not
        have), `Sizes` and `Numbers`; ``terms``: five `Terms`; ``layout``: blocks and offsets of rows, then what
        `latent.forward` reads; ``attention``: scale, heads of an item, and whether neighbours are rotated together;
        ``index``: a layer more of the input, one more of the queries' latents, and what ``choose`` needs besides;
        ``lists``: as ``chosen`` of `latent.forward`, which ``choose`` writes."""
        call, sizes, numbers = Call(*given[0]), Sizes(*given[2]), Numbers(*given[3])
        (
            first_norm, second_norm, q_norm, latent_norm, q_weight, q_bias, kv_weight, kv_bias, b_weight, b_bias,
            heads_weight, o_weight, o_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
        ) = given[1]  # fmt: skip
        blocks, offsets, sequences, block_tables, tiles = layout
        of_input, of_low, indexer = index
        scale, together, neighbours = attention
        rows, width, count, nope, value = sizes.rows, sizes.width, sizes.heads, sizes.nope, sizes.value
        rank, low = sizes.rank, sizes.query_rank
        latent, size = rank + sizes.rope, nope + sizes.rope
        itemsize, no = pages.itemsize, np.int64(0)
        normed_at = call.room
        compressed = normed_at + whole_lines(rows * width) * itemsize
        q = compressed + whole_lines(rows * latent) * itemsize
        low_rank = q + whole_lines(rows * count * size) * itemsize
        low_normed = low_rank + whole_lines(rows * low) * itemsize
        absorbed = low_normed + whole_lines(rows * low) * itemsize
        attended = absorbed + whole_lines(rows * count * latent) * itemsize
        values = attended + whole_lines(rows * count * rank) * itemsize
        rest = values + whole_lines(rows * count * value) * itemsize
        normed(threads, call.x, 0, 0, first_norm, numbers.first_offset, numbers.first_eps, rows, width, normed_at, kind)
        first = low_rank if low > 0 else q
        multiply(
            threads, normed_at, width, rows, width,
            (q_weight, q_bias, low if low > 0 else count * size, first, kv_weight, kv_bias, latent, compressed,
             *of_input), kind,
        )  # fmt: skip
        add(threads, normed_at, rows, width, terms[0], (first, compressed, no), kind)
        if low > 0:
            normed(
                threads, low_rank, 0, 0, q_norm, numbers.query_offset, numbers.query_eps, rows, low, low_normed, kind
            )  # fmt: skip
            multiply(
                threads, low_normed, low, rows, low,
                (b_weight, b_bias, count * size, q, *of_low, no, no, no, no), kind,
            )  # fmt: skip
            add(threads, low_normed, rows, low, terms[1], (q, no, no), kind)
        step = (nope + value) * rank
        multiply_heads(
            shared(rows * count * nope, threads),
            products_of_heads.Product(
                products_of_heads.Rows(q, count * size, size), products_of_heads.Rows(absorbed, count * latent, latent),
                rows, count, nope, rank, heads_weight, step, True,
            ), kind,
        )  # fmt: skip
        share_out(
            _place_rows, ROW_PARTS, shared(rows * count * latent, threads),
            ((q, compressed, absorbed, latent_norm, call.cos, call.sin), sizes,
             (numbers.latent_eps, numbers.latent_offset), neighbours, pages, (blocks, offsets), kind),
        )  # fmt: skip
        choose(threads, normed_at, sizes, (call.cos, call.sin), indexer, layout, lists, kind)
        queries = carray(pointer(absorbed, kind), (rows, count, latent))
        result = carray(pointer(attended, kind), (rows, count, rank))
        attend_part(
            queries, pages, sequences, block_tables, tiles, lists, together, scale, result, no_lse, threads
        )  # fmt: skip
        multiply_heads(
            shared(rows * count * value, threads),
            products_of_heads.Product(
                products_of_heads.Rows(attended, count * rank, rank),
                products_of_heads.Rows(values, count * value, value),
                rows, count, rank, value, heads_weight + nope * rank * itemsize, step, False,
            ), kind,
        )  # fmt: skip
        multiply(
            threads, values, count * value, rows, count * value,
            (o_weight, o_bias, width, normed_at, no, no, no, no, no, no, no, no), kind,
        )  # fmt: skip
        add(threads, values, rows, count * value, terms[2], (normed_at, no, no), kind)
        finish(
            threads, (call.x, normed_at, call.out, rest, call.normed), (rows, width, sizes.inner),
            (second_norm, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias),
            (numbers.second_eps, numbers.second_offset), (terms[3], terms[4]), itemsize, kind,
        )  # fmt: skip

    made: Callable[..., None] = layer
    return made


_layer = with_product(PLAIN, add_nothing)
_layer_by_pairs = with_product(BY_PAIRS, add_nothing)
_layer_by_tiles = with_product(BY_TILES, add_nothing)
_adapted = with_product(PLAIN, add_adapter)
_adapted_by_pairs = with_product(BY_PAIRS, add_adapter)
_adapted_by_tiles = with_product(BY_TILES, add_adapter)


def _run(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer, multiplying in float32."""
    _layer(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_by_pairs(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer in bfloat16, multiplying in pairs of inputs."""
    _layer_by_pairs(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_by_tiles(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer in bfloat16, multiplying with tile instructions."""
    _layer_by_tiles(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_adapted(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an adapter, multiplying in float32."""
    _adapted(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_adapted_by_pairs(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an adapter in bfloat16, multiplying in pairs of inputs."""
    _adapted_by_pairs(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


def _run_adapted_by_tiles(
    threads: int, given: Any, terms: Any, pages: Any, layout: Any, attention: Any, index: Any, lists: Any, no_lse: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Compute a layer with an adapter in bfloat16, multiplying with tile instructions."""
    _adapted_by_tiles(threads, given, terms, pages, layout, attention, index, lists, no_lse, kind)


KERNELS = Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles)))
ADAPTED_KERNELS = Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles)))


@dataclass(frozen=True, eq=False, slots=True)
class ReadyLayer:
    """Holds what a kernel of a layer is called with but for the layer's input and results.

    Attributes:
        call: `Call` without them.
        of_layer: what is given besides.
        arguments: of the kernel, behind those.
        chosen: as `ReadyLayer` of `layout` says it.
        apart: another MLP follows behind the call.
    """

    kernel: Callable[..., None]
    threads: int
    call: tuple[int, ...]
    of_layer: tuple[Any, ...]
    arguments: tuple[Any, ...]
    chosen: torch.Tensor | None
    apart: bool

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layer."""
        x = x.contiguous()
        out, behind = torch.empty_like(x), torch.empty_like(x) if self.apart else None
        places = x.data_ptr(), out.data_ptr(), 0 if behind is None else behind.data_ptr()
        self.kernel(self.threads, ((*places, *self.call), *self.of_layer), *self.arguments)
        return out, behind


def latent_call(
    x: torch.Tensor, weights: LatentWeights, angles: tuple[torch.Tensor, torch.Tensor], context: ForwardContext,
    options: LatentLayerOptions, terms: LatentTerms,
) -> ReadyLayer:  # fmt: skip
    """Implement `dispatch.latent_call_of`."""
    groups = tuple(map(terms_of, terms))
    kernels = KERNELS if all(group is NO_TERMS for group in groups) else ADAPTED_KERNELS
    return prepare(kernels, x, weights, angles, context, options, groups, NO_INDEX, None)


def prepare(
    kernels: Kernels, x: torch.Tensor, weights: LatentWeights, angles: tuple[torch.Tensor, torch.Tensor],
    context: ForwardContext, options: LatentLayerOptions, groups: tuple[Any, ...], index: tuple[Any, ...],
    chosen: torch.Tensor | None,
) -> ReadyLayer:  # fmt: skip
    """Prepare one of the kernels for what is like ``x``: for terms of an adapter and an index as these take them, and
    what is chosen, or will be by the call; None for all tokens."""
    if context.pages is None:
        raise ValueError("a context without pages; allowed: a rollout's")
    attention, (cos, sin), threads = options.attention, angles, num_threads()
    sizes = (
        context.num_rows, options.width, options.heads, options.nope, options.value, attention.rank, attention.rope,
        options.query_rank, options.inner,
    )  # fmt: skip
    call = cos.data_ptr(), sin.data_ptr(), _room(context, options, x.dtype).data_ptr()
    together = heads_together(options.heads, len(context.tiles), threads)
    arguments = (
        groups, array(context.pages[attention.layer]), context.read_by_layers,
        (np.float32(attention.scale), together, options.neighbours), index,
        _NO_LISTS if chosen is None else chosen.numpy(), _NO_LSE, kind_of(x.dtype),
    )  # fmt: skip
    of_layer = weights.addresses[:_WEIGHTS], sizes, options.numbers
    return ReadyLayer(kernels.of(x.dtype), threads, call, of_layer, arguments, chosen, not options.inner)


def addresses_of_index(weights: LatentWeights) -> tuple[int, ...]:
    """Return where the parameters of the layer's indexer are."""
    return weights.addresses[_WEIGHTS:]


def _room(context: ForwardContext, options: LatentLayerOptions, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for what is between the kernels of a layer; the layers of a call share it."""
    attention, heads = options.attention, options.heads
    of_heads = options.nope + attention.rope + attention.width + attention.rank + options.value
    elements_of_row = (
        2 * options.width + attention.width + 2 * options.query_rank + heads * of_heads + 3 * options.inner
    )  # fmt: skip
    key = "latent layer", elements_of_row, dtype
    if key not in context.worked_out:
        context.worked_out[key] = torch.empty(context.num_rows * elements_of_row + _ROOMS * LANES, dtype=dtype)
    room: torch.Tensor = context.worked_out[key]
    return room
