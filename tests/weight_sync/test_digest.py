"""The digest is that of a slow oracle, and a scan sees what it should, at odd sizes and layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from samebit.weight_sync.digest import (
    DTYPES,
    Lanes,
    add_digests,
    copy_scanned,
    digest_of,
    readable_bytes,
    scan,
    scan_bytes,
)

SHAPES = [(), (0,), (1,), (3,), (7,), (2, 129), (3, 100), (1000,), (17, 1, 5)]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
MASK = (1 << 64) - 1


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draws random bits, NaN and all (of a bool, 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def slow_digest(tensor: Tensor) -> int:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    total = 0
    for place in range(len(data) // 8):
        word = int.from_bytes(data[8 * place : 8 * place + 8], "little")
        mixed = word ^ (0x9E3779B97F4A7C15 * (place + 1) & MASK)
        mixed ^= mixed >> 29
        mixed = mixed * 0xD6E8FEB86659FD93 & MASK
        total += mixed ^ (mixed >> 32)
    return total & MASK


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_and_copy_agree_with_the_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source, target = any_bits(shape, dtype), any_bits(shape, dtype, seed=1)
    expected = slow_digest(source)
    finite = bool(torch.isfinite(source.double()).all()) if dtype.is_floating_point else True
    assert (scan(source).digest, scan(source).finite) == (expected, finite)
    differed = not torch.equal(bits(source), bits(target))
    copied = copy_scanned(source, target)
    assert (copied.digest, copied.finite, copied.changed) == (expected, finite, differed)
    assert torch.equal(bits(source), bits(target))
    assert not copy_scanned(source, target).changed


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("place", range(9))
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(name: str, place: int) -> None:
    dtype = DTYPES[name]
    largest = torch.full((9,), torch.finfo(dtype).max, dtype=torch.float64)
    assert scan(largest.to(dtype)).finite
    assert scan((-largest).to(dtype)).finite
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        damaged = largest.clone()
        damaged[place] = bad
        sent = damaged.to(dtype)
        assert scan(sent).finite == bool(torch.isfinite(sent.double()).all())
        assert not scan(sent).finite or dtype == torch.float8_e4m3fn, "which has no infinity"


def test_each_single_bit_changes_the_digest_and_so_does_order() -> None:
    tensor = any_bits((13,), torch.float32)
    digests = {scan(tensor).digest}
    for bit in range(13 * 32):
        flipped = tensor.view(torch.uint8).clone()
        flipped[bit // 8] ^= 1 << bit % 8
        digests.add(scan(flipped.view(torch.float32)).digest)
    assert len(digests) == 1 + 13 * 32
    assert scan(tensor.flip(0)).digest not in digests
    assert scan(-tensor).digest not in digests
    assert scan(torch.zeros(2)).digest != scan(torch.zeros(4)).digest


@pytest.mark.parametrize("cuts", [(8,), (64, 128), (8, 16, 24, 1000)])
def test_a_digest_does_not_depend_on_where_it_was_cut(cuts: tuple[int, ...]) -> None:
    tensor = any_bits((1003,), torch.bfloat16)
    whole, lanes = readable_bytes(tensor), Lanes.of(tensor.dtype)
    edges = [0, *cuts, whole.size]
    pieces = [scan_bytes(whole[a:b], lanes, offset=a).digest for a, b in itertools.pairwise(edges)]
    assert add_digests(pieces) == scan(tensor).digest


def test_layout_and_alignment_do_not_matter() -> None:
    base = any_bits((64, 33), torch.bfloat16)
    for view in (base.t(), base[:, 1:], base[1:, ::2], base.reshape(-1)[3:]):
        plain = view.contiguous().clone()
        assert scan(view).digest == scan(plain).digest == slow_digest(plain)
        target = torch.empty_like(base).as_strided(view.shape, view.stride(), view.storage_offset())
        copied = copy_scanned(plain, target)
        assert copied.digest == scan(plain).digest
        assert torch.equal(bits(target), bits(plain))


def test_autograd_sees_the_write() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    copy_scanned(torch.ones(3), weight)
    loss.backward()
    loss = (weight * weight).sum()
    copy_scanned(torch.zeros(3), weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_can_not_be_copied_or_scanned() -> None:
    with pytest.raises(ValueError, match=r"can not copy \[2\]"):
        copy_scanned(torch.zeros(2), torch.zeros(3))
    with pytest.raises(TypeError, match="weights can not be complex64"):
        scan(torch.zeros(2, dtype=torch.complex64))


def test_the_digest_of_many_depends_on_their_names_order_only_by_name() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"a": 1, "b": 2}) != digest_of({"a": 2, "b": 1})
