"""Compare bit by bit, for `samebit check`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebit.rollout.outputs import RequestOutput

NAN_DIFFERENCE = 3.4e38
"""Stands in a report for a difference that is not a number, which JSON can not hold."""

Difference = tuple[int, int, float]
"""Counts tokens, how many differ in any bit or are not numbers, and the largest difference."""


@dataclass(frozen=True)
class Row:
    """Holds one line of the report: how many tokens were compared under a condition, and how many differ.

    promised: that none does; False where the row tells what an alternative would cost.
    """

    name: str
    tokens: int
    differing: int
    max_abs_diff: float
    promised: bool = True

    def as_json(self) -> dict[str, object]:
        """Return the row as `samebit check --json` prints it; `promised` appears only where it is false."""
        fields = dict(vars(self))
        return {name: value for name, value in fields.items() if name != "promised" or not value}


def reported(outputs: list[RequestOutput]) -> list[torch.Tensor]:
    """Return the log-probabilities of each sample, at the sampling temperature."""
    return [torch.tensor(sample.logprobs) for out in outputs for sample in out.samples]


def compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> Difference:
    a, b = torch.cat(found), torch.cat(expected)
    differing = (a.view(torch.int32) != b.view(torch.int32)) | a.isnan() | b.isnan()
    largest = (a - b).abs().nan_to_num(nan=NAN_DIFFERENCE, posinf=NAN_DIFFERENCE).max() if len(a) else 0.0
    return len(a), int(differing.sum()), float(largest)


def compare_samples(outputs: list[RequestOutput], first: list[RequestOutput]) -> Difference:
    """Compare two runs of the same requests; different tokens are a difference too."""
    tokens, differing, largest = compare(reported(outputs), reported(first))
    ids = [[token for out in run for sample in out.samples for token in sample.token_ids] for run in (outputs, first)]
    return tokens, max(differing, sum(a != b for a, b in zip(*ids, strict=True))), largest


def worst(a: Difference, b: Difference) -> Difference:
    return a[0] + b[0], a[1] + b[1], max(a[2], b[2])
