"""Describe the layout of one forward call, and the memory that it reads and writes.

Invariants:

* A context is immutable (see `call_rows`).
* Without pages of its own (`pages` is None) a context is a training call: every sequence starts at 0 and
  its keys live in pages that the attention layer makes for this call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from samebit.kernels.layout.attention_work import AttentionWork
from samebit.kernels.layout.call_rows import CallRows, Ints
from samebit.kernels.layout.device_layout import DeviceLayout
from samebit.kernels.layout.grids import KV_CHUNK, ceil_div
from samebit.kernels.layout.images.image_rows import ImageRows
from samebit.kernels.layout.lora.adapters import RowAdapters
from samebit.kernels.layout.shape_checks import check_readable
from samebit.kernels.layout.states.memory import StateMemory
from samebit.kernels.layout.transfer import Tensors

TRAINING_BLOCK = KV_CHUNK
"""The pages of a training call have blocks of this size: a page is a chunk."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardContext(CallRows):
    """Lays out the T rows of one forward call with S sequences, and names its memory; see `CallRows` for the rest.

    Attributes:
        pages: the tensors of the layers (see `samebit.kernels.layout.kv_pages`), or None for a training call.
        states: the memory of recurrent layers, slot ``table_rows[s]`` for sequence s; None for models without them, and
            for a training call.
        device_layout: what of this was sent to the device before; None to have it sent.
        adapters: of the rows; None where the model's own flags say it (a trainer's call).
        images: what rows of images read, and what rotates all rows of such a call; None where no sequence has any.
        known: properties that `StepRows` says, so that the layout is checked, and they need not be worked out.
    """

    pages: tuple[torch.Tensor, ...] | None = None
    states: StateMemory | None = None
    device_layout: DeviceLayout | None = None
    adapters: RowAdapters | None = None
    images: ImageRows | None = None
    known: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.known:
            vars(self).update(self.known)
        elif len(self.lengths):
            self._check_layout()
        if len(self.captures):
            sequence, position = self.captures[:, 0], self.captures[:, 1]
            starts = self.starts[sequence]
            reached = (starts < position) & (position <= starts + self.lengths[sequence])
            if self.states is None or not bool(reached.all()):
                raise ValueError(
                    f"captures {self.captures.tolist()}: a context with states captures positions (the second number) "
                    f"after the start {starts.tolist()} and up to the end of what a sequence computes"
                )

    def _check_layout(self) -> None:
        """Raise ValueError unless these numbers lead to rows and blocks: kernels follow them to addresses."""
        rows, size, (tables, width) = self.num_rows, self.block_size, self.block_tables.shape
        first, lengths, starts, table_rows = self.row_start, self.lengths, self.starts, self.table_rows
        if not first.shape == starts.shape == table_rows.shape == lengths.shape:
            given = [list(part.shape) for part in (first, lengths, starts, table_rows)]
            raise ValueError(f"row_start, lengths, starts and table_rows have the shapes {given}; allowed: four alike")
        if size < 1 or size & (size - 1):
            raise ValueError(f"block_size is {size}; allowed: a power of two")
        low, high = self.lowest, self.highest
        idle = low.lengths == high.lengths == 0  # a step is recorded with room for sequences, which compute nothing
        last_row, tokens = (self.numbers[::2] + lengths).max(axis=1).tolist()
        if (low.lengths < 1 and not idle) or low.row_start < 0 or last_row > rows:
            raise ValueError(f"sequences of {lengths} rows begin at the rows {first}; allowed: within {rows} rows")
        if low.table_rows < 0 or high.table_rows >= tables:
            raise ValueError(f"sequences read the block tables {table_rows}; allowed: 0 to {tables - 1}")
        if low.starts < 0 or tokens > width * size:
            raise ValueError(f"sequences of {starts + lengths} tokens; allowed: 1 to {width * size}, in {width} blocks")

    @cached_property
    def worked_out(self) -> dict[tuple[object, ...], Any]:
        """Return what kernels have worked out of the layout, by keys of their own, for the other layers of the call."""
        return {}

    @cached_property
    def read_by_layers(self) -> tuple[npt.NDArray[Any], ...]:
        """Return what a layer that is one call reads of the layout: of each row its block and its place there, the
        sequences' `layout`, block tables, tiles."""
        return (*self.blocks_and_offsets, self.layout.numpy(), self.block_tables, self.tiles)

    @cached_property
    def last_written_block(self) -> int:
        """Return the highest number of a block that keys and values go to."""
        return int(self.blocks_and_offsets[0].max(initial=0))

    @cached_property
    def last_slot(self) -> int:
        """Return the highest number of a slot that a sequence has its states in."""
        return int(self.table_rows.max(initial=0))

    @cached_property
    def work(self) -> AttentionWork:
        """Return what the programs of a GPU's attention compute, on the host."""
        return AttentionWork.of(self)

    @cached_property
    def on_device(self) -> DeviceLayout:
        """Return what a GPU's kernels read of this layout, on the device of ``positions``."""
        if self.device_layout is not None:
            return self.device_layout
        return DeviceLayout.of(self, self.work, self.positions.device)

    def as_sent(self, parts: Tensors) -> "ForwardContext":
        """Return the context whose layout, and ``positions``, are these `device_layout.layout_parts` on the device, and
        the rows of adapters too."""
        positions, layout = parts["positions"], DeviceLayout.from_parts(parts, self.work)
        adapters = None if self.adapters is None else self.adapters.on(positions.device)
        return replace(self, positions=positions, device_layout=layout, adapters=adapters)


class LayoutMask(torch.Tensor):
    """Stands for the attention mask of a bound decoder: masks nothing, carries the layout to the layers.

    Hugging Face hands it on as it is. As an argument of the layers it survives gradient checkpointing: the
    recomputation gets the same object, whatever call was made in between and in whichever thread it runs.
    """

    context: ForwardContext
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(context: ForwardContext, dimensions: int) -> "LayoutMask":
        """Make a mask of this layout; four dimensions tell Hugging Face that it is ready for attention."""
        plain = torch.zeros([1] * dimensions, dtype=torch.bool, device=context.positions.device)
        mask = plain.as_subclass(LayoutMask)
        mask.context = context
        return mask

    def detach(self) -> "LayoutMask":
        """Return itself: reentrant checkpointing detaches its arguments."""
        return self

    def contiguous(self, *args: Any, **kwargs: Any) -> "LayoutMask":
        """Return itself."""
        return self

    def __eq__(self, other: object) -> torch.Tensor:  # type: ignore[override]
        """Return what has no token, on the host: Hugging Face asks recurrent models whether all of a mask is 1, and a
        CUDA graph can not be recorded while the answer is fetched from the device."""
        return torch.tensor([False], device="cpu")

    __hash__ = torch.Tensor.__hash__

    def __getitem__(self, index: Any) -> "LayoutMask":
        """Return itself: Hugging Face cuts a two-dimensional mask to the tokens of the call."""
        return self


def layout_of(mask: torch.Tensor | None) -> ForwardContext:
    """Return the layout that a layer's mask carries, else the installed one.

    Raises:
        ValueError: neither exists.
    """
    context = mask.context if isinstance(mask, LayoutMask) else installed_context()
    if context is None:
        raise ValueError(
            "this layer's mask carries no layout: a bound layer runs only inside the model's forward (and "
            "under gradient checkpointing this version of transformers drops the mask)"
        )
    return context


def recurrent_layout_of(mask: torch.Tensor | None) -> ForwardContext:
    """Return the layout of a layer with states, as `layout_of` does.

    Raises:
        ValueError: none exists, or rows continue a sequence, and the layout names no memory of states.
    """
    context = layout_of(mask)
    if context.states is None and (context.pages is not None or bool(context.starts.any())):
        raise ValueError("a hybrid model needs the memory of its recurrent layers: ForwardContext(states=...)")
    return context


_installed: ContextVar[ForwardContext | None] = ContextVar("samebit_forward_context", default=None)


def installed_context() -> ForwardContext | None:
    """Return the context installed around the running code, if any."""
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
    """Build the layout of a trainer's call on ``input_ids`` of this shape.

    Args:
        shape: ``(B, T)``.
        attention_mask: ``[B, T]``, above 0 for tokens, else 0; each row one run of tokens, padded left or right.
        position_ids: ``[B, T]`` or ``[1, T]``. A new sequence starts wherever they do not go up by one
            (packed batches), and it starts at 0. Without them positions count from 0 at each row's first token.
        device: where the model computes.

    Raises:
        ValueError: shapes that do not match, a mask with holes or with numbers below 0, a sequence that does not start
            at position 0.
        TypeError: positions that are no integers, a mask that is no tensor, tensors without values.
    """
    valid = _valid_tokens(shape, attention_mask)
    positions = _positions(shape, valid, position_ids)
    first = _first_tokens(valid, positions)
    if position_ids is None and attention_mask is not None and bool((first.sum(1) > 1).any()):
        raise ValueError("attention_mask must mark one run of tokens a row; it has holes")
    row_start = np.flatnonzero(first.reshape(-1)).astype(np.int32)
    if bool(positions.reshape(-1)[row_start].any()):
        raise ValueError(
            "position_ids: every sequence must start at position 0 at its first token (with left padding, pass "
            "attention_mask alone, or attention_mask.cumsum(-1) - 1), as it does in the rollout"
        )
    sequence_of_token = (np.cumsum(first.reshape(-1)) - 1)[valid.reshape(-1)]
    lengths = np.bincount(sequence_of_token, minlength=len(row_start)).astype(np.int32)
    return ForwardContext(
        positions=torch.from_numpy(np.ascontiguousarray(positions.reshape(-1), dtype=np.int64)).to(device),
        row_start=row_start,
        lengths=lengths,
        starts=np.zeros(len(row_start), np.int32),
        table_rows=np.arange(len(row_start), dtype=np.int32),
        block_tables=_consecutive_blocks(lengths),
        block_size=TRAINING_BLOCK,
    )


def _positions(
    shape: tuple[int, int], valid: npt.NDArray[np.bool_], given: torch.Tensor | None
) -> npt.NDArray[np.int64]:
    """Return the position of each token, counted within its row where none are given; 0 for padding."""
    if given is None:
        return np.where(valid, np.cumsum(valid, axis=1) - 1, 0)
    _check_positions(given, shape)
    return np.where(valid, np.broadcast_to(given.detach().cpu().long().numpy(), shape), 0)


def _first_tokens(valid: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Tell which tokens begin a sequence: those whose position is not the one after that of the token before."""
    first: npt.NDArray[np.bool_] = valid.copy()
    follows = valid[:, 1:] & valid[:, :-1]
    first[:, 1:] &= ~(follows & (positions[:, 1:] == positions[:, :-1] + 1))
    return first


def _check_positions(given: object, shape: tuple[int, int]) -> None:
    allowed = f"a tensor of integers of the shape {list(shape)} or {[1, shape[1]]}"
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"position_ids must be {allowed}, got {type(given).__name__}")
    if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype is torch.bool:
        raise TypeError(f"position_ids must be {allowed}, got {given.dtype}")
    check_readable("position_ids", given)
    if tuple(given.shape) not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids must be {allowed}, got the shape {list(given.shape)}")


def _valid_tokens(shape: tuple[int, int], attention_mask: torch.Tensor | None) -> npt.NDArray[np.bool_]:
    if attention_mask is None:
        return np.ones(shape, np.bool_)
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(
            f"attention_mask must be a tensor of the shape of input_ids, got {type(attention_mask).__name__}"
        )
    if tuple(attention_mask.shape) != tuple(shape):
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(shape)}, got {tuple(attention_mask.shape)}"
        )
    check_readable("attention_mask", attention_mask)
    if attention_mask.dtype.is_complex:
        raise TypeError(f"attention_mask must be of real numbers, got {attention_mask.dtype}")
    given = attention_mask.detach().cpu()
    if given.dtype.is_signed and not bool((given >= 0).all()):
        raise ValueError(
            "attention_mask must be above 0 for tokens and 0 for padding, got NaN or numbers below 0 (a mask that is "
            "added to scores?)"
        )
    mask: npt.NDArray[np.bool_] = (given != 0).numpy()
    return mask


def _consecutive_blocks(lengths: Ints) -> Ints:
    """Make ``[S, W]`` block tables in which each sequence owns the next blocks, from block 1 on."""
    counts = ceil_div(lengths, TRAINING_BLOCK)
    before = np.cumsum(counts) - counts + 1
    columns = np.arange(int(counts.max(initial=0)))
    return np.where(columns[None, :] < counts[:, None], before[:, None] + columns[None, :], 0).astype(np.int32)
