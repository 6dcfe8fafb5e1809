"""Say what the recipes need of a sampler: every `Worker` has it, and engines of others can."""

from collections.abc import Sequence
from typing import Protocol

from samebit.rollout import SamplingParams


class Completion(Protocol):
    """Holds one sample; `SampleOutput` says what each of these is."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def weight_versions(self) -> list[tuple[int, int, int]]: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def text(self) -> str | None: ...


class Group(Protocol):
    """Holds the samples of one prompt."""

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def samples(self) -> Sequence[Completion]: ...


class Sampler(Protocol):
    """Samples `params.n` completions of each prompt."""

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> Sequence[Group]: ...
