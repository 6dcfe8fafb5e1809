"""Translate what a request asks of the sampler into `SamplingParams`, within the server's caps."""

from __future__ import annotations

from typing import Any

from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.openai.forced_calls import forced_calls
from samebit.rollout.integrations.http.openai.requests import ChatRequest, CompletionRequest, ResponseFormat, Sampling
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.rollout.sampling_params import SamplingParams
from samebit.rollout.structured_outputs.params import StructuredOutputsParams

_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
MOST_STOP_CHARACTERS = 1024


def of_completion(asked: CompletionRequest, settings: ServeSettings, adapter: str | None) -> SamplingParams:
    """Return the parameters of a completion. Its log-probabilities of the prompt are asked for by `echo`."""
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(400, "max_tokens=0 samples nothing; it goes with echo, to score a prompt", param="max_tokens")
    check_cap("logprobs", asked.logprobs, settings.max_logprobs)
    return params_of(
        asked,
        settings,
        max_tokens=1 if asked.max_tokens == 0 else asked.max_tokens,
        logprobs=asked.logprobs or None,
        prompt_logprobs=asked.logprobs if asked.echo else None,
        cache_salt=asked.cache_salt,
        adapter=adapter,
    )


def of_chat(asked: ChatRequest, settings: ServeSettings, adapter: str | None) -> SamplingParams:
    """Return the parameters of a chat completion."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs=true", param="top_logprobs")
    check_cap("top_logprobs", asked.top_logprobs, settings.max_logprobs)
    both = (asked.max_tokens, asked.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise ApiError(400, f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ", param="max_tokens")
    length = both[1] if both[0] is None else both[0]
    if length == 0:
        raise ApiError(400, "max_tokens must be at least 1, got 0", param="max_tokens")
    return params_of(
        asked,
        settings,
        max_tokens=length,
        logprobs=asked.top_logprobs or None,
        cache_salt=asked.cache_salt,
        adapter=adapter,
        **_constrained(asked, settings),
    )


def _constrained(asked: ChatRequest, settings: ServeSettings) -> dict[str, StructuredOutputsParams]:
    """Return what a chat is constrained to beside its `structured_outputs`, if it is."""
    forced = forced_calls(asked)
    if forced is None:
        return _of_format(asked)
    return {"structured_outputs": forced.constraint(settings.max_grammar_bytes)}


def _of_format(asked: ChatRequest) -> dict[str, StructuredOutputsParams]:
    """Return what a chat's `response_format` constrains it to, if it does."""
    wanted = asked.response_format
    if wanted is None or wanted.type == "text":
        return {}
    if asked.structured_outputs is not None:
        raise ApiError(
            400, f"response_format of type {wanted.type!r} and structured_outputs both constrain the answer; give one",
            param="response_format",
        )  # fmt: skip
    return {"structured_outputs": _constraint_of(wanted)}


def _constraint_of(wanted: ResponseFormat) -> StructuredOutputsParams:
    if wanted.json_schema is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=wanted.json_schema.schema_)


def params_of(asked: Sampling, settings: ServeSettings, **more: Any) -> SamplingParams:
    """Return the parameters that a request names, and `more`; the rest are those of `SamplingParams`."""
    given = {name: getattr(asked, name) for name in _SAME if getattr(asked, name) is not None}
    check_cap("n", asked.n, settings.max_n)
    _check_stops(asked.stop, settings.max_stops)
    if asked.stop in ("", []):
        del given["stop"]
    if asked.logit_bias:
        given["logit_bias"] = {_token_id(token): bias for token, bias in asked.logit_bias.items()}
    try:
        if asked.structured_outputs is not None:
            given["structured_outputs"] = StructuredOutputsParams(**asked.structured_outputs.model_dump(by_alias=True))
        params = SamplingParams(**given, **more)
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split()[0]) from error
    _check_grammar(params.structured_outputs, settings.max_grammar_bytes)
    return params


def _token_id(text: str) -> int:
    written = text.isascii() and text.isdecimal() and len(text) <= 10
    if not written or text != str(int(text)):  # one token has one key: no other is overwritten
        raise ApiError(400, f"logit_bias has the key {text[:80]!r}, which is no token id", param="logit_bias")
    return int(text)


def _check_stops(stop: str | list[str] | None, most: int) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > most or sum(map(len, stops)) > MOST_STOP_CHARACTERS:
        raise ApiError(
            400, f"at most {most} stop strings of {MOST_STOP_CHARACTERS} characters in all are allowed", param="stop"
        )


def _check_grammar(asked: StructuredOutputsParams | None, most: int) -> None:
    size = 0 if asked is None else asked.num_bytes
    if size > most:
        raise ApiError(
            400, f"structured_outputs may have at most {most} bytes here, got {size}", param="structured_outputs"
        )


def check_cap(name: str, value: int | None, most: int) -> None:
    """Raise `ApiError` for a value above the server's cap."""
    if value is not None and value > most:
        raise ApiError(400, f"{name} may be at most {most} here, got {value}", param=name)
