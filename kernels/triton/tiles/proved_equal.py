"""Choose the tiles of a layer's product: one for few rows only where it was seen to have the bits of that for many.

Likewise those of layers that share a launch: it is used only where each layer's bits were seen to be those of its own,
and those of a launch that has their activation too, where these were seen to be those of a launch of its own.

Invariants:

* The choice is made once a layer and device, at its first call, however many rows that has: so before a CUDA graph is
  recorded, and the same for rollout and trainer.
* What is compared are the compiled kernels that the layer itself runs, on operands whose products cancel: of the sum
  nothing is left but what the accumulator rounded away, so another order of adding shows in every bit.
* Bounded: a few hundred rows and a thousand outputs, whatever the layer has.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from samebit.kernels.triton.activation import gated_forward
from samebit.kernels.triton.layers.gated import multiply_both
from samebit.kernels.triton.matmul import GROUP, multiply_first, multiply_layers
from samebit.kernels.triton.numeric import aligned
from samebit.kernels.triton.tiles.file import MatmulEntry, MatmulTile, Rung
from samebit.kernels.triton.tiles.table import matmul_tiles

logger = logging.getLogger(__name__)

_OUTPUTS = 512
"""The outputs that are compared, at most. A multiple of those of any tile."""

_COUNTS = (1, 7, 16, 33, 64, 100, 129, 200)
"""Counts of rows of the compared calls, as far as the rung takes them."""

_ROWS = 300
"""Count of rows of the call that they are compared with."""

_EXPONENT = 4
"""Operands are scaled by powers of two from the inverse of this one's to it: float16 holds every sum."""

_SPREAD = 38
"""The usual size of a product of two operands. An activation shows how it rounds only of sums near 1."""


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, MatmulTile, int], torch.Tensor]
"""Computes the first of a layer's outputs as `multiply_first` does, with the kernel that the layer runs."""


@dataclass(frozen=True)
class Layer:
    """Holds what decides which kernels the forward product of a layer compiles to, beside the tile."""

    device: torch.device
    inputs: int
    outputs: int
    dtype: torch.dtype
    biased: bool
    multiply: Multiply = multiply_first


Prover = Callable[[Layer, MatmulTile, Rung], bool]
"""Says whether the tile of a rung gives this layer the bits that the tile for many rows gives it."""


@cache
def tiles_of(
    device: torch.device,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    biased: bool,
    multiply: Multiply = multiply_first,
) -> MatmulEntry:
    """Return the tiles of a layer. The first call compares them.

    Raises:
        TypeError: a dtype that is not computed exactly.
        RuntimeError: the first call is one of those that a CUDA graph records.
    """
    layer = Layer(device, inputs, outputs, dtype, biased, multiply)
    return settled(layer, matmul_tiles(device, inputs, outputs, dtype), proved_equal)


def settled(layer: Layer, entry: MatmulEntry, equal: Prover) -> MatmulEntry:
    """Return the entry without the rungs that have other bits, each with a warning: the next one takes their calls."""
    kept = []
    for rung in entry.few:
        if equal(layer, entry.tile, rung):
            kept.append(rung)
        else:
            logger.warning(
                "products of %d inputs and %d outputs in %s: on %s %s does not have the bits of %s, so calls of up to "
                "%d rows take the next tile",
                layer.inputs, layer.outputs, layer.dtype, layer.device, rung.tile, entry.tile, rung.up_to_rows,
            )  # fmt: skip
    return replace(entry, few=tuple(kept))


@torch.no_grad()
def proved_equal(layer: Layer, tile: MatmulTile, rung: Rung) -> bool:
    """Compare on the device: calls of few rows with the rung's tile, and the same rows among many with ``tile``.

    Raises:
        RuntimeError: the device is recording a CUDA graph.
    """
    _check_not_recording(layer)
    rows = min(_ROWS, GROUP * tile.rows)
    x, weight, bias = operands(layer, rows)
    whole = layer.multiply(x, weight.t(), bias, tile, layer.outputs)
    return all(
        torch.equal(layer.multiply(aligned(x[part]), weight.t(), bias, rung.tile, layer.outputs), whole[part])
        for part in _parts(rows, min(rung.up_to_rows, GROUP * rung.tile.rows))
    )


@dataclass(frozen=True)
class JoinedLayers:
    """Holds what decides which kernel two or three layers that share a launch compile to, beside the tile.

    Attributes:
        activation: of gate and up, which the launch applies too; None for none.
    """

    device: torch.device
    inputs: int
    outputs: tuple[int, ...]
    dtype: torch.dtype
    biased: bool
    activation: str | None = None

    def each(self) -> list[Layer]:
        """Return the layers by themselves."""
        return [Layer(self.device, self.inputs, size, self.dtype, self.biased) for size in self.outputs]

    def multiply(
        self, x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor] | None, tile: MatmulTile
    ) -> list[torch.Tensor]:
        """Compute the first of their outputs in one launch, activated ones before them."""
        if self.activation is None:
            return multiply_layers(x, weights, biases, tile, self.outputs)
        return multiply_both(self.activation, x, weights, biases, tile, self.outputs[0], kept=True)

    def activated(self, products: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the first of each layer's outputs, in a launch of its own activated before them."""
        if self.activation is None:
            return products
        gate, up = wide = products[0].new_zeros(2, len(products[0]), self.outputs[0])  # the layer's own kernel
        for whole, product in zip(wide, products, strict=True):
            whole[:, : product.shape[1]] = product
        return [gated_forward(self.activation, gate, up)[0][:, : products[0].shape[1]], *products]


JoinedProver = Callable[[JoinedLayers, MatmulTile], bool]
"""Says whether a launch with this tile gives each layer the bits that its own tile for many rows gives it."""


@cache
def joined_tiles_of(
    device: torch.device,
    inputs: int,
    outputs: tuple[int, ...],
    dtype: torch.dtype,
    biased: bool,
    activation: str | None,
) -> tuple[Rung, ...]:
    """Return the tiles of layers that share a launch (and their activation), those of one layer with all their outputs.

    The first call compares them. Calls of more rows than the last rung has, or of any without a rung, are to be
    launched a layer.

    Raises:
        TypeError: a dtype that is not computed exactly.
        RuntimeError: the first call is one of those that a CUDA graph records.
    """
    entry = matmul_tiles(device, inputs, sum(outputs), dtype)
    return joined(JoinedLayers(device, inputs, outputs, dtype, biased, activation), entry, proved_joined)


def joined(layers: JoinedLayers, entry: MatmulEntry, equal: JoinedProver) -> tuple[Rung, ...]:
    """Return the entry's rungs, its tile for many the last, without those that have other bits, each with a warning."""
    kept = []
    for rung in (*entry.few, Rung(sys.maxsize, entry.tile)):
        if equal(layers, rung.tile):
            kept.append(rung)
        else:
            logger.warning(
                "products of %d inputs and %s outputs in %s, in one launch%s: on %s %s does not have the bits of the "
                "layers by themselves, so it is not used",
                layers.inputs, " + ".join(map(str, layers.outputs)), layers.dtype,
                "" if layers.activation is None else f" with {layers.activation}", layers.device, rung.tile,
            )  # fmt: skip
    return tuple(kept)


@torch.no_grad()
def proved_joined(layers: JoinedLayers, tile: MatmulTile) -> bool:
    """Compare on the device: the layers in one launch with ``tile``, and each with its own tile for many rows.

    Raises:
        RuntimeError: the device is recording a CUDA graph.
    """
    each = layers.each()
    _check_not_recording(each[0])
    own = [matmul_tiles(layers.device, layers.inputs, size, layers.dtype).tile for size in layers.outputs]
    rows = min(_ROWS, *(GROUP * one.rows for one in own))
    x, weight, bias = operands(replace(each[0], outputs=max(layers.outputs)), rows)
    if layers.activation is not None:
        # every fourth row's sums are near 1
        x[1::4] *= 2.0 ** -round(math.log2(_SPREAD * layers.inputs**0.5))
    weights = [weight[: layer.outputs] for layer in each]
    biases = None if bias is None else [bias[: layer.outputs] for layer in each]
    wholes = [
        multiply_first(x, part.t(), None if biases is None else biases[place], own[place], layers.outputs[place])
        for place, part in enumerate(weights)
    ]
    expected = layers.activated(wholes)
    return all(
        torch.equal(found, whole[part])
        for part in _parts(rows, rows)
        for found, whole in zip(layers.multiply(aligned(x[part]), weights, biases, tile), expected, strict=True)
    )


def _check_not_recording(layer: Layer) -> None:
    if layer.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the first call of a layer of {layer.inputs} inputs and {layer.outputs} outputs came while a CUDA graph "
            "was recorded; allowed: any call before"
        )


def _parts(rows: int, most: int) -> Iterator[slice]:
    """List the rows of the calls that are compared, from the middle of this many: up to ``most``."""
    most = min(most, rows)
    for count in sorted({most, *(count for count in _COUNTS if count < most)}):
        first = (rows - count) // 2
        yield slice(first, first + count)


def operands(layer: Layer, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Make x, weight and bias; in every second row the second half of the products are the first's, negated."""
    held, half = min(layer.outputs, _OUTPUTS), layer.inputs // 2
    generator = torch.Generator(layer.device).manual_seed(layer.inputs)

    def random(*shape: int) -> torch.Tensor:
        values, scale = (torch.empty(shape, dtype=torch.float32, device=layer.device) for _ in range(2))
        scale.random_(-_EXPONENT, _EXPONENT + 1, generator=generator).exp2_()
        return values.normal_(generator=generator).mul_(scale).to(layer.dtype)

    x, weight = random(rows, layer.inputs), random(held, layer.inputs)
    order = torch.randperm(half, generator=generator, device=layer.device)
    weight[:, half : 2 * half] = weight[:, order]
    x[::2, half : 2 * half] = -x[::2, order]
    x[::2, 2 * half :] = 0
    return aligned(x), aligned(weight), random(held) if layer.biased else None
