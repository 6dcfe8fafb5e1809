"""Hold the pages of a layer whose sequences are computed in steps, and what each step is called with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext

from .routes import Step


@dataclass(frozen=True, eq=False)
class Pages:
    """Holds pages that begin as NaN, and a table of blocks that are dealt out at random; row 0 is of no sequence."""

    tables: np.ndarray
    block_size: int
    pages: tuple[torch.Tensor, ...]
    device: str

    @classmethod
    def deal(cls, layout: Any, lengths: Sequence[int], block_size: int, dtype: torch.dtype, device: str) -> "Pages":
        """Allocate by a layout as many blocks as the lengths need."""
        blocks = [-(-length // block_size) for length in lengths]
        dealt = iter(np.random.default_rng(0).permutation(sum(blocks)) + 1)
        tables = np.full((len(lengths) + 1, max(blocks)), np.iinfo(np.int32).max, np.int32)
        for sequence, count in enumerate(blocks):
            tables[sequence + 1, :count] = [next(dealt) for _ in range(count)]
        pages = layout.allocate(sum(blocks), block_size, dtype, device)
        return cls(tables, block_size, tuple(page.fill_(torch.nan) for page in pages), device)

    def context(self, step: Step, padding: int) -> ForwardContext:
        """Describe a call with the rows of a step, and behind them so many that are of no sequence."""
        return ForwardContext(
            positions=torch.zeros(len(step.rows) + padding, dtype=torch.int64, device=self.device),
            row_start=(np.cumsum(step.counts) - step.counts).astype(np.int32),
            lengths=np.array(step.counts, np.int32),
            starts=np.array(step.starts, np.int32),
            table_rows=np.array(step.sequences, np.int32) + 1,
            block_tables=self.tables,
            block_size=self.block_size,
            pages=self.pages,
        )

    def call(self, parts: Sequence[torch.Tensor], step: Step, padding: int) -> list[torch.Tensor]:
        """Return the rows of a step, of each tensor; what pads them is NaN."""
        return [
            torch.cat([x[step.rows], x.new_full((padding, *x.shape[1:]), torch.nan)]).to(self.device) for x in parts
        ]


def keep(result: torch.Tensor, step: Step, out: torch.Tensor) -> None:
    """Write the rows of a step where they belong; those that pad are zero."""
    assert not result[len(step.rows) :].any(), "padding rows must be zero"
    out[step.rows] = result[: len(step.rows)]
