"""Compute the same few sequences by every route: as a trainer does, alone, and in steps on pages and states.

Invariant: each route returns one row for each token, sequence after sequence, whatever calls it made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from samebit.kernels.binding.binding import Binding, binding_of
from samebit.kernels.layout.forward_context import ForwardContext, training_context
from samebit.rollout.runner.logits import Forward, logits_of
from samebit.rollout.runner.step_inputs import StepInputs

LENGTHS = (1, 7, 66, 133)
"""Tokens of the sequences: shorter than a chunk of keys or states, and longer than two."""

MOST_ROWS = 50
"""Prompt tokens of a step: prompts are computed in pieces of several sizes."""

DECODED = 5
"""Tokens of a sequence that are computed one a step, all sequences together."""


@dataclass(frozen=True, eq=False)
class Routes:
    """Holds a bound model and token sequences of it.

    sequences: ids, on the host. block_size: of the pages in the steps.
    """

    model: nn.Module
    sequences: Sequence[torch.Tensor]
    block_size: int

    @staticmethod
    def of(model: nn.Module, block_size: int, max_model_len: int) -> Routes:
        """Draw sequences that the model has room for."""
        draws = torch.Generator().manual_seed(0)
        vocab = binding_of(model).vocab_size
        lengths = sorted({min(length, max_model_len) for length in LENGTHS})
        return Routes(model, [torch.randint(0, vocab, (n,), generator=draws) for n in lengths], block_size)

    def as_trainer(self) -> torch.Tensor:
        """Return the logits ``[T, V]`` of one packed call."""
        return self._train(self.sequences)

    def alone(self) -> torch.Tensor:
        """Return the logits of a call for each sequence."""
        return torch.cat([self._train([sequence]) for sequence in self.sequences])

    def in_steps(self, forward: Forward) -> torch.Tensor:
        """Return the logits of steps: prompts in pieces, among them rows of the others; then decodes, all together."""
        rows: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        steps = _Steps(self.model, forward, self.sequences, self.block_size)
        for pieces in _pieces([len(sequence) for sequence in self.sequences]):
            for (sequence, _, _), found in zip(pieces, steps.run(pieces), strict=True):
                rows[sequence].append(found.clone())
        forward.forget_memory()
        return torch.cat([torch.cat(parts) for parts in rows])

    def _train(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        device = next(self.model.parameters()).device
        ids = torch.cat(list(sequences)).to(device)
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        context = training_context((1, len(ids)), None, positions[None], device)
        return logits_of(self.model, ids, torch.arange(len(ids), device=device), context)


_Piece = tuple[int, int, int]
"""Sequence, tokens before it, tokens."""


def _pieces(lengths: Sequence[int]) -> list[list[_Piece]]:
    """Return the steps that compute sequences of these lengths."""
    prompts = [max(1, length - DECODED) for length in lengths]
    done = [0] * len(lengths)
    steps: list[list[_Piece]] = []
    while done != list(lengths):
        room, step = MOST_ROWS, []
        for sequence, length in enumerate(lengths):
            ahead = prompts[sequence] - done[sequence]
            decodes = done[sequence] < length and done == [max(*pair) for pair in zip(prompts, done, strict=True)]
            count = min(room, ahead) if ahead > 0 else int(decodes)
            if count:
                step.append((sequence, done[sequence], count))
                room -= count
        for sequence, _, count in step:
            done[sequence] += count
        steps.append(step)
    return steps


class _Steps:
    """Holds pages and states of the sequences, all anew."""

    def __init__(self, model: nn.Module, forward: Forward, sequences: Sequence[torch.Tensor], block_size: int) -> None:
        binding: Binding = binding_of(model)
        head = model.get_parameter("lm_head.weight")
        width = -(-max(map(len, sequences)) // block_size)
        blocks = np.random.default_rng(0).permutation(len(sequences) * width) + 1
        self._model, self._forward = model, forward
        self._sequences, self._block_size = sequences, block_size
        self._tables = np.zeros((len(sequences) + 1, width), np.int32)
        self._tables[1:] = blocks.reshape(-1, width)
        self._pages = binding.kv_layout.allocate(len(blocks), block_size, head.dtype, head.device)
        self._states = None
        if binding.state_layout is not None:
            self._states = binding.state_layout.allocate(len(sequences) + 1, head.dtype, 0, head.device)

    def run(self, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """Return the logits of each piece's rows, valid until the next step."""
        numbers, starts, counts = (np.array(part, np.int32) for part in zip(*pieces, strict=True))
        ends = np.cumsum(counts)
        rows = np.arange(int(ends[-1]))
        context = ForwardContext(
            positions=torch.from_numpy(rows + np.repeat(starts - (ends - counts), counts)),
            row_start=(ends - counts).astype(np.int32),
            lengths=counts,
            starts=starts,
            table_rows=numbers + 1,
            block_tables=self._tables,
            block_size=self._block_size,
            pages=self._pages,
            states=self._states,
        )
        ids = [self._sequences[sequence][start : start + count] for sequence, start, count in pieces]
        inputs = StepInputs.undrawn(context, torch.cat(ids).numpy(), rows)
        logits = self._forward(self._model, inputs, None).logits
        return list(logits.split(counts.tolist()))
