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
class FirstTokens:
    """Counts requests that have their first token, and how long they waited for it in all."""

    first_tokens: int = 0
    first_token_seconds: float = 0.0


@dataclass
class DraftTokens:
    """Counts tokens that were guessed ahead, and those of them that were right."""

    draft_tokens: int = 0
    draft_tokens_accepted: int = 0


@dataclass
class EngineCounters:
    """Counts since the engine was built.

    steps_ahead: those of the steps that were launched before the tokens of the one before were read.
    void_tokens: computed in such a step for a sequence that had ended, or over a change of weights that was not told.
    untold_updates: such changes.
    """

    steps: int = 0
    steps_ahead: int = 0
    void_tokens: int = 0
    untold_updates: int = 0
    prefill_tokens_computed: int = 0
    decode_tokens_computed: int = 0
    output_tokens: int = 0
    step_seconds: float = 0.0
    runner_seconds: float = 0.0
    first: FirstTokens = field(default_factory=FirstTokens)
    requests: EndedRequests = field(default_factory=EndedRequests)
    drafts: DraftTokens = field(default_factory=DraftTokens)

    def named(self) -> dict[str, float]:
        """Return each number with its name."""
        requests = {f"requests_{how}": count for how, count in vars(self.requests).items()}
        own = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        return {**own, **vars(self.first), **vars(self.drafts), **requests}
