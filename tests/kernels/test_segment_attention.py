"""Attention within segments is near the oracle, and a row has the same bits whatever segments are beside its own."""

import numpy as np
import pytest
import torch

from samebit.kernels.layout.vision.segments import Segments
from samebit.kernels.ops.segment_attention import gradients as gradients_module
from samebit.kernels.ops.segment_attention import segment_attention

from . import reference
from .helpers import DTYPES, THREADS, assert_near, leaves, threads

pytestmark = pytest.mark.usefixtures("nan_in_empty")

LENGTHS = (65, 1, 7, 64, 63, 64, 129, 1, 300)
SIZES = ((2, 64), (3, 72), (2, 80), (1, 96), (2, 100), (2, 128), (5, 7))


def tensors(heads: int, size: int, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    torch.manual_seed(size)
    q, k, v = (torch.randn(sum(lengths), heads, size).to(dtype) for _ in range(3))
    return [q * 3, k, v]


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([reference.full_attention(*part, scale=q.shape[2] ** -0.5) for part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), SIZES)
def test_it_is_near_the_oracle_and_a_segment_has_the_same_bits_alone(heads: int, size: int, dtype: torch.dtype) -> None:
    parts = tensors(heads, size, dtype)
    scale = size**-0.5
    whole = segment_attention(*parts, LENGTHS, scale)
    assert whole.dtype is dtype
    assert_near(whole, oracle(*parts), 4)
    first = 0
    for length in LENGTHS:
        alone = segment_attention(*(part[first : first + length] for part in parts), [length], scale)
        assert torch.equal(alone, whole[first : first + length]), length
        first += length


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_order_of_segments_or_on_threads(dtype: torch.dtype) -> None:
    lengths = (64,) * 12 + LENGTHS
    parts = tensors(4, 80, dtype, lengths)
    whole = segment_attention(*parts, lengths, 0.1).split(lengths)
    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    turned = [torch.cat([part.split(lengths)[place] for place in order]) for part in parts]
    segments = Segments.of(torch.tensor([lengths[place] for place in order]))
    for number in THREADS:
        with threads(number):
            found = segment_attention(*turned, segments, 0.1).split(segments.lengths.tolist())
            trained = segment_attention(*leaves(*turned), segments, 0.1).detach().split(segments.lengths.tolist())
        for place, row, kept in zip(order, found, trained, strict=True):
            assert torch.equal(row, whole[place])
            assert torch.equal(kept, whole[place])


def test_a_row_does_not_depend_on_the_other_queries_of_its_segment() -> None:
    q, k, v = tensors(2, 80, torch.float32, (130,))
    whole = segment_attention(q, k, v, [130], 0.1)
    for row in (0, 1, 63, 64, 129):
        others = torch.full_like(q, torch.nan)
        others[row] = q[row]
        assert torch.equal(segment_attention(others, k, v, [130], 0.1)[row], whole[row])


def test_a_strided_part_of_a_fused_projection_has_the_bits_of_whole_tensors() -> None:
    fused = torch.randn(sum(LENGTHS), 3, 2, 80)
    parts = fused.unbind(1)
    whole = segment_attention(*(part.contiguous() for part in parts), LENGTHS, 0.1)
    assert torch.equal(segment_attention(*parts, LENGTHS, 0.1), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", [1 << 20, 1 << 13, 1])
def test_gradients_are_near_the_oracle_however_many_scores_are_worked_out_at_once(
    scores: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients_module, "_SCORES", scores)
    parts = tensors(3, 80, dtype)
    upstream = torch.randn(parts[0].shape).to(dtype)
    exact, mine = leaves(*(part.double() for part in parts)), leaves(*parts)
    oracle(*exact).backward(upstream.double())
    segment_attention(*mine, LENGTHS, 80**-0.5).backward(upstream)
    for x, y in zip(mine, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert x.grad.dtype is dtype
        assert_near(x.grad, y.grad, 8)


def test_equal_calls_have_equal_gradients() -> None:
    parts = tensors(3, 80, torch.float32)
    upstream = torch.randn(parts[0].shape)
    found = []
    for _ in range(3):
        mine = leaves(*parts)
        segment_attention(*mine, LENGTHS, 0.1).backward(upstream)
        found.append([x.grad for x in mine])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


Q = torch.randn(5, 2, 8)
REFUSED = {
    "fewer rows": (lambda: segment_attention(Q, Q, Q, [2, 2], 1.0), ValueError, "4 rows together, and q has 5"),
    "an empty segment": (lambda: segment_attention(Q, Q, Q, [5, 0], 1.0), ValueError, "a segment has 0 rows"),
    "a negative length": (lambda: Segments.of([6, -1]), ValueError, "a segment has -1 rows"),
    "no segments": (lambda: Segments.of([]), ValueError, r"\[0\]; allowed: \[S\], at least one"),
    "lengths of lengths": (lambda: Segments.of([[2, 3]]), ValueError, r"\[1, 2\]; allowed"),
    "broken lengths": (lambda: Segments.of([2.5, 2.5]), TypeError, "float64; allowed: integers"),
    "flat queries": (lambda: segment_attention(Q[0], Q, Q, [5], 1.0), ValueError, r"\[2, 8\]; allowed: \[T, H, D\]"),
    "no heads": (lambda: segment_attention(Q[:, :0], Q, Q, [5], 1.0), ValueError, "at least 1 head of 1 element"),
    "other heads": (lambda: segment_attention(Q, Q[:, :1], Q, [5], 1.0), ValueError, r"k .*\[5, 1, 8\].*\[5, 2, 8\]"),
    "other values": (lambda: segment_attention(Q, Q, Q[..., :7], [5], 1.0), ValueError, r"v .*\[5, 2, 7\]"),
    "other dtypes": (lambda: segment_attention(Q, Q.bfloat16(), Q, [5], 1.0), TypeError, "k is torch.bfloat16"),
    "no dtype of the CPU": (lambda: segment_attention(Q.half(), Q.half(), Q.half(), [5], 1.0), TypeError, "float16"),
    "keys elsewhere": (lambda: segment_attention(Q, Q.to("meta"), Q, [5], 1.0), ValueError, "k is on meta"),
    "segments elsewhere": (
        lambda: segment_attention(Q, Q, Q, Segments.of([5], "meta"), 1.0), ValueError, "laid out for meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_can_not_compute_is_refused_by_name(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()
