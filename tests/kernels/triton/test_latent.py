"""Attention over latents in Triton and the products of heads are near the float64 oracle by several routes, gradients
too.
"""

import numpy as np
import pytest
import torch

from samebit.kernels.layout import attention_work
from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.kernels.layout.kv_pages import LatentLayout
from samebit.kernels.layout.options import LatentOptions
from samebit.kernels.ops.latent.attention import latent_attention
from samebit.kernels.ops.latent.heads import multiply_heads
from samebit.kernels.triton.latent import rows as latent_rows

from ..helpers import assert_near, leaves
from ..latent_layer import Shape, oracle, tensors, through_pages
from ..routes import ROUTES, left_padding, padded
from .gpu import DEVICE, leaf

pytestmark = pytest.mark.usefixtures("on_gpu")

LENGTHS = (1, 3, 66)
CASES = (
    (Shape(4, 48, 16), torch.float32),
    (Shape(5, 33, 7), torch.bfloat16),
    (Shape(18, 17, 2), torch.float16),
)


@pytest.fixture(params=[None, 14 * 1024], ids=["", "little shared memory"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a GPU has just the shared memory that a tile of 16 keys of the first shape takes, or do nothing."""
    if request.param is not None:
        monkeypatch.setattr(latent_rows, "shared_memory", lambda device: request.param)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_every_route_through_the_pages_is_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    parts = tensors(shape, dtype, LENGTHS)
    expected = oracle(*parts, shape, LENGTHS)
    found = [
        through_pages(parts, shape, LENGTHS, block_size, ROUTES[route], padding=1, device=DEVICE)
        for block_size, route in ((16, "whole"), (4, "chunks"))
    ]
    assert_near(found[0], expected, 4)
    assert torch.equal(*found)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_training_and_its_gradients_are_near_the_oracle(shape: Shape, dtype: torch.dtype) -> None:
    lengths = (1, 18)
    parts = tensors(shape, dtype, lengths)
    mask = left_padding(lengths)
    real = mask.flatten().bool()
    mine, exact = [leaf(padded(x, mask)) for x in parts], leaves(*(x.double() for x in parts))
    out = latent_attention(*mine, training_context(mask.shape, mask, None, DEVICE), shape.options)
    expected = oracle(*exact, shape, lengths)
    upstream = torch.randn(len(real), *out.shape[1:]).to(dtype)
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream[real].double())
    assert_near(out[real.to(DEVICE)], expected, 4)
    assert not out[~real.to(DEVICE)].any()
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert_near(x.grad[real.to(DEVICE)], y.grad, 8)
        assert not x.grad[~real.to(DEVICE)].any()


@pytest.mark.parametrize(
    ("dtype", "kibibytes", "forward", "gradients"),
    [
        (torch.bfloat16, 227, 64, 32), (torch.bfloat16, 163, 64, 32), (torch.bfloat16, 99, 32, 32),
        (torch.float32, 227, 64, 32), (torch.float32, 163, 32, 32),
    ],
)  # fmt: skip
def test_as_many_keys_meet_a_tile_of_rows_as_the_gpu_has_room_for(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kibibytes: int, forward: int, gradients: int
) -> None:
    """A tile of rows of DeepSeek's sizes meets as many keys as an H100, an A100 and an RTX 4090 have room for.
    test_compile.py compiles them.
    """
    monkeypatch.setattr(latent_rows, "shared_memory", lambda device: kibibytes * 1024)
    q, options = torch.empty(0, dtype=dtype), LatentOptions(0, 1.0, 512, 64)
    assert latent_rows.keys_of_forward(q, options) == forward
    assert latent_rows.keys_of_gradients(q, options) == gradients


def test_a_gpu_that_does_not_hold_a_latent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_rows, "shared_memory", lambda device: 99 * 1024)
    shape = Shape(1, 1024, 64)
    q, latents = (x.to(DEVICE) for x in tensors(shape, torch.float32, (1,)))
    with pytest.raises(
        ValueError,
        match=r"attention over latents of 1024 \+ 64 elements in torch.float32 takes 139264 bytes of shared memory; on "
        r"this GPU a program has 101376; allowed: fewer, or a dtype of 16 bits",
    ):
        latent_attention(q, latents, training_context((1, 1), None, None, DEVICE), shape.options)
    q, options = torch.empty(0, dtype=torch.float32), LatentOptions(0, 1.0, 512, 64)
    assert latent_rows.keys_of_forward(q, options) == 16
    with pytest.raises(ValueError, match=r"512 .* 106496 bytes"):  # only a trainer needs these
        latent_rows.keys_of_gradients(q, options)


@pytest.mark.parametrize(("shared", "rows"), [(128, [3]), (640, [3]), (1024, [3, 3])])
def test_sequences_that_share_blocks_have_the_bits_of_each_alone(
    shared: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several sequences that walk shared blocks in one item, with accumulators that wait in memory, have the
    bits of each alone. So they do for each split of a long sequence, or when one program walks them all.
    """
    shape, own = Shape(4, 48, 16), (3, 9, 20)
    q, latents = tensors(shape, torch.float32, (3, shared, *own))
    pages = LatentLayout(1, shape.rank, shape.rope).allocate(80, 16, torch.float32, DEVICE)[0].fill_(torch.nan)
    blocks = shared // 16
    tables = np.zeros((3, blocks + 2), np.int32)
    tables[:, :blocks] = np.arange(1, blocks + 1)
    tables[:, blocks:] = blocks + 1 + np.arange(6).reshape(3, 2)
    flat = pages.view(-1, shape.options.width)
    stem, *tails = latents[3:].split((shared, *own))
    for table, tail in zip(tables, tails, strict=True):
        cached = torch.cat([stem, tail])
        at = torch.from_numpy(table)[torch.arange(len(cached)) // 16] * 16 + torch.arange(len(cached)) % 16
        flat[at.to(DEVICE)] = cached.to(DEVICE)
    sequences = np.arange(3, dtype=np.int32)

    def attended(chosen: np.ndarray) -> tuple[torch.Tensor, ForwardContext]:
        context = ForwardContext(
            positions=torch.zeros(len(chosen), dtype=torch.int64, device=DEVICE),
            row_start=np.arange(len(chosen), dtype=np.int32),
            lengths=np.ones(len(chosen), np.int32),
            starts=np.array([shared + own[s] - 1 for s in chosen], np.int32),
            table_rows=chosen,
            block_tables=tables,
            block_size=16,
            pages=(pages,),
        )
        newest = torch.stack([tails[s][-1] for s in chosen])
        return latent_attention(q[chosen].to(DEVICE), newest.to(DEVICE), context, shape.options).cpu(), context

    together, context = attended(sequences)
    (items,) = context.on_device.items_of.values()
    assert items.kept[:, 2].tolist() == rows
    for slots in (attention_work.SLOTS, 0):
        monkeypatch.setattr(attention_work, "SLOTS", slots)
        assert torch.equal(attended(sequences)[0], together)
        for s in sequences:
            assert torch.equal(attended(np.array([s], np.int32))[0], together[s : s + 1])


@pytest.mark.parametrize(("transposed", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_products_of_heads_and_their_gradients(transposed: bool, dtype: torch.dtype) -> None:
    heads, inputs, outputs = 3, 20, 33
    x = torch.randn(11, heads, inputs + 4).to(dtype)
    whole = torch.randn(heads, (inputs if transposed else outputs) + 5, outputs if transposed else inputs).to(dtype)
    upstream = torch.randn(11, heads, outputs).to(dtype)
    mine = [leaf(part) for part in (x, whole)]
    exact = leaves(x.double(), whole.double())
    out = multiply_heads(mine[0][..., :inputs], mine[1][:, 5:], transposed=transposed)
    matrix = "tha,hab->thb" if transposed else "tha,hba->thb"
    expected = torch.einsum(matrix, exact[0][..., :inputs], exact[1][:, 5:])
    assert_near(out, expected, 4)
    for count in (1, 2, 7):
        pieces = [
            multiply_heads(piece.detach()[..., :inputs], mine[1].detach()[:, 5:], transposed=transposed)
            for piece in mine[0].split(count)
        ]
        assert torch.equal(torch.cat(pieces), out.detach()), count
    out.backward(upstream.to(DEVICE))
    expected.backward(upstream.double())
    for found, wanted in zip(mine, exact, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert_near(found.grad, wanted.grad, 8)
