"""Sparse attention over latents chooses rightly, ties too, with equal bits by any route, the dense form's and
gradients; what it can not do is refused.
"""

import numpy as np
import pytest
import torch

from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.kv_pages import LatentLayout, SparseLayout
from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.selection import choose_keys

from .helpers import DTYPES, THREADS, assert_near, leaves, threads
from .latent_layer import Shape
from .routes import ROUTES, left_padding, packed_context, padded, ways
from .sparse_layer import Inputs, Sparse, as_lists, attended, expected_choice, inputs, oracle, through_pages

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (1, 3, 66, 70, 140)
LAYERS = (
    Sparse(Shape(4, 48, 16), 8, 32, 70),
    Sparse(Shape(5, 33, 7), 3, 7, 1),
    Sparse(Shape(34, 17, 2), 65, 20, 100),
)
"""Lists layers that choose 1 token, one chunk and a piece, and two; with index sizes that fill no vector, and more
heads than are a tile.
"""


def positions_of(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([np.arange(length) for length in lengths])


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_every_route_chooses_alike_and_gives_the_training_bits(layer: Sparse, dtype: torch.dtype) -> None:
    given = inputs(layer, dtype, sum(LENGTHS))
    chosen = expected_choice(given, layer, LENGTHS)
    expected, found = attended(given, layer, packed_context(LENGTHS))
    assert torch.equal(as_lists(found, positions_of(LENGTHS), layer), chosen)
    assert_near(expected, oracle(given.q, given.latents, chosen, layer, LENGTHS), 4)
    turn = LAYERS.index(layer) + DTYPES.index(dtype)
    for number, (block_size, route) in enumerate(ways((4, 64), turn)):
        with threads(THREADS[number % len(THREADS)]):
            out, own = through_pages(given, layer, LENGTHS, block_size, ROUTES[route], padding=number % 3)
        assert torch.equal(own, chosen), (block_size, route)
        assert torch.equal(out, expected), (block_size, route)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_rows_with_no_more_tokens_than_are_chosen_have_the_bits_of_the_dense_form(layer: Sparse) -> None:
    given = inputs(layer, torch.float32, sum(LENGTHS))
    context = packed_context(LENGTHS)
    sparse, _ = attended(given, layer, context)
    dense = latent_attention(given.q, given.latents, context, layer.shape.options)
    few = torch.from_numpy(positions_of(LENGTHS) < layer.top_k)
    assert torch.equal(sparse[few], dense[few])
    assert (sparse[~few] != dense[~few]).flatten(1).any(1).all()
    whole, chosen = attended(given, layer.dense(), context)
    assert chosen.shape[1] == 0
    assert torch.equal(whole, dense)


def test_scores_have_the_bits_of_any_batch() -> None:
    """The choice by any route is that of the training call, for scores of real numbers, where the order of sums
    decides.
    """
    layer = LAYERS[0]
    given = inputs(layer, torch.float32, sum(LENGTHS))
    torch.manual_seed(1)
    near = torch.randn_like(given.keys[:1]) + 1e-6 * torch.randn_like(given.keys)  # scores differ in their last bits
    given = Inputs(given.q, given.latents, torch.randn_like(given.queries), near, torch.rand_like(given.weights))
    expected, chosen = attended(given, layer, packed_context(LENGTHS))
    for number, route in enumerate(ROUTES):
        with threads(THREADS[number % len(THREADS)]):
            out, own = through_pages(given, layer, LENGTHS, 16, ROUTES[route])
        assert torch.equal(own, chosen), route
        assert torch.equal(out, expected), route


def test_equal_scores_take_the_lowest_positions() -> None:
    """The lowest positions are taken among equal scores, also among those that are 0 because no head is positive, or
    negative 0.
    """
    layer = Sparse(Shape(4, 48, 16), 1, 1, 8)
    rows = 300
    keys = torch.full((rows, 1), -1.0)
    keys[[5, 250]] = 1.0
    keys[6] = 1e-30
    weights = torch.ones(rows, 1)
    weights[100:] = -1e-30  # times the key at 6 this is -0.0
    context = packed_context((rows,))
    chosen = choose_keys(torch.ones(rows, 1, 1), keys, weights, context, layer.index)
    assert chosen[99].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert chosen[120].tolist() == [0, 1, 2, 3, 4, 6, 7, 8]  # all but 5 are 0.0 or -0.0
    torch.manual_seed(0)
    special = torch.tensor([-1.0, -0.0, 0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0])[torch.randint(0, 8, (rows,))]
    pairs = torch.stack([special.clamp(min=0), (-special).clamp(min=0)], dim=1)
    weights = torch.tensor([[1.0, -1.0]]).expand(rows, 2).contiguous()
    options = IndexOptions(1, 2, 2, 1.0, 100)
    chosen = choose_keys(torch.eye(2).expand(rows, 2, 2).contiguous(), pairs, weights, context, options)
    order = torch.sort(special, descending=True, stable=True).indices[:100].sort().values
    assert chosen[-1].tolist() == order.tolist()


@pytest.mark.parametrize("layer", LAYERS[:2], ids=str)
def test_bits_do_not_depend_on_layout_or_threads(layer: Sparse) -> None:
    given = inputs(layer, torch.float32, sum(LENGTHS))
    expected, chosen = attended(given, layer, packed_context(LENGTHS))
    mask = left_padding(LENGTHS)
    real = mask.flatten().bool()
    spread = Inputs(*(padded(x, mask) for x in given.parts()))
    for number in THREADS:
        with threads(number):
            out, own = attended(spread, layer, training_context(mask.shape, mask, None))
        assert torch.equal(out[real], expected)
        assert not out[~real].any()
        assert torch.equal(own[real], chosen)
        assert (own[~real] == -1).all()


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_gradients_are_near_the_oracle_and_equal_for_any_thread_count(layer: Sparse) -> None:
    given = inputs(layer, torch.float32, sum(LENGTHS))
    chosen = expected_choice(given, layer, LENGTHS)
    upstream = torch.randn(*given.q.shape[:2], layer.shape.rank)
    exact = leaves(given.q.double(), given.latents.double())
    oracle(*exact, chosen, layer, LENGTHS).backward(upstream.double())
    found = []
    for number in THREADS:
        mine = leaves(given.q, given.latents)
        with threads(number):
            context = packed_context(LENGTHS)
            latent_attention(*mine, context, layer.shape.options, chosen).backward(upstream)
        found.append([x.grad for x in mine])
    for grad, x in zip(found[0], exact, strict=True):
        assert_near(grad, x.grad, 8)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_bytes_of_a_block() -> None:
    """A block of DeepSeek-V3.2 has 1,408 bytes a token and layer, 256 of them index keys; shared layers have none."""
    layout = SparseLayout(512, 64, 128, (True,) * 61)
    assert layout.bytes_per_block(64, torch.bfloat16) == 64 * 61 * (1152 + 256)
    assert layout.num_layers == LatentLayout(61, 512, 64).num_layers
    shared = SparseLayout(40, 6, 10, (True, False, True))
    pages = shared.allocate(7, 16, torch.float32)
    assert [page.shape[2] for page in pages] == [46, 10, 46, 46, 10]
    assert sum(page.nbytes for page in pages) == 8 * shared.bytes_per_block(16, torch.float32)


def test_what_does_not_fit_is_refused() -> None:
    layer = LAYERS[0]
    given = inputs(layer, torch.float32, sum(LENGTHS))
    context, index = packed_context(LENGTHS), layer.index
    with pytest.raises(ValueError, match=r"the queries of the index has the shape \[280, 7, 32\]; allowed: \[280, 8"):
        choose_keys(given.queries[:, :7], given.keys, given.weights, context, index)
    with pytest.raises(ValueError, match=r"the index keys has the shape \[279, 32\]; allowed: \[280, 32\]"):
        choose_keys(given.queries, given.keys[:-1], given.weights, context, index)
    with pytest.raises(TypeError, match=r"the weights of the index is torch\.bfloat16; allowed: torch\.float32"):
        choose_keys(given.queries, given.keys, given.weights.bfloat16(), context, index)
    with pytest.raises(TypeError, match=r"queries of the index are torch\.float32 and its keys torch\.bfloat16"):
        choose_keys(given.queries, given.keys.bfloat16(), given.weights, context, index)
    with pytest.raises(ValueError, match="at least 1 head of 1 element, and 1 key to choose"):
        IndexOptions(1, 8, 32, 1.0, 0)
    chosen = expected_choice(given, layer, LENGTHS)
    with pytest.raises(ValueError, match=r"chosen has the shape \[279, 70\]; allowed: \[280, top_k\]"):
        latent_attention(given.q, given.latents, context, layer.shape.options, chosen[:-1])
    with pytest.raises(TypeError, match=r"chosen is torch\.int64; allowed: torch\.int32"):
        latent_attention(given.q, given.latents, context, layer.shape.options, chosen.long())
    with pytest.raises(ValueError, match=r"chosen has the strides \(1, 280\); allowed: contiguous rows"):
        latent_attention(given.q, given.latents, context, layer.shape.options, chosen.T.contiguous().T)
