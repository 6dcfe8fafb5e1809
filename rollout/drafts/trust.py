"""Know how far a draft model is trusted with a sequence: how much it is asked for next, by how its guesses fared.

Invariant: where hardly a guess is right, ever fewer are asked for. Of n tokens, so many of them, the model is asked
about log2(n) times, each time for one.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_REST = 64
"""The most tokens that a sequence goes on by itself before the model is asked again."""

_PATIENCE = 2
"""Wrong guesses one behind the other that are chance, with a model that is often right."""


@dataclass(slots=True)
class Trust:
    """Says how many tokens are asked for. limit: the most. most: by what is known now; `resting_until`: not before the
    sequence has so many tokens. wrong: guesses one behind the other of which the first token was wrong."""

    limit: int
    most: int
    resting_until: int = 0
    wrong: int = 0

    @classmethod
    def begin(cls, limit: int) -> Trust:
        """Return the trust in a model that has not guessed yet."""
        return cls(limit, most=limit)

    def asked(self, num_tokens: int) -> int:
        """Return how many tokens to ask for behind so many; 0 for none."""
        return 0 if num_tokens < self.resting_until else self.most

    def learn(self, right: int, made: int, num_tokens: int) -> None:
        """Take note of how many of the tokens that were guessed last were right, when the sequence has so many."""
        if right:
            self.wrong = 0
            self.most = min(self.limit, 2 * self.most if right == made else right + 1)
            return
        self.wrong += 1
        self.most = max(1, self.most // 2)
        if self.wrong > _PATIENCE:
            self.resting_until = num_tokens + min(1 << (self.wrong - _PATIENCE), MOST_REST)
