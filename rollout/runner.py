"""Computes a step: token rows in, sampled tokens and their log-probabilities out.

Invariants
----------
* The rows of a step are the planned tokens, sequence after sequence, then padding up to a whole number of
  GEMM row tiles; padding writes to the null block.
* A token's random number depends on its seed (or on the engine's seed and the request's ordinal), its
  sample and its absolute position; never on the batch.
* What is reported comes from the unprocessed logits through `logprobs_from_logits`, the trainer's formula.
* Sequences are read, never written.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from samebit.kernels import logprobs_from_logits
from samebit.kernels.binding import binding_of
from samebit.kernels.context import ForwardContext, use_context
from samebit.kernels.linear import padded_rows, row_tile
from samebit.kernels.states import StateMemory
from samebit.rollout.cache.states import StateCache, StateMoves
from samebit.rollout.config import RolloutConfig
from samebit.rollout.sampler import Sampler, most_likely
from samebit.rollout.step import PromptLogprobs, ScheduledSequence, StepPlan, StepResult

Ints = npt.NDArray[np.int32]


class ModelRunner:
    """The bound model with its KV pages and its sampler. See `samebit.rollout.step.Runner`."""

    def __init__(self, model: nn.Module, config: RolloutConfig) -> None:
        binding = binding_of(model)
        self.model = model
        self.vocab_size = binding.vocab_size
        self.layout = binding.kv_layout
        head = model.get_parameter("lm_head.weight")
        self.dtype, self.device = head.dtype, head.device
        if config.block_size is None:
            raise ValueError("the block size is not decided yet: see RolloutConfig.with_block_size()")
        self.block_size = config.block_size
        self.state_layout = binding.state_layout
        self.held_slots = range(config.max_num_seqs, config.max_num_seqs + config.num_held_states)
        self.num_checkpoints = config.num_checkpoints(self.bytes_per_checkpoint())
        self.states: StateMemory | None = None
        self.row_tile = row_tile(self.dtype) if config.exact else 1
        self.sampler = Sampler(config.seed, config.exact)
        self.pages: tuple[torch.Tensor, ...] | None = None
        self.forward_seconds = 0.0
        self.sampler_seconds = 0.0

    def bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers."""
        return self.layout.bytes_per_block(self.block_size, self.dtype)

    def bytes_per_slot(self) -> int:
        """Bytes of a running sequence's state over all Mamba layers; 0 without."""
        return 0 if self.state_layout is None else self.state_layout.bytes_per_slot(self.dtype)

    def bytes_per_checkpoint(self) -> int:
        """Bytes of a cached state over all Mamba layers; 0 without."""
        return 0 if self.state_layout is None else self.state_layout.bytes_per_checkpoint(self.dtype)

    def state_cache(self) -> StateCache | None:
        """The bookkeeping of the checkpoints; None without Mamba layers."""
        if self.state_layout is None:
            return None
        return StateCache(self.num_checkpoints, self.block_size, self.held_slots)

    def allocate_cache(self, num_blocks: int) -> None:
        """Zeroed pages for blocks 0 .. num_blocks, block 0 being the null block, and zeroed states."""
        self.pages = self.layout.allocate(num_blocks, self.block_size, self.dtype, self.device)
        if self.state_layout is not None:
            self.states = self.state_layout.allocate(
                self.held_slots.stop, self.dtype, self.num_checkpoints, self.device
            )

    def release_cache(self) -> None:
        """Give pages and states back."""
        self.pages = self.states = None

    def run(self, plan: StepPlan, block_tables: Ints) -> StepResult:
        """Compute the plan; row ``sequence.slot`` of ``block_tables`` lists a sequence's blocks."""
        context, input_ids, ends = self._batch(plan.items, block_tables)
        sampled = [item for item in plan.items if item.samples]
        rows = [int(end) - 1 for item, end in zip(plan.items, ends, strict=True) if item.samples]
        pieces = _prompt_pieces(plan.items, ends)
        keep = rows + [row for piece in pieces for row in piece.rows]
        began = time.perf_counter()
        self._copy_blocks(plan.copies)
        self._move_states(plan.moves)
        logits = self._forward(context, input_ids, keep)
        forwarded = time.perf_counter()
        sequences = [sequence for item in sampled for sequence in (item.sequence, *item.forks)]
        result = self.sampler.sample(_with_forks(logits[: len(rows)], sampled), sequences)
        result.prompt_logprobs = _prompt_logprobs(logits[len(rows) :], pieces)
        self.forward_seconds += forwarded - began
        self.sampler_seconds += time.perf_counter() - forwarded
        return result

    @torch.no_grad()
    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies or self.pages is None:
            return
        sources, targets = torch.tensor(copies, device=self.device).unbind(1)
        for pages in self.pages:
            pages[targets] = pages[sources]

    @torch.no_grad()
    def _move_states(self, moves: StateMoves) -> None:
        if self.states is None:
            return
        for slot, checkpoint in moves.saves:
            self.states.take_checkpoint(slot, checkpoint)
        for source, slot in moves.holds:
            self.states.copy_slot(source, slot)
        for checkpoint, slot in moves.restores:
            self.states.restore_checkpoint(checkpoint, slot)
        for source, slot in moves.forks:
            self.states.copy_slot(source, slot)

    @torch.no_grad()
    def _forward(self, context: ForwardContext, input_ids: torch.Tensor, keep: list[int]) -> torch.Tensor:
        """Float32 logits ``[len(keep), V]`` of these rows."""
        with use_context(context):
            logits: torch.Tensor = self.model(
                input_ids=input_ids, logits_to_keep=torch.tensor(keep, dtype=torch.int64, device=self.device)
            ).logits[0]
        return logits.float()  # already float32 but for exact=False

    def _batch(
        self, items: list[ScheduledSequence], block_tables: Ints
    ) -> tuple[ForwardContext, torch.Tensor, npt.NDArray[np.int64]]:
        """The step's layout, its ``[1, T]`` token ids, and the row after each item's last."""
        lengths = np.array([item.length for item in items], np.int32)
        starts = np.array([item.start for item in items], np.int32)
        slots = np.array([item.sequence.slot for item in items], np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        total = padded_rows(int(ends[-1]), self.row_tile)
        rows = torch.zeros(2, total, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        ids, positions = rows.numpy()
        np.concatenate(
            [item.sequence.token_ids[item.start : item.start + item.length] for item in items], out=ids[: ends[-1]]
        )
        positions[: ends[-1]] = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        sent = rows.to(self.device, non_blocking=True)
        context = ForwardContext(
            positions=sent[1],
            row_start=(ends - lengths).astype(np.int32),
            lengths=lengths,
            starts=starts,
            table_rows=slots,
            block_tables=block_tables,
            block_size=self.block_size,
            pages=self.pages,
            write_from=np.array([item.sequence.write_from for item in items], np.int32),
            states=self.states,
            captures=_captures(items),
        )
        return context, sent[:1], ends


def _captures(items: list[ScheduledSequence]) -> Ints:
    """``[M, 3]`` (item, position, checkpoint)."""
    rows = [(number, *capture) for number, item in enumerate(items) for capture in item.captures]
    return np.array(rows, np.int32).reshape(-1, 3)


def _with_forks(logits: torch.Tensor, items: list[ScheduledSequence]) -> torch.Tensor:
    """``[R, V]``: the row of each item, and again for each of its forks."""
    if not any(item.forks for item in items):
        return logits
    repeats = torch.tensor([1 + len(item.forks) for item in items])
    return logits.repeat_interleave(repeats.to(logits.device), dim=0)


class _PromptPiece:
    """The rows of one item that score prompt tokens from position ``start`` on."""

    def __init__(self, item: ScheduledSequence, end: int) -> None:
        sequence = item.sequence
        count = min(item.start + item.length, sequence.num_prompt_tokens - 1) - item.start
        first = end - item.length
        self.sequence = sequence
        self.start = item.start + 1
        self.rows = range(first, first + max(count, 0))
        self.token_ids = sequence.token_ids[self.start : self.start + len(self.rows)]


def _prompt_pieces(items: list[ScheduledSequence], ends: npt.NDArray[np.int64]) -> list[_PromptPiece]:
    pieces = [
        _PromptPiece(item, int(end))
        for item, end in zip(items, ends, strict=True)
        if item.sequence.prompt_logprobs_wanted
    ]
    return [piece for piece in pieces if piece.rows]


def _prompt_logprobs(logits: torch.Tensor, pieces: list[_PromptPiece]) -> list[PromptLogprobs]:
    """Scores of prompt tokens at temperature 1, and the most likely tokens where they are wanted."""
    results: list[PromptLogprobs] = []
    done = 0
    for piece in pieces:
        rows = logits[done : done + len(piece.rows)]
        done += len(piece.rows)
        tokens = torch.from_numpy(piece.token_ids).to(rows.device)
        scores = logprobs_from_logits(rows, tokens)
        count = piece.sequence.params.prompt_logprobs
        top = most_likely(rows, tokens, torch.ones(len(rows), device=rows.device), count) if count else None
        results.append(PromptLogprobs(piece.sequence, piece.start, scores.cpu().numpy(), top))
    return results
