"""Compute a decoder layer of a Gated DeltaNet mixer in one call, for the steps of a rollout on the CPU.

The layer is ``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; a gated MLP is in the call, of another one its input is.

Invariant: an element is computed by the parts that the operations of the layer's modules run, in their order, and
rounded where they round. So a layer has the bits of its modules' own calls, which training makes.

T rows, W hidden size, F width of the MLP.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from samebit.kernels.cpu.base.jit import compile_kernel
from samebit.kernels.cpu.base.memory import kind_of, whole_lines
from samebit.kernels.cpu.base.part import kernel_part
from samebit.kernels.cpu.delta.mixer import Kinds, Sizes, room_of_mixer, with_mixer
from samebit.kernels.cpu.dense.mlp import normed, with_mlp
from samebit.kernels.cpu.dense.products import Kernels, product, product_by_tiles, product_of_pairs
from samebit.kernels.cpu.dense.terms import NO_TERMS, add_adapter, add_nothing, terms_of
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import CACHE_LINE
from samebit.kernels.layout.layers.delta import DeltaLayerOptions, DeltaTerms, DeltaWeights
from samebit.kernels.layout.states.delta import DeltaStates
from samebit.kernels.openmp import num_threads

_OF_MLP = 5
"""The arrays of the MLP that lie in the room, each from a cache line on, and the norm before them."""


class Call(NamedTuple):
    """Holds the addresses of x, of the result, of its norm where another MLP follows, and of a room for what is between
    the kernels; F, 0 for another MLP."""

    x: int
    out: int
    normed: int
    room: int
    inner: int


class Numbers(NamedTuple):
    """Holds eps and offset of the norms before the mixer and before the MLP, and the mixer's numbers."""

    first_eps: Any
    first_offset: Any
    second_eps: Any
    second_offset: Any
    mixer_eps: Any
    by_sigmoid: bool
    most_of_beta: Any


def _with_product(multiply: Callable[..., None], add: Callable[..., None]) -> Callable[..., None]:
    """Make the layer from a product of up to three layers of one input, and what adds an adapter's terms to it."""
    mix, finish = with_mixer(multiply, add), with_mlp(multiply, add)

    @kernel_part
    def layer(threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds_given: Any) -> None:
        """Compute the layer; ``given``: `Call`, the addresses of `DeltaWeights.flat` (0 for what the layer does not
        have), `mixer.Sizes` and `Numbers`; ``terms``: five `Terms`; the rest as `mixer` takes it."""
        call, sizes, numbers, kinds = Call(*given[0]), Sizes(*given[2]), Numbers(*given[3]), Kinds(*kinds_given)
        (
            first_norm, second_norm, qkv_weight, qkv_bias, z_weight, z_bias, b_weight, b_bias, a_weight, a_bias,
            out_weight, out_bias, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
            taps, norm_weight, a_log, dt_bias,
        ) = given[1]  # fmt: skip
        rows, width, kind, itemsize = sizes.rows, sizes.width, kinds.elements, kinds.itemsize
        normed_at = call.room
        rest = normed_at + whole_lines(rows * width) * itemsize
        normed(threads, call.x, 0, 0, first_norm, numbers.first_offset, numbers.first_eps, rows, width, normed_at, kind)
        mix(
            threads, (normed_at, normed_at, rest),
            (qkv_weight, qkv_bias, z_weight, z_bias, b_weight, b_bias, a_weight, a_bias, out_weight, out_bias,
             taps, norm_weight, a_log, dt_bias),
            sizes, (numbers.mixer_eps, numbers.by_sigmoid, numbers.most_of_beta), layout, memory, captures, terms,
            kinds,
        )  # fmt: skip
        finish(
            threads, (call.x, normed_at, call.out, rest, call.normed), (rows, width, call.inner),
            (second_norm, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias),
            (numbers.second_eps, numbers.second_offset), (terms[3], terms[4]), itemsize, kind,
        )  # fmt: skip

    made: Callable[..., None] = layer
    return made


_layer = _with_product(product, add_nothing)
_layer_by_pairs = _with_product(product_of_pairs, add_nothing)
_layer_by_tiles = _with_product(product_by_tiles, add_nothing)
_adapted = _with_product(product, add_adapter)
_adapted_by_pairs = _with_product(product_of_pairs, add_adapter)
_adapted_by_tiles = _with_product(product_by_tiles, add_adapter)


def _run(threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Compute a layer, multiplying in float32."""
    _layer(threads, given, terms, layout, memory, captures, kinds)


def _run_by_pairs(threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Compute a layer in bfloat16, multiplying in pairs of inputs."""
    _layer_by_pairs(threads, given, terms, layout, memory, captures, kinds)


def _run_by_tiles(threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Compute a layer in bfloat16, multiplying with tile instructions."""
    _layer_by_tiles(threads, given, terms, layout, memory, captures, kinds)


def _run_adapted(threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds: Any) -> None:
    """Compute a layer with an adapter, multiplying in float32."""
    _adapted(threads, given, terms, layout, memory, captures, kinds)


def _run_adapted_by_pairs(
    threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds: Any
) -> None:
    """Compute a layer with an adapter in bfloat16, multiplying in pairs of inputs."""
    _adapted_by_pairs(threads, given, terms, layout, memory, captures, kinds)


def _run_adapted_by_tiles(
    threads: int, given: Any, terms: Any, layout: Any, memory: Any, captures: Any, kinds: Any
) -> None:
    """Compute a layer with an adapter in bfloat16, multiplying with tile instructions."""
    _adapted_by_tiles(threads, given, terms, layout, memory, captures, kinds)


_kernels = Kernels(*map(compile_kernel, (_run, _run_by_pairs, _run_by_tiles)))
_adapted_kernels = Kernels(*map(compile_kernel, (_run_adapted, _run_adapted_by_pairs, _run_adapted_by_tiles)))


def delta_layer(
    x: torch.Tensor, weights: DeltaWeights, context: ForwardContext, options: DeltaLayerOptions, terms: DeltaTerms
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement `dispatch.delta_layer_of`."""
    if context.states is None:
        raise ValueError("a context without states; allowed: a rollout's")
    x, mixer = x.contiguous(), options.mixer
    layer, rows, count = mixer.rule.layer, context.num_rows, len(context.captures)
    out, behind = torch.empty_like(x), None if options.inner else torch.empty_like(x)
    memory, captures = context.states.layer(layer, DeltaStates), (0, 0, 0, 0)
    if count:
        kept = context.states.checkpoints[layer]
        captures = context.captured.data_ptr(), count, kept.state.data_ptr(), kept.window.data_ptr()
    call = (
        x.data_ptr(), out.data_ptr(), 0 if behind is None else behind.data_ptr(),
        _room(context, options, x.dtype).data_ptr(), options.inner,
    )  # fmt: skip
    groups = tuple(map(terms_of, terms))
    kernels = _kernels if all(group is NO_TERMS for group in groups) else _adapted_kernels
    kernels.of(x.dtype)(
        num_threads(), (call, weights.addresses, (rows, mixer.width, mixer.taps, *mixer.rule.sizes), options.numbers),
        groups, (context.layout.data_ptr(), len(context.lengths)),
        (context.block_size, memory.addresses.data_ptr(), memory.window.data_ptr(), memory.block_window.data_ptr()),
        captures, (kind_of(x.dtype), kind_of(weights.mixer.a_log.dtype), x.element_size()),
    )  # fmt: skip
    return out, behind


def _room(context: ForwardContext, options: DeltaLayerOptions, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for what is between the kernels of a layer; the layers of a call share it."""
    mixer, rows = options.mixer, context.num_rows
    key = "delta layer", mixer.rule.sizes, options.inner, dtype
    if key not in context.worked_out:
        of_mlp = rows * (3 * options.inner + mixer.width) * dtype.itemsize
        of_norm = rows * mixer.width * dtype.itemsize
        rest = max(of_mlp, room_of_mixer(mixer, rows, dtype.itemsize))  # one after the other in the same place
        context.worked_out[key] = torch.empty(of_norm + rest + _OF_MLP * CACHE_LINE, dtype=torch.uint8)
    room: torch.Tensor = context.worked_out[key]
    return room
