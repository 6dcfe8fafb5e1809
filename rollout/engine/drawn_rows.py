"""Hold what was drawn in a step as the engine reads it."""

from __future__ import annotations

from samebit.rollout.engine.step_plan import StepResult


class DrawnRows:
    """Holds a step's result as Python lists, which are read one row at a time."""

    __slots__ = ("drawn", "finite", "logprobs", "raw_logprobs", "tokens", "top")

    def __init__(self, result: StepResult) -> None:
        self.tokens: list[int] = result.token_ids.tolist()
        self.logprobs: list[float] = result.logprobs.tolist()
        self.raw_logprobs: list[float] = result.raw_logprobs.tolist()
        self.finite: list[bool] = result.finite.tolist()
        self.drawn: list[bool] = (result.finite & (result.token_ids >= 0)).tolist()
        self.top = result.top_logprobs
