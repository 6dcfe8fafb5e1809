"""Tiles that the file names for this GPU have equal bits where several serve a layer, and a row keeps its own."""

import pytest
import torch

from samebit.kernels.ops.linear import linear
from samebit.kernels.triton.tiles.file import MatmulEntry
from samebit.kernels.triton.tiles.proved_equal import JoinedLayers, Layer, proved_equal, proved_joined, tiles_of
from samebit.kernels.triton.tiles.table import DTYPES, family, matmul_tiles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYERS = ((4096, 1024), (4096, 4096), (4096, 12288), (12288, 4096), (4096, 14336), (1000, 777), (4097, 2049))
"""Lists inputs and outputs of layers: those of an 8B model, and odd ones."""

JOINED = ((4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (3584, (3584, 512, 512)), (129, (77, 1)))
"""Lists inputs and outputs of layers that share a launch: queries, keys and values, or gate and up."""


def layers_of(entry: MatmulEntry, device: torch.device) -> list[Layer]:
    """Return those of the layers above that it is for, or the smallest that it is for."""
    sizes = [(k, n) for k, n in LAYERS if k in entry.inputs and n in entry.outputs]
    sizes = sizes or [(max(entry.inputs.least, 1024), entry.outputs.least)]
    return [
        Layer(device, k, n, DTYPES[name], biased) for k, n in sizes for name in entry.dtypes for biased in (False, True)
    ]


def test_the_tiles_of_every_entry_in_use_have_equal_bits() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for entry in family(device).matmul:
        for rung in entry.few:
            for layer in layers_of(entry, device):
                assert proved_equal(layer, entry.tile, rung), (layer, rung)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(4096, (4096, 1024, 1024)), (4096, (12288, 12288)), (3584, (3584, 512, 512)), (129, (77, 1))],
)
def test_layers_in_one_launch_have_the_bits_of_their_own(
    inputs: int, outputs: tuple[int, ...], dtype: torch.dtype
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    entry = matmul_tiles(device, inputs, sum(outputs), dtype)
    for biased in (False, True):
        for tile in (entry.tile, *(rung.tile for rung in entry.few)):
            assert proved_joined(JoinedLayers(device, inputs, outputs, dtype, biased), tile), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 12288), (2560, 9728), (1024, 3072), (129, 100)])
def test_gate_and_up_with_their_activation_have_the_bits_of_a_launch_each(
    inputs: int, outputs: int, activation: str, dtype: torch.dtype
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    entry = matmul_tiles(device, inputs, 2 * outputs, dtype)
    for biased in (False, True):
        for tile in (entry.tile, *(rung.tile for rung in entry.few)):
            layers = JoinedLayers(device, inputs, (outputs, outputs), dtype, biased, activation)
            assert proved_joined(layers, tile), tile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), LAYERS)
def test_rows_have_the_bits_that_they_have_among_4096(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs)
    x = torch.randn(4096, inputs, device="cuda").to(dtype)
    weight = (torch.randn(outputs, inputs, device="cuda") / inputs**0.5).to(dtype)
    whole = linear(x, weight)
    for count in range(1, 301):
        assert torch.equal(linear(x[7 : 7 + count], weight), whole[7 : 7 + count]), count


def test_the_first_call_of_a_layer_is_refused_while_a_graph_is_recorded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    entry = next((entry for entry in family(device).matmul if entry.few), None)
    if entry is None:
        pytest.skip("this GPU has one tile a layer")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="came while a CUDA graph was recorded"), torch.cuda.graph(graph):
        tiles_of(device, 1111, entry.outputs.least, DTYPES[entry.dtypes[0]], False)
