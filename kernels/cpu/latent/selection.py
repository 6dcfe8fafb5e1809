"""Choose keys on the CPU as operations call it: find the rows that have to choose, score for some of them at a time.

T tokens, H heads, D elements of an index key, N pieces.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from samebit.kernels.cpu.base.jit import array
from samebit.kernels.cpu.latent import index, write_pages
from samebit.kernels.layout.call_rows import Ints
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.grids import KV_CHUNK, QUERY_TILE, ceil_div
from samebit.kernels.layout.options import IndexOptions
from samebit.kernels.openmp import num_threads

_SCORES = 1 << 23
"""Scores that are kept at a time, at most, if those of one piece are not more."""

_ROWS = 256
"""Rows, tokens times heads, that meet a chunk together, at least a token's heads."""


class _Slab(NamedTuple):
    """Names rows whose scores are kept at a time: their pieces ``[N, 4]``, and of each row the tokens up to its own."""

    pieces: Ints
    rows: Ints
    counts: Ints


class Plan(NamedTuple):
    """Says which rows take all tokens they see, with their counts, and which have to choose.

    Attributes:
        rows, counts: of those that take all.
        slabs: as `index.select_part` takes them: of rows whose scores are kept at a time.
        scores: shape of the scores of a slab, at most.
    """

    rows: Ints
    counts: Ints
    slabs: tuple[Ints, ...]
    scores: tuple[int, int]


def choose_keys(
    queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, context: ForwardContext, options: IndexOptions
) -> torch.Tensor:
    """Implement `Operations.choose_keys`."""
    pages = None if context.pages is None else context.pages[options.layer]
    if pages is None and context.longest > options.top_k:
        pages = torch.empty(context.num_blocks, context.block_size, options.size, dtype=keys.dtype, device="cpu")
    if pages is None:
        return torch.empty(context.num_rows, 0, dtype=torch.int32, device="cpu")
    blocks, offsets, sequences, block_tables, _ = context.read_by_layers
    memory = array(pages)
    write_pages.write_pages(keys.numel(), array(keys.contiguous()), blocks, offsets, memory)
    chosen, plan = chosen_of(context, options)
    if plan is not None:
        index.select(
            array(queries.contiguous()), array(weights.contiguous()), memory, sequences, block_tables, plan.slabs,
            np.float32(options.scale), np.empty(plan.scores, np.float32), chosen.numpy(), num_threads(),
        )  # fmt: skip
    return chosen


def chosen_of(context: ForwardContext, options: IndexOptions) -> tuple[torch.Tensor, Plan | None]:
    """Return room for what is chosen, in which the lines of rows that do not have to choose are written; and the plan
    of the others, None where all tokens are chosen for every row."""
    if context.longest <= options.top_k:
        return torch.empty(context.num_rows, 0, dtype=torch.int32, device="cpu"), None
    chosen = torch.empty(context.num_rows, options.top_k, dtype=torch.int32, device="cpu")
    plan = _plan_of(context, options)
    if not context.covers_all_rows:
        chosen.fill_(-1)
    if plan.rows.size > 0:
        index.take(plan.rows.size * options.top_k, plan.rows, plan.counts, chosen.numpy())
    return chosen, plan


def _plan_of(context: ForwardContext, options: IndexOptions) -> Plan:
    """Return the plan of a call's rows, made by the first layer that chooses: the others choose alike.

    In a decode step planning takes a tenth as long as scores.
    """
    plans, key = context.worked_out, ("selection", options.top_k, options.heads)
    if key not in plans:
        few = _rows_of(context, np.minimum(context.lengths, np.maximum(options.top_k - context.starts, 0)))
        width = ceil_div(context.longest, KV_CHUNK) * KV_CHUNK
        slabs = list(_slabs(context, options, width))
        numbers = [[len(slab.pieces), len(slab.rows)] for slab in slabs]
        begins = np.cumsum([[0, 0], *numbers], axis=0, dtype=np.int32)
        joined = (np.concatenate(parts) for parts in zip(*slabs, strict=True))
        plans[key] = Plan(*few, (begins, *joined), (max(rows for _, rows in numbers), width))
    plan: Plan = plans[key]
    return plan


def _rows_of(context: ForwardContext, numbers: Ints) -> tuple[Ints, Ints]:
    """Return the first rows of each sequence, and for each row the count of tokens up to its own."""
    sequence = np.repeat(np.arange(len(numbers)), numbers)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    rows, counts = context.row_start[sequence] + within, context.starts[sequence] + within + 1
    return rows.astype(np.int32), counts.astype(np.int32)


def _slabs(context: ForwardContext, options: IndexOptions, width: int) -> Iterator[_Slab]:
    """List the rows that have to choose, as many pieces of them at a time as scores may be kept."""
    tokens = max(1, min(QUERY_TILE, _ROWS // options.heads))
    first = np.minimum(np.maximum(options.top_k - context.starts, 0), context.lengths)
    counts = context.lengths - first
    numbers = ceil_div(counts, tokens)
    sequence = np.repeat(np.arange(len(numbers)), numbers)
    begin = (np.arange(len(sequence)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * tokens
    rows = np.minimum(tokens, counts[sequence] - begin)
    pieces = np.stack([sequence, first[sequence] + begin, rows, np.zeros_like(rows)], axis=1).astype(np.int32)
    together = max(1, _SCORES // (width * tokens))
    for at in range(0, len(pieces), together):
        slab = pieces[at : at + together]
        slab[:, 3] = np.cumsum(slab[:, 2]) - slab[:, 2]
        of, within = np.repeat(slab[:, :2], slab[:, 2], axis=0).T
        within = within + np.arange(len(within), dtype=np.int32) - np.repeat(slab[:, 3], slab[:, 2])
        counts = context.starts[of] + within + 1
        yield _Slab(slab, context.row_start[of] + within, counts.astype(np.int32))
