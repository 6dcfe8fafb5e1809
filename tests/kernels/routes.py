"""List the ways through a rollout's memory that the tests of the kernels take, and the layouts of a training call."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samebit.kernels.layout.forward_context import ForwardContext, training_context

from ..campaign import CAMPAIGN

NextCount = Callable[[int, int], int]
"""Says how many tokens a sequence (the first number) computes next, after those it has (the second)."""

ROUTES: dict[str, NextCount] = {
    "whole": lambda sequence, done: 1000,
    "token by token": lambda sequence, done: 1,
    "chunks": lambda sequence, done: (1, 7, 64, 3, 17, 2)[(sequence + done) % 6],
}


def ways(block_sizes: Sequence[int], turn: int) -> list[tuple[int, str]]:
    """Return each block size with a route, in as many turns with each of them; or every pair in `make soak`."""
    names = list(ROUTES)
    return [
        (size, name)
        for row, size in enumerate(block_sizes)
        for column, name in enumerate(names)
        if CAMPAIGN or (row + turn) % len(names) == column
    ]


@dataclass(frozen=True)
class Step:
    """Says that `sequences` compute `counts` tokens each, after the `starts` they have: `rows` of all tokens."""

    sequences: list[int]
    counts: list[int]
    starts: list[int]
    rows: np.ndarray


def steps(lengths: tuple[int, ...], next_count: NextCount) -> Iterator[Step]:
    """Yield the steps of a batch that changes, until each sequence has its length."""
    offsets = np.cumsum((0, *lengths))
    done = [0] * len(lengths)
    while sum(done) < sum(lengths):
        active = [s for s in np.random.default_rng(sum(done)).permutation(len(lengths)) if done[s] < lengths[s]]
        counts = [min(next_count(s, done[s]), lengths[s] - done[s]) for s in active]
        rows = np.concatenate([offsets[s] + done[s] + np.arange(n) for s, n in zip(active, counts, strict=True)])
        yield Step(active, counts, [done[s] for s in active], rows)
        for s, n in zip(active, counts, strict=True):
            done[s] += n


def packed_context(lengths: tuple[int, ...]) -> ForwardContext:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return training_context((1, sum(lengths)), None, positions)


def left_padding(lengths: tuple[int, ...]) -> torch.Tensor:
    """Return an attention mask ``[sequences, longest + 3]``."""
    width = max(lengths) + 3
    return (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()


def padded(part: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return rows where the mask says, NaN elsewhere."""
    out = part.new_full((mask.numel(), *part.shape[1:]), torch.nan)
    out[mask.flatten().bool()] = part
    return out
