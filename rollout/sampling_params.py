"""Say what one request asks of the sampler, under vLLM's names: `SamplingParams`.

Invariants
----------
* An instance that exists is valid on its own; what depends on the model (vocabulary, length, tokenizer) is checked at
  submission, by `requests.limits.RequestLimits`.
* Its numbers are plain Python ones, whatever NumPy scalars it was given, and finite as the float32 that the sampler
  computes in.
* Penalties, biases, masks and top-k/p change which token is chosen, never the log-probability that is
  reported for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from samebit.rollout.checks import SMALLEST_NORMAL, as_bool, as_int, as_number, shown
from samebit.rollout.structured_outputs.params import StructuredOutputsParams

LOWEST_TEMPERATURE = 1e-4
MOST_SAMPLES = 1 << 14
LOWEST_PENALTY = SMALLEST_NORMAL
"""A penalty is at least this, so that its reciprocal is finite too: a smaller one would make an infinity of any
logit."""

MOST_PENALTY = 2.0
"""Presence and frequency penalties lie between this and its negative, as in OpenAI's API."""


_NEVER = -1e30
"""Is added to the logit of a token that is not to be sampled: its probability is 0 behind it, whatever the others'."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Says how to sample. The fields that are not obvious:

    n: samples, up to 16384.
    temperature: 0 chooses greedily (and reports log-probabilities at temperature 1).
    top_k: 0 or -1 for off.
    max_tokens: None for as many as the model's length allows.
    min_tokens: end-of-sequence and stop tokens are masked until this many tokens were sampled.
    stop: strings that end the sample; the text is cut before the match. Needs a tokenizer.
    seed: the same seed gives the same tokens in any batch; None gives each request its own numbers.
    logprobs: also report this many of the most likely tokens at each position.
    prompt_logprobs: report the log-probability of each prompt token, and as many alternatives.
    presence_penalty: taken from the logits of tokens that the sample has, from -2 to 2; frequency_penalty: as many
        times as it has them.
    logit_bias: token id -> value added to its logit before the choice.
    return_routed_experts: report which experts computed each token of prompt and output.
    adapter: the name of the adapter that computes it; None for the worker's own choice, "__base__" for none.
    structured_outputs: what the text is constrained to, a `StructuredOutputsParams`. Needs a tokenizer.
    cache_salt: requests with different salts (or one with and one without) share no cached tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    return_routed_experts: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._int("n", 1, MOST_SAMPLES)
        self._number("temperature", 0.0)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LOWEST_TEMPERATURE}, got {shown(self.temperature)}"
            )
        self._number("top_p", 0.0, 1.0, above=True)
        self._int("top_k", -1)
        self._number("min_p", 0.0, 1.0)
        if self.max_tokens is not None:
            self._int("max_tokens", 1)
        self._int("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {shown(self.min_tokens)}")
        self._bool("ignore_eos")
        self._bool("return_routed_experts")
        if self.seed is not None:
            self._int("seed", 0, 2**63 - 1)
        if self.logprobs is not None:
            self._int("logprobs", 0)
        if self.prompt_logprobs is not None:
            self._int("prompt_logprobs", 0)
        self._number("repetition_penalty", LOWEST_PENALTY)
        self._number("presence_penalty", -MOST_PENALTY, MOST_PENALTY)
        self._number("frequency_penalty", -MOST_PENALTY, MOST_PENALTY)
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and self.cache_salt):
            raise ValueError(f"cache_salt must be a non-empty string or None, got {shown(self.cache_salt)}")
        if self.adapter is not None and not (isinstance(self.adapter, str) and self.adapter):
            raise ValueError(f"adapter must be a non-empty string or None, got {shown(self.adapter)}")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                "structured_outputs must be StructuredOutputsParams or None, got " + shown(self.structured_outputs)
            )
        self._own_copies()

    @cached_property
    def filters(self) -> bool:
        """Return whether top-k, top-p or min-p rule tokens out: none that a greedy choice could be."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @cached_property
    def changes_logits(self) -> bool:
        """Return whether the logits are changed before each choice (``min_tokens`` aside)."""
        constrained = self.structured_outputs is not None
        return self.filters or self.penalizes or bool(self.logit_bias) or constrained

    @cached_property
    def penalizes(self) -> bool:
        """Return whether tokens that were seen get other logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def can_run_ahead(self) -> bool:
        """Return whether the next token but one can be drawn before anybody has read the next one."""
        return not self.depends_on_tokens and self.logprobs is None

    @cached_property
    def depends_on_tokens(self) -> bool:
        """Return whether a token's choice depends on those before it by more than its logits."""
        return self.penalizes or self.structured_outputs is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self.stop_token_ids is None else tuple(self.stop_token_ids)

    def ruling_out(self, tokens: Iterable[int]) -> SamplingParams:
        """Return the same, under which none of these tokens is sampled, whatever else was asked for them."""
        bias = dict.fromkeys(tokens, _NEVER)
        return replace(self, logit_bias={**(self.logit_bias or {}), **bias}) if bias else self

    def placed(self, seed: int, adapter: str | None) -> SamplingParams:
        """Return the same with a seed and an adapter that are known to be right; nothing is checked again."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        object.__setattr__(other, "adapter", adapter)
        return other

    def _own_copies(self) -> None:
        """Check the containers and keep copies, so that the caller's later changes do not reach in."""
        if self.stop is not None:
            _check_stop(self.stop)
            object.__setattr__(self, "stop", self.stop_strings)
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def _int(self, field: str, lowest: int, highest: int | None = None) -> None:
        given = self.__dict__[field]
        value = as_int(given)
        if value is None or value < lowest or (highest is not None and value > highest):
            span = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            raise ValueError(f"{field} must be an int {span}, got {shown(given)}")
        object.__setattr__(self, field, value)

    def _number(self, field: str, lowest: float, highest: float = math.inf, *, above: bool = False) -> None:
        given = self.__dict__[field]
        value = as_number(given)
        if value is None or not lowest <= value <= highest or (above and value == lowest):
            bound = "above" if above else "of at least"
            limit = " as a float32" if highest == math.inf else f" and at most {highest:g}"
            raise ValueError(f"{field} must be a finite number {bound} {lowest:g}{limit}, got {shown(given)}")
        object.__setattr__(self, field, value)

    def _bool(self, field: str) -> None:
        given = self.__dict__[field]
        value = as_bool(given)
        if value is None:
            raise ValueError(f"{field} must be True or False, got {shown(given)}")
        object.__setattr__(self, field, value)


def _check_stop(stop: object) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"stop must be a non-empty string or a list of them, got {shown(stop)}")


def _checked_ids(given: object) -> tuple[int, ...]:
    plain = given.tolist() if isinstance(given, np.ndarray) else given
    ids = [as_int(token) for token in plain] if isinstance(plain, list | tuple) else [None]
    if any(token is None or token < 0 for token in ids):
        raise ValueError(f"stop_token_ids must be a list of token ids, got {shown(given)}")
    return tuple(token for token in ids if token is not None)


def _checked_bias(given: object) -> dict[int, float]:
    if not isinstance(given, dict):
        raise ValueError(f"logit_bias must be a dict of token id to number, got {shown(given)}")
    checked: dict[int, float] = {}
    for key, value in given.items():
        token, bias = as_int(key), as_number(value)
        if token is None or token < 0:
            raise ValueError(f"logit_bias has the key {shown(key)}, which is not a token id")
        if bias is None:
            raise ValueError(
                f"logit_bias of token {shown(token)} must be a finite number as a float32, got {shown(value)}"
            )
        checked[token] = bias
    return checked
