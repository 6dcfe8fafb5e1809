"""Gate, up and their activation in one launch have the bits of a launch each, and share one only where that is so."""

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from samebit.kernels.binding.attached import attach
from samebit.kernels.binding.lora.forwards import linear_forward
from samebit.kernels.layout.options import Layer
from samebit.kernels.ops.activation import gated
from samebit.kernels.ops.layers.gated import gated_linears
from samebit.kernels.triton import linear as operation
from samebit.kernels.triton.activation import gated_forward
from samebit.kernels.triton.layers.gated import multiply_both
from samebit.kernels.triton.linear import multiply, multiply_gated
from samebit.kernels.triton.tiles.file import MatmulEntry, MatmulTile, Rung
from samebit.kernels.triton.tiles.proved_equal import JoinedLayers, joined, proved_joined

from .gpu import DEVICE, DTYPES, EVERY, all_in_turns, few, poisoned
from .launches import launches

pytestmark = pytest.mark.usefixtures("on_gpu")

TILE = MatmulTile(rows=64, outputs=64, depth=64, warps=4, stages=2)
SMALL = MatmulTile(rows=32, outputs=16, depth=64, warps=4, stages=2)
SIZES = [(100, 129), (129, 77), (64, 100)]
"""Lists inputs, and outputs of gate and of up."""

ROWS = (1, 2, 3, 7, 70) if EVERY else (1, 3, 70)
"""Lists counts of rows; the last is more than a tile has."""

KINDS = ("silu", "gelu_pytorch_tanh", "gelu", "sigmoid") if EVERY else ("silu", "gelu_pytorch_tanh")


def gate_and_up(inputs: int, outputs: int, biased: Sequence[bool], dtype: torch.dtype) -> list[Layer]:
    return [
        (
            poisoned(torch.randn(outputs, inputs).to(dtype) / inputs**0.5),
            poisoned(torch.randn(outputs).to(dtype)) if added else None,
        )
        for added in biased
    ]


def of_both(inputs: int = 100, outputs: int = 77, dtype: torch.dtype = torch.bfloat16) -> JoinedLayers:
    return JoinedLayers(torch.device(DEVICE), inputs, (outputs, outputs), dtype, biased=False, activation="silu")


def launched(x: torch.Tensor, layers: list[Layer], activation: str = "silu") -> list[str]:
    with launches() as names:
        multiply_gated(activation, x, layers, kept=False)
    return [name for name in names if not name.startswith("aten")]


@pytest.mark.soak
@pytest.mark.parametrize(("sizes", "dtype", "biased"), all_in_turns(SIZES, DTYPES, (False, True)))
def test_they_have_the_bits_of_a_launch_each(sizes: tuple[int, int], dtype: torch.dtype, biased: bool) -> None:
    """Gate and up in one launch have the bits of a launch each. All share one but, on an H100, those with a bias and a
    depth of one tile, whose bits were others.
    """
    torch.manual_seed(sum(sizes))
    layers = gate_and_up(*sizes, (biased, biased), dtype)
    x = torch.randn(70, sizes[0]).to(dtype)
    alone_on_gpu = DEVICE == "cuda" and biased and sizes[0] <= 64 and dtype.itemsize == 2
    for rows in ROWS:
        some = poisoned(x[-rows:])
        gate, up = (multiply(some, [layer])[0] for layer in layers)
        for activation in KINDS if EVERY else KINDS[biased : biased + 1]:
            out, saved = multiply_gated(activation, some, layers, kept=True)
            assert out.is_contiguous()
            for found, expected in zip((out, *saved), (gated_forward(activation, gate, up)[0], gate, up), strict=True):
                assert torch.equal(found, expected)
            alone, saved = multiply_gated(activation, some, layers, kept=False)
            assert torch.equal(alone, out)
            assert saved == () or alone_on_gpu
    assert launched(poisoned(x), layers, KINDS[biased]) == ["_multiply_gated"] or alone_on_gpu


def test_layers_of_which_only_one_has_a_bias_are_launched_each() -> None:
    layers = gate_and_up(100, 20, (True, False), torch.float32)
    assert launched(poisoned(torch.randn(3, 100)), layers) == ["_multiply", "_multiply", "_forward"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_bits_of_calls_of_each(dtype: torch.dtype) -> None:
    """Gradients have the bits of calls of each, also of one launch: of the input, of weights and biases, and where not
    all are wanted.
    """
    torch.manual_seed(0)
    modules = [nn.Linear(100, 33).to(DEVICE, dtype) for _ in range(2)]
    for module in modules:
        attach(module, linear_forward)
    for frozen in (None, modules[0]):
        for module in modules:
            module.requires_grad_(module is not frozen)
        x, upstream, found = torch.randn(2, 3, 100), torch.randn(2, 3, 33).to(DEVICE, dtype), []
        for apart in (False, True):
            given = x.to(DEVICE, dtype).requires_grad_()
            with launches() as names:
                out = (
                    gated("silu", *(module(given) for module in modules))
                    if apart
                    else gated_linears("silu", given, modules)
                )
            assert ("_multiply_gated" in names) is not apart
            out.backward(upstream)
            parts = [part for module in modules for part in module.parameters()]
            found.append([out, given.grad, *(part.grad for part in parts)])
            for part in parts:
                part.grad = None
        for one, other in zip(*found, strict=True):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.usefixtures("all_compared")
def test_a_tile_that_gives_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = MatmulEntry(("bfloat16",), TILE, (Rung(64, SMALL),))
    assert [rung.tile for rung in joined(of_both(), entry, proved_joined)] == [SMALL, TILE]
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        assert [rung.tile for rung in joined(of_both(), entry, lambda layers, tile: tile == SMALL)] == [SMALL]
    [message] = caplog.messages
    assert "100 inputs and 77 + 77 outputs in torch.bfloat16, in one launch with silu" in message
    layers = gate_and_up(100, 77, (False, False), torch.bfloat16)
    monkeypatch.setattr(operation, "joined_tiles_of", lambda *given: (Rung(2 if given[-1] else 64, SMALL),))
    for rows, names in ((2, ["_multiply_gated"]), (3, ["_multiply_layers", "_forward"])):
        assert launched(poisoned(torch.randn(rows, 100).bfloat16()), layers) == names


@pytest.mark.usefixtures("all_compared")
@pytest.mark.parametrize("dtype", few(DTYPES, 2))
def test_another_order_or_rounding_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A stand-in that adds up's depth in another order is seen, as is one that applies the activation to what is not
    rounded, or, where nothing is rounded, another sigmoid.
    """

    def reversed_up(
        activation: str, x: torch.Tensor, weights: list[torch.Tensor], *given: object, **kept: bool
    ) -> object:
        order = torch.cat(torch.arange(x.shape[1], device=x.device).split(16)[::-1])
        found = multiply_both(activation, x, weights, *given, **kept)  # type: ignore[arg-type]
        turned = multiply_both(activation, x[:, order], [one[:, order] for one in weights], *given, **kept)  # type: ignore[arg-type]
        return [*found[:2], turned[2]]

    def not_rounded(
        activation: str, x: torch.Tensor, weights: list[torch.Tensor], *given: object, **kept: bool
    ) -> object:
        found = multiply_both(activation, x, weights, *given, **kept)  # type: ignore[arg-type]
        gate, up = (x.float() @ one.float().T for one in weights)
        return [(gate * gate.sigmoid() * up).to(x.dtype), *found[1:]]

    for stand_in in (reversed_up, not_rounded):
        monkeypatch.setattr("samebit.kernels.triton.tiles.proved_equal.multiply_both", stand_in)
        assert not proved_joined(of_both(96, 77, dtype), TILE)
