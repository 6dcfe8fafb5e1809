"""Sparse attention in Triton chooses equal lists by several routes, and is near the float64 oracle."""

import pytest
import torch

from samebit.kernels.layout.forward_context import training_context
from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.selection import choose_keys

from ...campaign import first_of
from ..helpers import assert_near, leaves
from ..latent_layer import Shape
from ..routes import ROUTES, left_padding, padded
from ..sparse_layer import Inputs, Sparse, attended, expected_choice, inputs, oracle, through_pages
from .gpu import DEVICE, EVERY, leaf

pytestmark = pytest.mark.usefixtures("on_gpu")

CASES = (
    (Sparse(Shape(4, 48, 16), 8, 32, 66), torch.float32, (1, 3, 70)),
    (Sparse(Shape(18, 17, 2), 65, 7, 5), torch.bfloat16, (2, 9)),
)
"""Lists layers with more tokens than a tile of the list, and heads than a tile of the index; index
sizes fill no tile.
"""


@pytest.mark.parametrize(("layer", "dtype", "lengths"), CASES, ids=str)
def test_every_route_chooses_alike_and_is_near_the_oracle(
    layer: Sparse, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    given = inputs(layer, dtype, sum(lengths))
    chosen = expected_choice(given, layer, lengths)
    expected = oracle(given.q, given.latents, chosen, layer, lengths)
    found = []
    for block_size, route in ((16, "whole"), (4, "chunks")):
        out, own = through_pages(given, layer, lengths, block_size, ROUTES[route], padding=1, device=DEVICE)
        assert torch.equal(own, chosen), route
        found.append(out)
    assert_near(found[0], expected, 4)
    assert torch.equal(*found)


def test_training_and_its_gradients_are_near_the_oracle() -> None:
    layer, lengths = Sparse(Shape(4, 33, 7), 3, 7, 5), (1, 18)
    given = inputs(layer, torch.float32, sum(lengths))
    chosen = expected_choice(given, layer, lengths)
    mask = left_padding(lengths)
    real = mask.flatten().bool()
    context = training_context(mask.shape, mask, None, DEVICE)
    spread = Inputs(*(leaf(padded(x, mask)) for x in given.parts()))
    out, own = attended(spread, layer, context)
    assert torch.equal(own[real.to(DEVICE)].cpu(), chosen)
    exact = leaves(given.q.double(), given.latents.double())
    expected = oracle(*exact, chosen, layer, lengths)
    upstream = torch.randn(len(real), *out.shape[1:])
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream[real].double())
    assert_near(out[real.to(DEVICE)], expected, 4)
    for x, y in zip((spread.q, spread.latents), exact, strict=True):
        assert_near(x.grad[real.to(DEVICE)], y.grad, 8)
        assert not x.grad[~real.to(DEVICE)].any()
    assert spread.queries.grad is None


@pytest.mark.parametrize("dtype", first_of([torch.float32, torch.bfloat16]))
def test_gradients_of_a_sequence_are_those_of_it_alone(dtype: torch.dtype) -> None:
    """The gradients of a sequence's queries and latents are its own, whatever is beside it: other sequences, in another
    order, padded or packed.
    """
    layer, lengths = Sparse(Shape(18, 17, 2), 3, 7, 5), (9, 1, 19) if EVERY else (3, 1, 17)
    given = inputs(layer, dtype, sum(lengths))
    upstream = torch.randn(sum(lengths), 18, 17).to(dtype)

    def gradients(sequences: tuple[int, ...], *, pad: bool) -> list[tuple[torch.Tensor, ...]]:
        """Return those of each of the sequences, in a batch of these."""
        own = tuple(lengths[number] for number in sequences)
        parts = [torch.cat([x.split(lengths)[number] for number in sequences]) for x in (*given.parts(), upstream)]
        mask = left_padding(own) if pad else torch.ones(1, sum(own), dtype=torch.int64)
        positions = torch.cat([torch.arange(length) for length in own])[None]
        context = training_context(mask.shape, mask if pad else None, None if pad else positions.to(DEVICE), DEVICE)
        *leaves_, grad = (leaf(padded(x, mask)) for x in parts)
        spread = Inputs(*leaves_)
        attended(spread, layer, context)[0].backward(grad.detach())
        real = mask.flatten().bool().to(DEVICE)
        found = [x.grad[real].split(own) for x in (spread.q, spread.latents)]
        return list(zip(*found, strict=True))

    alone = [gradients((number,), pad=False)[0] for number in range(3)]
    assert all(part.any() for one in alone for part in one)
    batches = [((0, 1, 2), True), ((2, 0), False)]
    for sequences, pad in [*batches, ((2, 0), True), ((0, 1, 2), False)] if EVERY else batches:
        for number, found in zip(sequences, gradients(sequences, pad=pad), strict=True):
            assert all(torch.equal(*pair) for pair in zip(found, alone[number], strict=True)), (sequences, pad)


def test_equal_scores_and_special_numbers() -> None:
    """The first of equal scores are taken, also among zeros of both signs, denormals and the greatest numbers."""
    torch.manual_seed(0)
    rows = 24
    special = torch.tensor([-1.0, -0.0, 0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0])[torch.randint(0, 8, (rows,))]
    pairs = torch.stack([special.clamp(min=0), (-special).clamp(min=0)], dim=1)
    weights = torch.tensor([[1.0, -1.0]]).expand(rows, 2).contiguous()
    queries = torch.eye(2).expand(rows, 2, 2).contiguous()
    context = training_context((1, rows), None, None, DEVICE)
    parts = (part.to(DEVICE) for part in (queries, pairs, weights))
    chosen = choose_keys(*parts, context, IndexOptions(1, 2, 2, 1.0, 9))
    order = torch.sort(special, descending=True, stable=True).indices[:9].sort().values
    assert chosen[-1].tolist() == order.tolist()


def test_rows_with_all_chosen_have_the_bits_of_the_dense_form() -> None:
    """Rows that choose all tokens have the bits of the dense form in the interpreter: same tiles, same order."""
    layer, rows = Sparse(Shape(4, 48, 16), 3, 7, 9), 14
    given = inputs(layer, torch.float32, rows)
    context = training_context((1, rows), None, None, DEVICE)
    on_device = Inputs(*(part.to(DEVICE) for part in given.parts()))
    sparse, chosen = attended(on_device, layer, context)
    dense = latent_attention(on_device.q, on_device.latents, context, layer.shape.options)
    few = chosen[:, -1] < 0
    assert torch.equal(sparse[few], dense[few])
    assert not torch.equal(sparse, dense)
