"""Define the reward that verl's reward workers load: 1 if the number after the working is right, else 0."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Score a completion, `solution_str`, which ended by itself or was cut off at the longest length."""
    return float(solution_str.removesuffix("<eos>").rpartition("]")[2] == ground_truth)
