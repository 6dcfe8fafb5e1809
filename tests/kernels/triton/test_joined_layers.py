"""Layers of one input in one launch have the bits of a launch each, and share one only where that is so."""

import logging
from collections.abc import Sequence

import pytest
import torch

from samebit.kernels.layout.options import Layer
from samebit.kernels.triton import linear as operation
from samebit.kernels.triton.linear import multiply
from samebit.kernels.triton.matmul import multiply_layers
from samebit.kernels.triton.tiles.file import MatmulEntry, MatmulTile, Rung
from samebit.kernels.triton.tiles.proved_equal import JoinedLayers, joined, proved_joined

from .gpu import DEVICE, DTYPES, EVERY, all_in_turns, poisoned
from .launches import launches

pytestmark = pytest.mark.usefixtures("on_gpu")

TILE = MatmulTile(rows=64, outputs=64, depth=64, warps=4, stages=2)
SMALL = MatmulTile(rows=32, outputs=16, depth=64, warps=4, stages=2)
SIZES = [(100, (96, 32, 32)), (129, (129, 129)), (64, (1, 200, 77))]
"""Lists inputs, and outputs of each layer."""

ROWS = (1, 2, 3, 7, 70) if EVERY else (1, 3, 70)
"""Lists counts of rows; the last is more than a tile has."""

JOINED = JoinedLayers(torch.device(DEVICE), 100, (77, 16), torch.bfloat16, biased=True)


def layers_of(inputs: int, outputs: Sequence[int], biased: Sequence[bool], dtype: torch.dtype) -> list[Layer]:
    return [
        (
            poisoned(torch.randn(size, inputs).to(dtype)),
            poisoned(torch.randn(size).to(dtype)) if added else None,
        )
        for size, added in zip(outputs, biased, strict=True)
    ]


def launched(x: torch.Tensor, layers: list[Layer]) -> list[str]:
    with launches() as names:
        multiply(x, layers)
    return [name for name in names if name.startswith("_multiply")]


@pytest.mark.soak
@pytest.mark.parametrize(("sizes", "dtype", "biased"), all_in_turns(SIZES, DTYPES, (False, True)))
def test_each_layer_has_the_bits_of_a_launch_of_its_own(
    sizes: tuple[int, tuple[int, ...]], dtype: torch.dtype, biased: bool
) -> None:
    inputs, outputs = sizes
    torch.manual_seed(inputs)
    layers = layers_of(inputs, outputs, [biased] * len(outputs), dtype)
    x = torch.randn(70, inputs).to(dtype)
    for rows in ROWS:
        some = poisoned(x[-rows:])
        together = multiply(some, layers)
        for found, layer, size in zip(together, layers, outputs, strict=True):
            assert found.shape == (rows, size)
            assert found.is_contiguous()
            assert torch.equal(found, multiply(some, [layer])[0])
    assert launched(poisoned(x), layers) == ["_multiply_layers"]


def test_layers_of_which_only_some_have_a_bias_are_launched_each() -> None:
    x, layers = poisoned(torch.randn(3, 100)), layers_of(100, (20, 30), (True, False), torch.float32)
    assert launched(x, layers) == ["_multiply"] * 2


def test_rows_of_more_dimensions_and_none() -> None:
    layers = layers_of(100, (20, 30), (False, False), torch.float32)
    assert [tuple(out.shape) for out in multiply(torch.zeros(2, 3, 100, device=DEVICE), layers)] == [
        (2, 3, 20), (2, 3, 30)
    ]  # fmt: skip
    assert [tuple(out.shape) for out in multiply(torch.zeros(0, 100, device=DEVICE), layers)] == [(0, 20), (0, 30)]


@pytest.mark.usefixtures("all_compared")
def test_a_tile_that_gives_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = MatmulEntry(("bfloat16",), TILE, (Rung(64, SMALL),))
    assert [rung.tile for rung in joined(JOINED, entry, proved_joined)] == [SMALL, TILE]
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        assert [rung.tile for rung in joined(JOINED, entry, lambda layers, tile: tile == SMALL)] == [SMALL]
    [message] = caplog.messages
    assert "100 inputs and 77 + 16 outputs in torch.bfloat16, in one launch" in message
    layers = layers_of(100, (77, 16), (True, True), torch.bfloat16)
    monkeypatch.setattr(operation, "joined_tiles_of", lambda *_: (Rung(2, SMALL),))
    for rows, names in ((2, ["_multiply_layers"]), (3, ["_multiply"] * 2)):
        assert launched(poisoned(torch.randn(rows, 100).bfloat16()), layers) == names


@pytest.mark.usefixtures("all_compared")
def test_another_order_of_adding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that adds the last layer's depth in pieces of sixteen from last to first is seen."""

    def reversed_in_the_last(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None, tile: MatmulTile,
        outputs: Sequence[int],
    ) -> list[torch.Tensor]:  # fmt: skip
        order = torch.cat(torch.arange(x.shape[1], device=x.device).split(16)[::-1])
        found = multiply_layers(x, weights, biases, tile, outputs)
        turned = multiply_layers(x[:, order], [weight[:, order] for weight in weights], biases, tile, outputs)
        return [*found[:-1], turned[-1]]

    monkeypatch.setattr("samebit.kernels.triton.tiles.proved_equal.multiply_layers", reversed_in_the_last)
    for dtype in DTYPES:
        assert not proved_joined(JoinedLayers(torch.device(DEVICE), 96, (77, 16), dtype, biased=False), TILE)
