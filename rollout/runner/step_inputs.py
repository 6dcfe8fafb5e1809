"""Make the arrays of a step, on the host: which rows are computed, in which layout, and what is drawn from them.

Invariants
----------
* The rows are the planned tokens, sequence after sequence.
* The rows that reach the head are first those that sample, then those that score prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.call_rows import StepRows
from samebit.kernels.layout.forward_context import ForwardContext
from samebit.kernels.layout.images.image_rows import ImageRows
from samebit.kernels.layout.lora.adapters import KeptTerms, RowAdapters
from samebit.kernels.ops.dispatch import lay_out
from samebit.rollout.engine.step_plan import ScheduledSequence, StepPlan
from samebit.rollout.memory.shape import Memory
from samebit.rollout.requests.request import Sequence
from samebit.rollout.runner.sampler import NO_DRAWS, DrawInputs, Sampler

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]

# read by `map`, so that no step of Python is taken for a sequence
_SEQUENCE, _FORKS, _CAPTURES = attrgetter("sequence"), attrgetter("forks"), attrgetter("captures")
_ADAPTER, _SCORES = attrgetter("shared.adapter"), attrgetter("prompt_scores")
_ASKED = attrgetter("length", "start", "sequence.slot", "sequence.kv.write_from", "samples")


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
    positions: Rows
    draws: DrawInputs
    pieces: list[PromptPiece]

    @classmethod
    def undrawn(cls, context: ForwardContext, token_ids: Rows, head_rows: Rows) -> StepInputs:
        """Return the inputs of a step from whose logits nothing is drawn."""
        return cls(
            context, token_ids, sources=None, head_rows=head_rows, num_sampling_rows=0, sequences=[],
            positions=np.zeros(0, np.int64),
            draws=NO_DRAWS, pieces=[],
        )  # fmt: skip

    def with_images(self, images: ImageRows) -> StepInputs:
        """Return the inputs of a step some of whose rows stand for images."""
        return replace(self, context=replace(self.context, images=images))

    @property
    def all_rows_sample(self) -> bool:
        """Return whether the rows that reach the head are all rows, in their order."""
        return self.num_sampling_rows == len(self.head_rows) == len(self.token_ids)


def step_inputs(plan: StepPlan, block_tables: Ints, memory: Memory, sampler: Sampler) -> StepInputs:
    """Make the arrays of a plan; row `sequence.slot` of `block_tables` lists a sequence's blocks."""
    items = plan.items
    owners = list(map(_SEQUENCE, items))
    asked = np.fromiter(chain.from_iterable(map(_ASKED, items)), np.int32).reshape(-1, 5)
    rows = lay_out(asked, block_tables, memory.block_size, plan.num_tokens)
    sequences, drawn_rows = _drawn(plan, len(rows.last_rows))
    positions = rows.next_positions if len(drawn_rows) == len(rows.last_rows) else rows.next_positions[drawn_rows]
    pieces = _prompt_pieces(items, rows.numbers[0]) if any(map(_SCORES, owners)) else []
    head_rows = rows.last_rows
    if pieces:
        head_rows = np.concatenate([head_rows, *(np.arange(piece.rows.start, piece.rows.stop) for piece in pieces)])
    return StepInputs(
        context=_context(items, owners, rows, asked[:, 3], block_tables, memory),
        token_ids=_token_ids(plan),
        sources=None if plan.sources is None else np.array(plan.sources, np.int64),
        head_rows=head_rows,
        num_sampling_rows=len(rows.last_rows),
        sequences=sequences,
        positions=positions,
        draws=sampler.draw_inputs(sequences, positions, drawn_rows),
        pieces=pieces,
    )


def _drawn(plan: StepPlan, count: int) -> tuple[list[Sequence], Rows]:
    """Return the sequences that get a token, one for each of the `count` rows that are drawn from and behind it its
    forks, and which of these rows each draws from."""
    items = plan.items
    if not plan.num_drafts and not any(map(_FORKS, items)):
        return [item.sequence for item in items if item.samples], np.arange(count)
    families = [(item.sequence, *item.forks) for item in items for _ in range(item.samples)]
    return [one for family in families for one in family], np.repeat(np.arange(count), list(map(len, families)))


def _token_ids(plan: StepPlan) -> Rows:
    """Return the token of each row, zeros where they are not known yet."""
    if plan.sources is not None:
        return np.zeros(plan.num_tokens, np.int64)
    if plan.num_tokens == len(plan.items):
        return np.fromiter((item.sequence.token_ids.item(item.start) for item in plan.items), np.int64)
    return np.concatenate(list(chain.from_iterable(map(_tokens_of, plan.items))))


def _tokens_of(item: ScheduledSequence) -> tuple[Rows, ...]:
    """Return the tokens of an item: those that are known, and guesses behind them."""
    known = item.sequence.token_ids[item.start : item.start + item.length - len(item.drafts)]
    return (known, np.array(item.drafts, np.int64)) if item.drafts else (known,)


def _context(
    items: list[ScheduledSequence], owners: list[Sequence], rows: StepRows, write_from: Ints, block_tables: Ints,
    memory: Memory,
) -> ForwardContext:  # fmt: skip
    row_start, lengths, starts, table_rows = rows.numbers
    return ForwardContext(
        positions=torch.from_numpy(rows.positions),
        row_start=row_start,
        lengths=lengths,
        starts=starts,
        table_rows=table_rows,
        block_tables=block_tables,
        block_size=memory.block_size,
        pages=memory.pages,
        write_from=write_from,
        states=memory.states,
        captures=_captures(items),
        adapters=_adapters(owners, lengths, memory.kept_terms),
        known=rows.known,
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


def _prompt_pieces(items: list[ScheduledSequence], row_start: Ints) -> list[PromptPiece]:
    pieces = [
        _prompt_piece(item, int(first))
        for item, first in zip(items, row_start, strict=True)
        if item.sequence.prompt_logprobs_wanted
    ]
    return [piece for piece in pieces if piece.rows]


def _prompt_piece(item: ScheduledSequence, first: int) -> PromptPiece:
    count = min(item.start + item.length, item.sequence.num_prompt_tokens - 1) - item.start
    return PromptPiece(item.sequence, item.start + 1, range(first, first + max(count, 0)))
