"""Make the arrays of a step, on the host: which rows are computed, in which layout, and what is drawn from them.

Invariants
----------
* The rows are the planned tokens, sequence after sequence.
* The rows that reach the head are first those that sample, then those that score prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.lora.adapters import KeptTerms, RowAdapters
from samebit.rollout.engine.step_plan import ScheduledSequence, StepPlan
from samebit.rollout.memory.shape import Memory
from samebit.rollout.requests.request import Sequence
from samebit.rollout.runner.sampler import NO_DRAWS, DrawInputs, Sampler

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

# read by `map`, so that no step of Python is taken for a sequence
_SEQUENCE, _START, _LENGTH = attrgetter("sequence"), attrgetter("start"), attrgetter("length")
_SAMPLES, _FORKS, _CAPTURES = attrgetter("samples"), attrgetter("forks"), attrgetter("captures")
_SLOT, _WRITE_FROM, _ADAPTER = attrgetter("slot"), attrgetter("kv.write_from"), attrgetter("request.adapter")
_SCORED = attrgetter("prompt_logprobs_wanted")


@dataclass(frozen=True)
class PromptPiece:
    """Names rows of the step that score the prompt tokens of a sequence from position `start` on."""

    sequence: Sequence
    start: int
    rows: range


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Holds the inputs of a step: T rows, K of which reach the head.

    context: of the T rows; its positions are on the host. token_ids: [T]; where `sources` [T] are given, they are
    the draws of the step before in these rows instead. head_rows: [K], the first `num_sampling_rows` of which sample.
    sequences: those that get a token, with its position and `draws` for each. pieces: of the prompts that are scored.
    """

    context: ForwardContext
    token_ids: Rows
    sources: Rows | None
    head_rows: Rows
    num_sampling_rows: int
    sequences: list[Sequence]
    positions: list[int]
    draws: DrawInputs
    pieces: list[PromptPiece]

    @classmethod
    def undrawn(cls, context: ForwardContext, token_ids: Rows, head_rows: Rows) -> StepInputs:
        """Return the inputs of a step from whose logits nothing is drawn."""
        return cls(
            context, token_ids, sources=None, head_rows=head_rows, num_sampling_rows=0, sequences=[], positions=[],
            draws=NO_DRAWS, pieces=[],
        )  # fmt: skip

    @property
    def all_rows_sample(self) -> bool:
        """Return whether the rows that reach the head are all rows, in their order."""
        return self.num_sampling_rows == len(self.head_rows) == len(self.token_ids)


def step_inputs(plan: StepPlan, block_tables: Ints, memory: Memory, sampler: Sampler) -> StepInputs:
    """Make the arrays of a plan; row `sequence.slot` of `block_tables` lists a sequence's blocks."""
    items = plan.items
    owners = list(map(_SEQUENCE, items))
    starts, lengths = _ints(_START, items), _ints(_LENGTH, items)
    ends = np.cumsum(lengths, dtype=np.int64)
    sampling = np.flatnonzero(np.fromiter(map(_SAMPLES, items), np.bool_, len(items)))
    sequences, drawn_rows = _drawn(items, owners, sampling)
    positions: list[int] = (starts + lengths)[sampling[drawn_rows]].tolist()
    pieces = _prompt_pieces(items, owners, ends)
    head_rows = ends[sampling] - 1
    if pieces:
        head_rows = np.concatenate([head_rows, *(np.arange(piece.rows.start, piece.rows.stop) for piece in pieces)])
    return StepInputs(
        context=_context(items, owners, starts, lengths, ends, block_tables, memory),
        token_ids=_token_ids(plan, owners, starts.tolist()),
        sources=None if plan.sources is None else np.array(plan.sources, np.int64),
        head_rows=head_rows,
        num_sampling_rows=len(sampling),
        sequences=sequences,
        positions=positions,
        draws=sampler.draw_inputs(sequences, positions, drawn_rows),
        pieces=pieces,
    )


def _ints(number: Callable[[Any], int], things: Iterable[Any]) -> Ints:
    return np.fromiter(map(number, things), np.int32)


def _drawn(items: list[ScheduledSequence], owners: list[Sequence], sampling: Rows) -> tuple[list[Sequence], Rows]:
    """Return the sequences that get a token, each before its forks, and which of the `sampling` items each is of."""
    if not any(map(_FORKS, items)):
        chosen = owners if len(sampling) == len(owners) else [owners[place] for place in sampling.tolist()]
        return chosen, np.arange(len(sampling))
    families = [(owners[place], *items[place].forks) for place in sampling.tolist()]
    return [one for family in families for one in family], np.repeat(np.arange(len(families)), list(map(len, families)))


def _token_ids(plan: StepPlan, owners: list[Sequence], starts: list[int]) -> Rows:
    """Return the token of each row, zeros where they are not known yet."""
    if plan.sources is not None:
        return np.zeros(plan.num_tokens, np.int64)
    if plan.num_tokens == len(owners):
        return np.fromiter((one.token_ids.item(at) for one, at in zip(owners, starts, strict=True)), np.int64)
    return np.concatenate([item.sequence.token_ids[item.start : item.start + item.length] for item in plan.items])


def _context(
    items: list[ScheduledSequence], owners: list[Sequence], starts: Ints, lengths: Ints, ends: Rows,
    block_tables: Ints, memory: Memory,
) -> ForwardContext:  # fmt: skip
    first = ends - lengths
    positions = np.arange(int(ends[-1])) + np.repeat(starts - first, lengths)
    return ForwardContext(
        positions=torch.from_numpy(positions),
        row_start=first.astype(np.int32),
        lengths=lengths,
        starts=starts,
        table_rows=_ints(_SLOT, owners),
        block_tables=block_tables,
        block_size=memory.block_size,
        pages=memory.pages,
        write_from=_ints(_WRITE_FROM, owners),
        states=memory.states,
        captures=_captures(items),
        adapters=_adapters(owners, lengths, memory.kept_terms),
    )


def _adapters(owners: list[Sequence], lengths: Ints, kept: KeptTerms) -> RowAdapters:
    """Group the rows by the adapters of their requests."""
    wanted = list(map(_ADAPTER, owners))
    kinds = dict.fromkeys(wanted)
    if len(kinds) == 1:
        return RowAdapters.all_through(wanted[0], kept)
    of_rows = np.repeat([0 if adapter is None else adapter.number for adapter in wanted], lengths)
    return RowAdapters(
        tuple(
            (adapter, torch.from_numpy(np.flatnonzero(of_rows == adapter.number)))
            for adapter in kinds
            if adapter is not None
        ),
        kept,
    )


def _captures(items: list[ScheduledSequence]) -> Ints:
    """Return ``[M, 3]`` (item, position, checkpoint)."""
    if not any(map(_CAPTURES, items)):
        return np.empty((0, 3), np.int32)
    rows = [(number, *capture) for number, item in enumerate(items) for capture in item.captures]
    return np.array(rows, np.int32).reshape(-1, 3)


def _prompt_pieces(items: list[ScheduledSequence], owners: list[Sequence], ends: Rows) -> list[PromptPiece]:
    if not any(map(_SCORED, owners)):
        return []
    pieces = [
        _prompt_piece(item, int(end))
        for item, end in zip(items, ends, strict=True)
        if item.sequence.prompt_logprobs_wanted
    ]
    return [piece for piece in pieces if piece.rows]


def _prompt_piece(item: ScheduledSequence, end: int) -> PromptPiece:
    count = min(item.start + item.length, item.sequence.num_prompt_tokens - 1) - item.start
    first = end - item.length
    return PromptPiece(item.sequence, item.start + 1, range(first, first + max(count, 0)))
