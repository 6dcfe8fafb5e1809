"""The one pass that lays out a step gives what the properties of a context say one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from samebit.kernels.layout.call_rows import StepRows
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.ops.dispatch import lay_out

WIDTH = 40
Ints = npt.NDArray[np.int32]


def _context(asked: Ints, tables: Ints, size: int, rows: StepRows) -> ForwardContext:
    lengths = asked[:, 0]
    return ForwardContext(
        positions=torch.from_numpy(rows.positions),
        row_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        lengths=lengths,
        starts=asked[:, 1],
        table_rows=asked[:, 2],
        block_tables=tables,
        block_size=size,
        pages=(),
        write_from=asked[:, 3],
    )


def _asked(seed: int, size: int, *, most: int) -> tuple[Ints, Ints]:
    """Return what some sequences ask for, each at most so many rows, and tables in which neighbours share the
    beginning."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 24))
    tables = draw.integers(1, 1000, (32, WIDTH)).astype(np.int32)
    for row in range(1, 32):
        shared = int(draw.integers(0, WIDTH + 1))
        tables[row, :shared] = tables[row - 1, :shared]
    lengths = draw.integers(1, most + 1, count)
    starts = draw.integers(0, WIDTH * size - lengths + 1)
    slots = draw.permutation(32)[:count]
    write_from = draw.integers(0, starts + lengths + 1)
    drawn = np.minimum(draw.integers(0, 4, count), lengths)
    return np.stack([lengths, starts, slots, write_from, drawn], axis=1).astype(np.int32), tables


@pytest.mark.parametrize("most", [1, 9, 64, 200])
@pytest.mark.parametrize("size", [8, 16, 128])
def test_a_step_is_laid_out_as_its_context_says(size: int, most: int) -> None:
    for seed in range(40):
        asked, tables = _asked(seed, size, most=most)
        rows = lay_out(asked, tables, size, int(asked[:, 0].sum()))
        context = _context(asked, tables, size, rows)
        ends = np.cumsum(asked[:, 0], dtype=np.int64)
        behind = [np.arange(count, 0, -1) for count in asked[:, 4].tolist()]
        positions = asked[:, 0] + asked[:, 1]
        np.testing.assert_array_equal(
            rows.last_rows, np.concatenate([end - back for end, back in zip(ends, behind, strict=True)])
        )
        following = np.concatenate([end - back + 1 for end, back in zip(positions, behind, strict=True)])
        np.testing.assert_array_equal(rows.next_positions, following)
        each = [np.arange(start, start + length) for length, start in asked[:, :2].tolist()]
        np.testing.assert_array_equal(rows.positions, np.concatenate(each))
        for name, found in rows.known.items():
            _assert_equal(found, getattr(context, name))


def _assert_equal(found: object, wanted: object) -> None:
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    else:
        np.testing.assert_array_equal(found, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        [0, 0, 0, 0, 1],
        [1, -1, 0, 0, 1],
        [1, 0, 2, 0, 1],
        [1, 0, -1, 0, 1],
        [1, 64, 0, 0, 1],
        [2, 0, 0, 0, 1],
        [1, 0, 0, 0, 2],
    ],
)
def test_what_leads_out_of_the_tables_is_refused(asked: list[int]) -> None:
    tables = np.ones((2, 4), np.int32)
    with pytest.raises(ValueError, match="within the tables"):
        lay_out(np.array([asked], np.int32), tables, 16, 1)
