"""Run a bound model step by step on pages and states, as the rollout does, with no rollout around it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from samebit.kernels import logprobs_from_logits
from samebit.kernels.binding.binding import binding_of
from samebit.kernels.layout.forward_context import ForwardContext, use_context

from .layouts import Scores

NextCount = Callable[[int, int], int]
"""Says how many tokens a sequence (the first number) computes next, after those it has (the second)."""

ROUTES: dict[str, NextCount] = {
    "whole": lambda sequence, done: 1000,
    "token by token": lambda sequence, done: 1,
    "chunks": lambda sequence, done: (1, 7, 64, 3, 17, 2)[(sequence + done) % 6],
    "prefill, then decode": lambda sequence, done: 5 + 7 * sequence if done == 0 else 1,
}


class Steps:
    """Holds the memory of a batch of sequences, filled with NaN, and runs the steps on it."""

    def __init__(self, model: PreTrainedModel, num_sequences: int, block_size: int = 64, max_len: int = 320) -> None:
        binding = binding_of(model)
        dtype = model.get_parameter("lm_head.weight").dtype
        width = -(-max_len // block_size)
        blocks = np.random.default_rng(0).permutation(num_sequences * width) + 1
        self.model = model
        self.block_size = block_size
        self.tables = np.zeros((num_sequences + 1, width), np.int32)
        self.tables[1:] = blocks.reshape(num_sequences, width)
        self.pages = binding.kv_layout.allocate(len(blocks), block_size, dtype)
        self.states = binding.state_layout.allocate(num_sequences + 1, dtype, num_checkpoints=4)
        for tensor in self.pages:
            tensor.fill_(torch.nan)
        for part in (*self.states.layers, *self.states.checkpoints):
            for tensor in vars(part).values():
                tensor.fill_(torch.nan)

    @torch.no_grad()
    def run(
        self, pieces: Sequence[tuple[int, int, list[int]]], padding: int = 0, captures: Sequence[Sequence[int]] = ()
    ) -> list[torch.Tensor]:
        """Return the logits of each piece: (sequence, tokens before it, its tokens)."""
        counts = np.array([len(tokens) for _, _, tokens in pieces])
        starts = np.array([start for _, start, _ in pieces], np.int32)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        context = ForwardContext(
            positions=torch.from_numpy(np.concatenate([positions, np.zeros(padding, np.int64)])),
            row_start=(ends - counts).astype(np.int32),
            lengths=counts.astype(np.int32),
            starts=starts,
            table_rows=np.array([sequence + 1 for sequence, _, _ in pieces], np.int32),
            block_tables=self.tables,
            block_size=self.block_size,
            pages=self.pages,
            states=self.states,
            captures=np.array(captures, np.int32).reshape(-1, 3),
        )
        ids = [token for _, _, tokens in pieces for token in tokens] + [0] * padding
        with use_context(context):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        return list(logits[: int(ends[-1])].split(counts.tolist()))


def stepwise(
    model: PreTrainedModel, sequences: Sequence[list[int]], next_count: NextCount, temperature: float, block_size: int
) -> Scores:
    """Score each sequence's tokens from the second on, computed in steps of a changing batch."""
    steps = Steps(model, len(sequences), block_size)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(have < len(sequence) for have, sequence in zip(done, sequences, strict=True)):
        waiting = [s for s, sequence in enumerate(sequences) if done[s] < len(sequence)]
        active = np.random.default_rng(sum(done)).permutation(waiting).tolist()
        pieces = [(s, done[s], sequences[s][done[s] : done[s] + next_count(s, done[s])]) for s in active]
        for (s, _, tokens), rows in zip(pieces, steps.run(pieces, padding=sum(done) % 3), strict=True):
            logits[s].append(rows)
            done[s] += len(tokens)
    return [
        logprobs_from_logits(torch.cat(rows)[:-1], torch.tensor(sequence[1:], dtype=torch.int64), temperature)
        for rows, sequence in zip(logits, sequences, strict=True)
    ]
