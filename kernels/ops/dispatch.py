"""Find what implements an operation on a tensor's device: the one place where an operation meets a device.

A device is a module that has all functions of `Operations`, by these names and signatures: for the CPU
`samebit.kernels.cpu.operations`, for a GPU `samebit.kernels.triton.operations`. The second is loaded by the first
tensor that is there: a machine without a GPU needs no Triton.

Rules for both sides of it:

* Arguments have been checked by the operation in `samebit.kernels.ops`: an implementation checks nothing again.
* A forward gives its result and what its backward reads (`Saved`), as saved tensors of autograd. A backward gives the
  gradients of the forward's tensors in their order, each in its tensor's dtype. Neither records a gradient itself.
* Axis letters are those of `samebit.kernels`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.cpu import operations as cpu
from samebit.kernels.layout import device
from samebit.kernels.layout.call_rows import Ints, StepRows
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.layers.attention import AttentionLayerOptions, AttentionTerms, AttentionWeights
from samebit.kernels.layout.layers.call import LayerCall
from samebit.kernels.layout.layers.delta import DeltaLayerOptions, DeltaTerms, DeltaWeights
from samebit.kernels.layout.layers.ends import EndNumbers, EndWeights
from samebit.kernels.layout.layers.experts import BlockOptions, BlockWeights
from samebit.kernels.layout.layers.latent import LatentLayerOptions, LatentTerms, LatentWeights
from samebit.kernels.layout.lora.adapters import LowRanks
from samebit.kernels.layout.options import (
    AttentionOptions,
    DeltaOptions,
    ExpertOptions,
    ExpertWeights,
    Filters,
    GatedNormOptions,
    HeadNorms,
    IndexOptions,
    LatentOptions,
    Layer,
    Reduced,
    RoutingOptions,
    Saved,
    SSMOptions,
)
from samebit.kernels.layout.vision.segments import Segments

Tensor = torch.Tensor


class Operations(Protocol):
    """Lists what a device implements."""

    # samebit.kernels.ops.linear
    def multiply(self, x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
        """Multiply ``x`` ``[..., K]`` with each of up to three layers: ``[..., N]``."""

    def multiply_part(self, x: Tensor, part: Layer, outputs: int) -> Tensor:
        """Multiply ``x`` ``[..., K]`` with a part of a layer of ``outputs`` outputs, as the layer is multiplied."""

    def gradient_of_inputs(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return ``grad @ weight`` ``[..., K]``."""

    def gradient_of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return ``grad.T @ x`` ``[N, K]``."""

    def add_gradient_of_inputs(self, sums: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add ``grad @ weight`` to the float32 ``sums`` ``[T, K]``."""

    # samebit.kernels.ops.lora.low_rank
    def add_low_rank(self, bases: Sequence[Tensor], x: Tensor, terms: LowRanks) -> list[Tensor]:
        """Add to the results ``[..., N]`` of up to three layers what they have of low rank for ``x`` ``[..., K]``."""

    # samebit.kernels.ops.norm
    def rms_norm_forward(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Saved]:
        """Compute RMSNorm over the last axis."""

    def rms_norm_backward(self, saved: Saved, grad: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and weight."""

    def add_rms_norm(
        self, x: Tensor, y: Tensor, total: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Saved]:
        """Write ``x + y`` to ``total``, and compute its RMSNorm, whose backward is that above."""

    def layer_norm_forward(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Saved]:
        """Compute LayerNorm over the last axis."""

    def layer_norm_backward(self, saved: Saved, grad: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, weight and bias."""

    def gated_rms_norm_forward(
        self, x: Tensor, gate: Tensor, weight: Tensor, options: GatedNormOptions
    ) -> tuple[Tensor, Saved]:
        """Compute the gated RMSNorm of rows; ``weight``: of all groups, or of one, which they share."""

    def gated_rms_norm_backward(
        self, saved: Saved, grad: Tensor, options: GatedNormOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, gate and weight."""

    # samebit.kernels.ops.activation
    def gated_forward(self, activation: str, gate: Tensor, up: Tensor) -> tuple[Tensor, Saved]:
        """Compute ``activation(gate) * up``."""

    def gated_backward(self, activation: str, saved: Saved, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up."""

    def activated_forward(self, activation: str, x: Tensor) -> Tensor:
        """Compute ``activation(x)``, contiguous."""

    def activated_backward(self, activation: str, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of x, contiguous."""

    # samebit.kernels.ops.layers.gated
    def multiply_gated(
        self, activation: str, x: Tensor, layers: Sequence[Layer], *, kept: bool
    ) -> tuple[Tensor, Saved]:
        """Compute ``activation(gate) * up`` of the two layers' products with ``x`` ``[..., K]``; unless they are to be
        ``kept`` for `gated_backward`, they may be left out."""

    # samebit.kernels.ops.rope
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        """Rotate heads by the angles of their token, or back for ``sign`` -1."""

    def join_rotated(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        """Return ``[T, H, W + 2 R]``: ``x`` ``[T, H, W]``, and behind it ``y`` ``[T, H, 2 R]``, rotated."""

    # samebit.kernels.ops.attention
    def attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, options: AttentionOptions,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Saved]:  # fmt: skip
        """Put keys and values into their pages, those of the call where the context has none, and attend."""

    def attention_of_unrotated(
        self, q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], context: ForwardContext,
        options: AttentionOptions, sinks: Tensor | None, norms: HeadNorms | None,
    ) -> tuple[Tensor, tuple[Saved, Saved, Saved]]:  # fmt: skip
        """Normalise the heads of queries and keys where there are norms, rotate them by ``angles``, cosines and sines,
        then attend as above. Backwards read what attention saves, and what the norms of queries and of keys save."""

    def attention_backward(
        self, saved: Saved, grad: Tensor, context: ForwardContext, options: AttentionOptions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and sinks, the last None without sinks."""

    # samebit.kernels.ops.segment_attention
    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """Attend to all rows of a row's own segment, ``[T, H, D]`` each."""

    # samebit.kernels.ops.latent
    def latent_forward(
        self, q: Tensor, latents: Tensor, context: ForwardContext, options: LatentOptions, chosen: Tensor | None
    ) -> tuple[Tensor, Saved]:
        """Put latents into their pages, those of the call where the context has none, and attend to those chosen."""

    def choose_keys(
        self, queries: Tensor, keys: Tensor, weights: Tensor, context: ForwardContext, options: IndexOptions
    ) -> Tensor:
        """Put index keys into their pages likewise, and return the positions that each row attends to."""

    def latent_backward(
        self, saved: Saved, grad: Tensor, context: ForwardContext, options: LatentOptions
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and latents."""

    def multiply_heads(self, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        """Multiply ``x`` ``[T, H, K]`` with each head's weight ``[H, N, K]``, transposed ``[H, K, N]``."""

    def gradients_of_heads(
        self, x: Tensor, weight: Tensor, grad: Tensor, transposed: bool, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and weight, None for each that is not needed."""

    # samebit.kernels.ops.conv
    def conv_forward(
        self, x: Tensor, weight: Tensor, bias: Tensor, context: ForwardContext, layer: int, silu: bool
    ) -> tuple[Tensor, Saved]:
        """Convolve, and activate where there is silu; the windows of the layer with this number move on."""

    def conv_backward(
        self, saved: Saved, grad: Tensor, context: ForwardContext, silu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of x, weight and bias."""

    # samebit.kernels.ops.ssd
    def scan_forward(
        self, xbc: Tensor, dt: Tensor, decay_rate: Tensor, dt_bias: Tensor, skip: Tensor, context: ForwardContext,
        options: SSMOptions,
    ) -> tuple[Tensor, Saved]:  # fmt: skip
        """Run the sequences through their states; the slots of the context's memory move on."""

    def scan_backward(
        self, saved: Saved, grad: Tensor, context: ForwardContext, options: SSMOptions
    ) -> tuple[Tensor, ...]:
        """Return the gradients of xbc, dt, decay_rate, dt_bias and skip."""

    # samebit.kernels.ops.delta
    def delta_rule(
        self, qkv: Tensor, decay: Tensor, beta: Tensor, context: ForwardContext, options: DeltaOptions
    ) -> Tensor:
        """Run the sequences through their states; the slots of the context's memory move on."""

    def delta_rule_backward(
        self, saved: Saved, grad: Tensor, context: ForwardContext, options: DeltaOptions
    ) -> tuple[Tensor, ...]:
        """Return the gradients of qkv, decay and beta, which ``saved`` are; those of padding rows are zero."""

    def gates(self, a: Tensor, b: Tensor, a_log: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Compute ``-exp(a_log) softplus(a + bias)`` and ``scale sigmoid(b)``; ``a_log``, ``bias``: float32."""

    # samebit.kernels.ops.experts.routing
    def route_forward(
        self, logits: Tensor, correction: Tensor | None, options: RoutingOptions
    ) -> tuple[Tensor, Tensor, Saved]:
        """Return the ids of the experts chosen for each row, ascending, and their weights."""

    def route_backward(self, saved: Saved, grad: Tensor, options: RoutingOptions) -> Tensor:
        """Return the gradient of the logits from that of the weights."""

    # samebit.kernels.ops.experts.routed
    def experts_forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, options: ExpertOptions, saving: bool
    ) -> tuple[Tensor, Saved]:
        """Compute the weighted sum of the outputs of each row's experts; unless ``saving``, nothing is saved."""

    def experts_backward(
        self, saved: Saved, grad: Tensor, options: ExpertOptions, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weights, up, down, up_bias and down_bias, None for each that is not needed."""

    # samebit.kernels.ops.logprobs
    def log_softmax(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Return every token's log-probability ``[T, V]`` float32."""

    def gather(self, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Reduced:
        """Return each row's token's log-probability."""

    def gather_gradient(
        self, logits: Tensor, tokens: Tensor, temperatures: Tensor, peaks: Tensor, log_totals: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the gradient of all or a part of the logits of each row."""

    def entropies(self, logits: Tensor, temperatures: Tensor) -> Reduced:
        """Return each row's entropy."""

    def entropy_gradient(
        self, logits: Tensor, temperatures: Tensor, entropies: Tensor, peaks: Tensor, log_totals: Tensor, grad: Tensor
    ) -> Tensor:
        """Return the gradient of all or a part of the logits of each row."""

    # samebit.kernels.ops.sampling
    def uniforms(self, keys: Tensor, counters: Tensor) -> Tensor:
        """Return a uniform number of each row's key and counter."""

    def draw(self, logits: Tensor, temperatures: Tensor, uniform: Tensor) -> Tensor:
        """Return the token that each row's uniform number chooses."""

    def keep_likely(self, logits: Tensor, filters: Filters) -> None:
        """Rule out all but the likely tokens of some rows ``[T, V]``, in place."""


class WholeCalls(Protocol):
    """Lists what computes several operations in one call, with the bits of the operations one by one.

    All but `sample` prepare a call, which `run_layers` makes.
    """

    # samebit.kernels.ops.layers
    def attention_call(
        self, weights: AttentionWeights, context: ForwardContext, options: AttentionLayerOptions, terms: AttentionTerms
    ) -> LayerCall:
        """Prepare a decoder layer of attention."""

    def latent_call(
        self, weights: LatentWeights, context: ForwardContext, options: LatentLayerOptions, terms: LatentTerms
    ) -> LayerCall:
        """Prepare a decoder layer of attention over latents."""

    def sparse_call(
        self, weights: LatentWeights, context: ForwardContext, options: LatentLayerOptions, terms: LatentTerms,
        earlier: Tensor | None,
    ) -> LayerCall:  # fmt: skip
        """Prepare a decoder layer of attention over latents whose rows read chosen tokens."""

    def end_calls(
        self, ids: Tensor, kept: Tensor | None, weights: EndWeights, numbers: EndNumbers, logits: Tensor
    ) -> tuple[LayerCall, LayerCall]:
        """Prepare a step's embedding, and its last norm and head."""

    # samebit.kernels.ops.delta.layer
    def delta_call(
        self, weights: DeltaWeights, context: ForwardContext, options: DeltaLayerOptions, terms: DeltaTerms
    ) -> LayerCall:
        """Prepare a decoder layer of Gated DeltaNet."""

    # samebit.kernels.ops.experts.block
    def block_call(self, weights: BlockWeights, options: BlockOptions, dtype: torch.dtype) -> LayerCall | None:
        """Prepare a block of routed experts, or find that these experts have no such call."""

    # samebit.kernels.ops.sampling
    def sample(self, logits: Tensor, temperatures: Tensor, keys: Tensor, counters: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token a row and score it."""


def operations_for(tensor: Tensor) -> Operations:
    """Return the table of the device that the tensor is on.

    Raises:
        ValueError: there are no kernels for it, or it is a GPU and not the current one.
    """
    if not device.on_gpu(tensor):
        return cpu
    device.check_current(tensor)
    return _gpu()


def lay_out(asked: Ints, block_tables: Ints, block_size: int, num_rows: int) -> StepRows:
    """Lay out a step's rows, on the host, of each sequence's ``asked`` ``[S, 5]``: how many it computes, from which
    position on, its row of ``block_tables``, the position from which on it writes, and of how many of its last
    rows a token is drawn.

    Raises:
        ValueError: they are not the rows of the step, or lead out of the tables.
    """
    return cpu.lay_out(asked, block_tables, block_size, num_rows)


def find_match(
    tokens: npt.NDArray[np.int64], context: npt.NDArray[np.int64], gram: int, known: int, table: Ints, links: Ints
) -> tuple[int, int]:
    """Find the longest match of the end of ``context`` among ``tokens``, on the host.

    Args:
        tokens: ``[N]``, the first ``known`` of which were linked by earlier calls.
        context: a match is of at least ``gram`` of its tokens, and of all at most.
        table, links: what calls have linked, int32, zeros before the first; the table's size is a power of two, and the
            links have room for N places.

    Returns:
        The length of the match, and the place of the token behind it: the last such place, of those that were looked
        at; (0, 0) where there is none.
    """
    return cpu.find_match(tokens, context, gram, known, table, links)


def whole_calls(tensor: Tensor) -> WholeCalls | None:
    """Return what computes several operations in one call where the tensor is; None for a GPU, whose graphs spare the
    Python between kernels."""
    return None if device.on_gpu(tensor) else cpu


def run_layers(
    x: Tensor, calls: Sequence[LayerCall], angles: Sequence[tuple[Tensor, Tensor]], context: ForwardContext
) -> tuple[Tensor, Tensor | None]:
    """Compute decoder layers one after the other, each of what the one before has made, by its cosines and sines: those
    of several are one object. Of the last one another MLP may follow behind its call: then the second result is that
    one's input."""
    return cpu.run_layers(x, calls, angles, context)


@cache
def _gpu() -> Operations:
    from samebit.kernels.triton import operations

    return operations
