"""Turn the worker's samples into the trainer's right-padded micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """Holds one sample of one prompt, with the worker's log-probabilities of its tokens.

    versions: of the weights that each token was sampled under; left out where none was sampled by a worker.
    """

    prompt_ids: list[int]
    sampled_ids: list[int]
    rollout_logprobs: list[float]
    advantage: float = 0.0
    versions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.sampled_ids)


@dataclass(frozen=True)
class Batch:
    """Holds rows padded to the longest; entry t of a [B, T-1] tensor is about token t+1."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T]
    sampled: Tensor  # [B, T-1] bool: token t+1 was sampled by the worker
    rollout_logprobs: Tensor  # [B, T-1] float32, 0 where not sampled
    versions: Tensor  # [B, T-1] int64: of the weights it was sampled under, 0 where not sampled
    advantages: Tensor  # [B]

    def on(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return Batch(**{name: part.to(device) for name, part in vars(self).items()})


def collate(rows: Sequence[Trajectory], pad_id: int) -> Batch:
    """Return one batch of these rows."""
    length = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    attention_mask = torch.zeros((len(rows), length), dtype=torch.long)
    sampled = torch.zeros((len(rows), length - 1), dtype=torch.bool)
    rollout_logprobs = torch.zeros((len(rows), length - 1))
    versions = torch.zeros((len(rows), length - 1), dtype=torch.long)
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor(row.prompt_ids + row.sampled_ids)
        attention_mask[i, : len(row)] = 1
        answer = slice(len(row.prompt_ids) - 1, len(row) - 1)
        sampled[i, answer] = True
        rollout_logprobs[i, answer] = torch.tensor(row.rollout_logprobs)
        if row.versions:
            versions[i, answer] = torch.tensor(row.versions)
    advantages = torch.tensor([row.advantage for row in rows])
    return Batch(input_ids, attention_mask, sampled, rollout_logprobs, versions, advantages)


def longest_first(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the rows in the order of `micro_batches`."""
    return sorted(rows, key=len, reverse=True)


def micro_batches(rows: Sequence[Trajectory], max_tokens: int, pad_id: int) -> Iterator[Batch]:
    """Yield all rows, longest first, in batches of at most `max_tokens` padded tokens (but at least one row)."""
    ordered = longest_first(rows)
    while ordered:
        count = max(1, max_tokens // len(ordered[0]))
        yield collate(ordered[:count], pad_id)
        ordered = ordered[count:]
