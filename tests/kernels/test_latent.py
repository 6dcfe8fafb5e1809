"""Attention over latents, and the products of heads around it, are near the oracle, with equal bits by any route,
gradients too.
"""

import pytest
import torch

from samebit.kernels.cpu.latent import softmax, tiles
from samebit.kernels.cpu.latent.dots import TOKENS
from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.kv_pages import KVLayout, LatentLayout
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.heads import multiply_heads
from samebit.kernels.ops.linear import linear

from .helpers import DTYPES, THREADS, assert_near, leaves, threads
from .latent_layer import Shape, oracle, tensors, through_pages
from .routes import ROUTES, left_padding, packed_context, padded, ways

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (1, 2, 63, 64, 65, 130)
SHAPES = (Shape(4, 48, 16), Shape(5, 33, 7), Shape(1, 200, 9), Shape(34, 17, 2), Shape(40, 16, 8))
SIZES = ((1, 6, 4), (3, 20, 33), (5, 129, 100), (2, 250, 16))
"""Lists heads, inputs and outputs; more outputs than are turned over at a time."""


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_route_through_the_pages_gives_the_training_bits(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    expected = latent_attention(*parts, packed_context(LENGTHS), shape.options)
    assert_near(expected, oracle(*parts, shape, LENGTHS), 4)
    turn = SHAPES.index(shape) + DTYPES.index(dtype)
    for number, (block_size, route) in enumerate(ways((4, 16, 64, 256), turn)):
        with threads(THREADS[number % len(THREADS)]):
            got = through_pages(parts, shape, LENGTHS, block_size, ROUTES[route], padding=number % 3)
        assert torch.equal(got, expected), (block_size, route)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_layout_or_threads(shape: Shape) -> None:
    parts = tensors(shape, torch.float32, LENGTHS)
    expected = latent_attention(*parts, packed_context(LENGTHS), shape.options)
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    spread = [padded(x, mask) for x in parts]
    for number in THREADS:
        with threads(number):
            out = latent_attention(*spread, training_context(mask.shape, mask, None), shape.options)
            assert torch.equal(out[real], expected)
            assert not out[~real].any()
            trained = latent_attention(*leaves(*parts), packed_context(LENGTHS), shape.options)
            assert torch.equal(trained.detach(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_near_the_oracle_and_equal_for_any_thread_count(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    upstream = torch.randn(*parts[0].shape[:2], shape.rank).to(dtype)
    exact = leaves(*(x.double() for x in parts))
    oracle(*exact, shape, LENGTHS).backward(upstream.double())
    found = []
    for number in THREADS:
        mine = leaves(*parts)
        with threads(number):
            latent_attention(*mine, packed_context(LENGTHS), shape.options).backward(upstream)
        found.append([x.grad for x in mine])
    for grad, x in zip(found[0], exact, strict=True):
        assert_near(grad, x.grad, 8)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_heads_have_the_bits_of_linear_layers(
    size: tuple[int, int, int], transposed: bool, dtype: torch.dtype
) -> None:
    """Products of heads have the bits of linear layers, also of parts of wider rows, with weights that are parts of a
    larger one.
    """
    heads, inputs, outputs = size
    torch.manual_seed(0)
    x = torch.randn(130, heads, inputs + 3).to(dtype)[..., :inputs]
    whole = torch.randn(heads, (inputs if transposed else outputs) + 5, outputs if transposed else inputs).to(dtype)
    weight = whole[:, 5:]
    matrices = [head.T.contiguous() if transposed else head for head in weight]
    expected = torch.stack([linear(x[:, h].contiguous(), matrices[h]) for h in range(heads)], dim=1)
    for number in THREADS:
        with threads(number):
            assert torch.equal(multiply_heads(x, weight, transposed=transposed), expected)
            for count in (1, 2, 3, 7, 20):
                pieces = [multiply_heads(piece, weight, transposed=transposed) for piece in x.split(count)]
                assert torch.equal(torch.cat(pieces), expected), count


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_products_of_heads(transposed: bool) -> None:
    heads, inputs, outputs = 3, 20, 33
    x = torch.randn(11, heads, inputs)
    whole = torch.randn(heads, (inputs if transposed else outputs) + 5, outputs if transposed else inputs)
    upstream = torch.randn(11, heads, outputs)
    mine, exact = leaves(x, whole), leaves(x.double(), whole.double())
    multiply_heads(mine[0], mine[1][:, 5:], transposed=transposed).backward(upstream)
    matrix = "tha,hab->thb" if transposed else "tha,hba->thb"
    torch.einsum(matrix, exact[0], exact[1][:, 5:]).backward(upstream.double())
    for found, wanted in zip(mine, exact, strict=True):
        assert_near(found.grad, wanted.grad, 8)
    assert not mine[1].grad[:, :5].any()


def test_sums_of_a_tile_leave_registers_for_what_is_added() -> None:
    """The sums of a tile fit into registers beside what is added: 32 with AVX-512, otherwise 16 of half a vector. What
    does not fit would go through memory at each step.
    """
    most = 24 if tiles.LARGE else 12
    for tile, passes in enumerate(tiles.PASSES):
        registers = {0: 1, 1: 1 if tiles.LARGE else 2, 2: 2, 3: 1}[tile]
        assert sum(passes) == TOKENS
        assert 8 <= max(passes) * registers <= most, "fewer than eight chains do not fill the processor"
    assert tiles.ROWS[-1] * tiles.COLUMNS[-1] * (1 if tiles.LARGE else 2) <= most


@pytest.mark.parametrize("rows", range(1, 33))
def test_tiles_of_rows_stay_in_their_vector_of_rows(rows: int) -> None:
    r = 0
    while r < rows:
        many = softmax.rows_together.py_func(r, rows)
        assert many in tiles.ROWS
        assert r % 16 + many <= 16
        r += many


def test_bytes_of_a_block() -> None:
    """A block of DeepSeek-V3 has 69 KiB a token, 57 times less than expanded keys and values with one rotated key."""
    latents = LatentLayout(61, 512, 64)
    assert latents.bytes_per_block(64, torch.bfloat16) == 64 * 61 * 1152
    assert sum(page.nbytes for page in LatentLayout(3, 40, 6).allocate(7, 16, torch.float32)) == 8 * LatentLayout(
        3, 40, 6
    ).bytes_per_block(16, torch.float32)
    expanded = KVLayout(61, 128, 128).bytes_per_block(64, torch.bfloat16) + 64 * 61 * 2 * 64
    assert expanded // latents.bytes_per_block(64, torch.bfloat16) == 57


def test_what_does_not_fit_is_refused() -> None:
    shape = Shape(4, 48, 16)
    q, latents = tensors(shape, torch.float32, LENGTHS)
    context = packed_context(LENGTHS)
    with pytest.raises(ValueError, match=r"q has the shape \[325, 4, 63\]; allowed: \[325, heads, 64\]"):
        latent_attention(q[..., :63], latents, context, shape.options)
    with pytest.raises(ValueError, match=r"the latents has the shape \[324, 64\]; allowed: \[325, 64\]"):
        latent_attention(q, latents[:-1], context, shape.options)
    with pytest.raises(TypeError, match=r"queries are torch\.float32 and latents torch\.bfloat16"):
        latent_attention(q, latents.bfloat16(), context, shape.options)
    with pytest.raises(ValueError, match="at least 1 element of each part"):
        LatentOptions(0, 1.0, 16, 0)
    weight = torch.randn(4, 20, 64)
    with pytest.raises(ValueError, match=r"x is \[325, 4, 64\], weight \[4, 20, 64\]; .*\[heads, K, N\]"):
        multiply_heads(q, weight, transposed=True)
    with pytest.raises(ValueError, match=r"strides \(1280, 1, 20\); allowed: heads that are contiguous"):
        multiply_heads(q, torch.randn(4, 64, 20).mT)
    with pytest.raises(TypeError, match=r"x is torch\.float32, weight torch\.bfloat16"):
        multiply_heads(q, weight.bfloat16())
