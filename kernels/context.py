"""The layout of one forward call: which rows belong to which sequence, at which positions, in which pages.

Invariants:

* A context is immutable. Rows of one sequence are consecutive; rows that belong to none are padding.
* Positions count from 0 at the first token of a sequence: padding and packing never shift the KV grid.
* Without pages of its own (`pages` is None) a context is a training call: every sequence starts at 0 and
  its keys live in pages that the attention layer makes for this call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .cpu.attention import KV_CHUNK, QUERY_TILE
from .states import StateMemory

if TYPE_CHECKING:
    from .triton.layout import DeviceLayout
    from .triton.work import AttentionWork

TRAINING_BLOCK = KV_CHUNK
"""Block size of the pages of a training call: a page is a chunk."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ForwardContext:
    """Layout of the T rows of one forward call with S sequences.

    Attributes:
        positions: ``[T]`` int64, what rotates each row; 0 for padding.
        row_start: ``[S]`` first row of each sequence.
        lengths: ``[S]`` rows of each sequence in this call, at least 1.
        starts: ``[S]`` tokens of each sequence that earlier calls have put into its pages.
        table_rows: ``[S]`` row of ``block_tables`` that each sequence reads.
        block_tables: ``[rows, W]`` block of each ``block_size`` tokens; block 0 is nobody's.
        block_size: tokens a block.
        write_from: ``[S]`` tokens of each sequence that are not written, because the pages have them already;
            None for none.
        pages: one tensor a layer (see `samebit.kernels.pages.KVPages`), or None for a training call.
        states: the memory of Mamba layers, slot ``table_rows[s]`` for sequence s; None where there are none, and for
            a training call.
        captures: ``[M, 3]`` (sequence, absolute position, checkpoint): keep the state of that sequence at that chunk
            boundary, which this call reaches or passes, in that checkpoint of ``states``.
        device_layout: what of this is on the device already, by whoever sent it there; None to have it sent.
    """

    positions: torch.Tensor
    row_start: Ints
    lengths: Ints
    starts: Ints
    table_rows: Ints
    block_tables: Ints
    block_size: int
    pages: tuple[torch.Tensor, ...] | None = None
    write_from: Ints | None = None
    states: StateMemory | None = None
    captures: Ints = field(default_factory=lambda: np.empty((0, 3), np.int32))
    device_layout: "DeviceLayout | None" = None

    def __post_init__(self) -> None:
        if len(self.captures):
            sequence, position = self.captures[:, 0], self.captures[:, 1]
            starts = self.starts[sequence]
            reached = (starts < position) & (position <= starts + self.lengths[sequence])
            if self.states is None or not bool(reached.all()):
                raise ValueError(
                    f"captures {self.captures.tolist()}: a context with states captures positions (the second number) "
                    f"after the start {starts.tolist()} and up to the end of what a sequence computes"
                )

    @cached_property
    def tiles(self) -> Ints:
        """``[N, 2]`` (sequence, first row within it) of the pieces that attention works on."""
        counts = -(-self.lengths // QUERY_TILE)
        sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        piece = np.arange(len(sequence), dtype=np.int32) - before
        return np.stack([sequence, piece * QUERY_TILE], axis=1).astype(np.int32)

    @cached_property
    def slots(self) -> tuple[Ints, Ints]:
        """``[T]`` block and offset in it that each row's key and value go to.

        (0, 0) for padding and for tokens that are not written.
        """
        total = int(self.lengths.sum())
        sequence = np.repeat(np.arange(len(self.lengths)), self.lengths)
        within = np.arange(total) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        token = self.starts[sequence] + within
        rows = self.row_start[sequence] + within
        blocks = np.zeros(len(self.positions), np.int32)
        offsets = np.zeros(len(self.positions), np.int32)
        blocks[rows] = self.block_tables[self.table_rows[sequence], token // self.block_size]
        offsets[rows] = token % self.block_size
        if self.write_from is not None:
            kept = rows[token < self.write_from[sequence]]
            blocks[kept] = offsets[kept] = 0
        return blocks, offsets

    @cached_property
    def tokens_of_rows(self) -> tuple[Ints, Ints]:
        """``[T]`` sequence of each row, and its place among the sequence's rows of this call; (-1, 0) for padding."""
        sequences = np.full(len(self.positions), -1, np.int32)
        within = np.zeros(len(self.positions), np.int32)
        owner = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        rows = self.row_start[owner] + place
        sequences[rows] = owner
        within[rows] = place
        return sequences, within

    @cached_property
    def layout(self) -> torch.Tensor:
        """``[4, S]`` int32: first row, length, start and table row of each sequence, for what takes addresses."""
        return torch.from_numpy(np.array([self.row_start, self.lengths, self.starts, self.table_rows], np.int32))

    @cached_property
    def row_table(self) -> torch.Tensor:
        """``[2, T]`` int32: `tokens_of_rows`, likewise."""
        return torch.from_numpy(np.array(self.tokens_of_rows, np.int32))

    @cached_property
    def captured(self) -> torch.Tensor:
        """``[M, 3]`` int32: the captures, likewise."""
        return torch.from_numpy(np.ascontiguousarray(self.captures, np.int32))

    @cached_property
    def work(self) -> "AttentionWork":
        """What the programs of Triton's attention compute, on the host."""
        from .triton.work import AttentionWork

        return AttentionWork.of(self)

    @cached_property
    def on_device(self) -> "DeviceLayout":
        """What Triton's kernels read of this layout, on the device of ``positions``."""
        if self.device_layout is not None:
            return self.device_layout
        from .triton.layout import DeviceLayout

        return DeviceLayout.of(self, self.positions.device)

    @cached_property
    def num_rows(self) -> int:
        """T."""
        return len(self.positions)

    @cached_property
    def covers_all_rows(self) -> bool:
        """True when no row is padding. (No length is 0: as many sequences as rows are one row each.)"""
        return len(self.lengths) == self.num_rows or int(self.lengths.sum()) == self.num_rows

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that the tables name, the null block included (training calls)."""
        return int(self.block_tables.max(initial=0)) + 1


class LayoutMask(torch.Tensor):
    """The attention mask of a bound decoder: masks nothing, carries the layout to the layers.

    Hugging Face hands it on as it is. As an argument of the layers it survives gradient checkpointing: the
    recomputation gets the same object, whatever call was made in between and in whichever thread it runs.
    """

    context: ForwardContext
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(context: ForwardContext, dimensions: int) -> "LayoutMask":
        """A mask of this layout; four dimensions tell Hugging Face that it is ready for attention."""
        plain = torch.zeros([1] * dimensions, dtype=torch.bool, device=context.positions.device)
        mask = plain.as_subclass(LayoutMask)
        mask.context = context
        return mask

    def detach(self) -> "LayoutMask":
        """Itself: reentrant checkpointing detaches its arguments."""
        return self

    def contiguous(self, *args: Any, **kwargs: Any) -> "LayoutMask":
        """Itself."""
        return self

    def __getitem__(self, index: Any) -> "LayoutMask":
        """Itself: Hugging Face cuts a two-dimensional mask to the tokens of the call."""
        return self


def layout_of(mask: torch.Tensor | None) -> ForwardContext:
    """The layout that a layer's mask carries, else the installed one.

    Raises:
        ValueError: there is none.
    """
    context = mask.context if isinstance(mask, LayoutMask) else installed_context()
    if context is None:
        raise ValueError(
            "this layer's mask carries no layout: a bound layer runs only inside the model's forward (and "
            "under gradient checkpointing this version of transformers drops the mask)"
        )
    return context


_installed: ContextVar[ForwardContext | None] = ContextVar("samebit_forward_context", default=None)


def installed_context() -> ForwardContext | None:
    """The context installed around the running code, if any."""
    return _installed.get()


@contextmanager
def use_context(context: ForwardContext) -> Iterator[None]:
    """Run bound models with this layout instead of the one their arguments describe."""
    token = _installed.set(context)
    try:
        yield
    finally:
        _installed.reset(token)


def training_context(
    shape: tuple[int, int],
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    device: str | torch.device = "cpu",
) -> ForwardContext:
    """The layout of a trainer's call on ``input_ids`` of this shape.

    Args:
        shape: ``(B, T)``.
        attention_mask: ``[B, T]``, nonzero for tokens; each row one run of tokens, padded left or right.
        position_ids: ``[B, T]`` or ``[1, T]``. A new sequence starts wherever they do not go up by one
            (packed batches), and it starts at 0. Without them positions count from 0 at each row's first token.
        device: where the model computes.

    Raises:
        ValueError: shapes that do not match, a mask with holes, a sequence that does not start at position 0.
    """
    valid = _valid_tokens(shape, attention_mask)
    if position_ids is None:
        positions = np.where(valid, np.cumsum(valid, axis=1) - 1, 0)
    else:
        positions = np.broadcast_to(position_ids.detach().cpu().numpy(), shape)
        positions = np.where(valid, positions, 0)
    first = valid.copy()
    follows = valid[:, 1:] & valid[:, :-1]
    first[:, 1:] &= ~(follows & (positions[:, 1:] == positions[:, :-1] + 1))
    if position_ids is None and attention_mask is not None and bool((first.sum(1) > 1).any()):
        raise ValueError("attention_mask must mark one run of tokens a row; it has holes")
    row_start = np.flatnonzero(first.reshape(-1)).astype(np.int32)
    if bool(positions.reshape(-1)[row_start].any()):
        raise ValueError(
            "position_ids: every sequence must start at position 0 at its first token (with left padding, pass "
            "attention_mask alone, or attention_mask.cumsum(-1) - 1), as it does in the rollout"
        )
    flat = valid.reshape(-1)
    sequence_of_row = np.cumsum(first.reshape(-1)) - 1
    lengths = np.bincount(sequence_of_row[flat], minlength=len(row_start)).astype(np.int32)
    return ForwardContext(
        positions=torch.from_numpy(np.ascontiguousarray(positions.reshape(-1), dtype=np.int64)).to(device),
        row_start=row_start,
        lengths=lengths,
        starts=np.zeros(len(row_start), np.int32),
        table_rows=np.arange(len(row_start), dtype=np.int32),
        block_tables=_consecutive_blocks(lengths),
        block_size=TRAINING_BLOCK,
    )


def _valid_tokens(shape: tuple[int, int], attention_mask: torch.Tensor | None) -> npt.NDArray[np.bool_]:
    if attention_mask is None:
        return np.ones(shape, np.bool_)
    if tuple(attention_mask.shape) != tuple(shape):
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(shape)}, got {tuple(attention_mask.shape)}"
        )
    mask: npt.NDArray[np.bool_] = attention_mask.detach().cpu().numpy() != 0
    return mask


def _consecutive_blocks(lengths: Ints) -> Ints:
    """``[S, W]`` block tables in which each sequence owns the next blocks, from block 1 on."""
    counts = -(-lengths // TRAINING_BLOCK)
    before = np.cumsum(counts) - counts + 1
    columns = np.arange(int(counts.max(initial=0)))
    return np.where(columns[None, :] < counts[:, None], before[:, None] + columns[None, :], 0).astype(np.int32)
