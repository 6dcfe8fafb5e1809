"""Count what an engine does."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EndedRequests:
    """Counts requests by how they ended."""

    finished: int = 0
    aborted: int = 0
    failed: int = 0


@dataclass
class EngineCounters:
    """Counts since the engine was built.

    steps_ahead: those of the steps that were launched before the tokens of the one before were read.
    void_tokens: computed in such a step for a sequence that had ended, or over a change of weights that was not told.
    untold_updates: such changes.
    first_tokens, first_token_seconds: requests that have their first token, and how long they waited for it in all.
    """

    steps: int = 0
    steps_ahead: int = 0
    void_tokens: int = 0
    untold_updates: int = 0
    prefill_tokens_computed: int = 0
    decode_tokens_computed: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    step_seconds: float = 0.0
    runner_seconds: float = 0.0
    requests: EndedRequests = field(default_factory=EndedRequests)

    def named(self) -> dict[str, float]:
        """Return each number with its name."""
        requests = {f"requests_{how}": count for how, count in vars(self.requests).items()}
        return {**{name: value for name, value in vars(self).items() if name != "requests"}, **requests}
