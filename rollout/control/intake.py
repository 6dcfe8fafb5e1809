"""Check what a caller submits, and make requests of it.

Invariant: all prompts of a call are checked before one request exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

from samebit.rollout.adapters.registry import AdapterRegistry
from samebit.rollout.cache.contract import Cache
from samebit.rollout.checks import shown
from samebit.rollout.errors import RequestError
from samebit.rollout.requests.limits import RequestLimits
from samebit.rollout.requests.prompt_with_images import GivenPrompt
from samebit.rollout.requests.request import Request
from samebit.rollout.requests.tokenizer import Tokenizer
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.grammars import Grammar, Grammars

MakeRequests = Callable[[int, Callable[[], str]], list[Request]]
"""Makes requests, given the ordinal of the first and what names one that the caller has not named."""


class Intake:
    """Checks the prompts and parameters of one worker, and makes its requests."""

    def __init__(
        self,
        limits: RequestLimits,
        cache: Cache,
        adapters: AdapterRegistry,
        eos_token_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._limits = limits
        self._cache = cache
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, limits.vocab_size, eos_token_ids)

    def checked(
        self, prompts: Sequence[GivenPrompt], params: list[SamplingParams], request_ids: list[str | None]
    ) -> MakeRequests:
        """Check prompts and parameters; return a function that makes the requests.

        Raises:
            RequestError: a prompt or its parameters can not be taken; says which, where there are several.
        """
        good: list[partial[Request]] = []
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                good.append(self._check(prompt, wanted))
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {index}: {error}") from error

        def make(first_ordinal: int, new_id: Callable[[], str]) -> list[Request]:
            return [
                one(request_id or new_id(), ordinal=first_ordinal + index)
                for index, (one, request_id) in enumerate(zip(good, request_ids, strict=True))
            ]

        return make

    def preparation(self, params: SamplingParams) -> Callable[[], object] | None:
        """Return what compiles the grammar of requests with these parameters, and gives what keeps it compiled while it
        is held; None where there is nothing to do."""
        asked = params.structured_outputs
        return None if asked is None or self._grammars.has(asked) else partial(self._grammar, params)

    def _check(self, prompt: GivenPrompt, params: SamplingParams) -> partial[Request]:
        """Check one prompt; return a function that makes its request, given an id and an ordinal."""
        ids, images = self._limits.check_given(prompt)
        max_new_tokens = self._limits.check_params(params, len(ids))
        adapter = self._adapters.resolve(params.adapter)
        return partial(
            Request,
            prompt=ids,
            params=params,
            max_new_tokens=max_new_tokens,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self._tokenizer,
            prompt_digests=self._cache.hash_prompt(
                ids, params.cache_salt, 0 if adapter is None else adapter.number, images
            ),
            adapter=adapter,
            grammar=self._grammar(params),
            images=images,
        )

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        asked = params.structured_outputs
        if asked is None:
            return None
        return self._grammars.compiled(asked, ignore_eos=params.ignore_eos, stop_ids=params.stop_ids)


def as_request_ids(given: object) -> list[str]:
    """Return one request's id, or those of several, as a list.

    Raises:
        RequestError: something else.
    """
    ids = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(request_id, str) for request_id in ids):
        raise RequestError(f"request ids are strings, got {shown(ids)}")
    return cast(list[str], ids)


def paired(
    prompts: Sequence[GivenPrompt], params: SamplingParams | list[SamplingParams] | None
) -> tuple[Sequence[GivenPrompt], list[SamplingParams], list[str | None]]:
    """Return the prompts, a `SamplingParams` for each, and None as the id of each."""
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts must be a list of lists of token ids, or of PromptWithImages, got {type(prompts).__name__}"
        )
    if isinstance(params, list | tuple):
        each = list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(each)} params")
    else:
        each = [SamplingParams() if params is None else params] * len(prompts)
    return prompts, each, [None] * len(prompts)
