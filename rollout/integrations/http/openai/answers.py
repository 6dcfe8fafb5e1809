"""Describe what is answered: the models of the `openai` package, with what vLLM adds to them.

They stand in the OpenAPI description, and tests hold every answer to them. Answers are built as plain dicts: a model
for each log-probability of each token would cost more than the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from openai.types import Completion, CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from pydantic import BaseModel

from samebit.rollout.outputs import RequestOutput
from samebit.rollout.sampling_params import SamplingParams

Finish = Literal["stop", "length", "abort", "tool_calls"]


class WeightSpan(BaseModel):
    """Says under which weights the tokens from `start` to before `end` were sampled."""

    version: str
    start: int
    end: int


class CompletionChoiceAnswer(CompletionChoice):
    finish_reason: Finish  # type: ignore[assignment]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class CompletionAnswer(Completion):
    """Answers a completion. `weight_versions`: `{start, end, version}` over the tokens of the sample."""

    choices: list[CompletionChoiceAnswer]  # type: ignore[assignment]


class CompletionPieceChoice(CompletionChoiceAnswer):
    finish_reason: Finish | None = None  # type: ignore[assignment]


class CompletionPiece(Completion):
    """Describes an event of a streamed completion."""

    choices: list[CompletionPieceChoice]  # type: ignore[assignment]


class ChatChoiceAnswer(Choice):
    finish_reason: Finish  # type: ignore[assignment]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class ChatAnswer(ChatCompletion):
    """Answers a chat completion."""

    choices: list[ChatChoiceAnswer]  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None


class ChatPieceChoice(ChunkChoice):
    finish_reason: Finish | None = None  # type: ignore[assignment]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[WeightSpan] | None = None


class ChatPiece(ChatCompletionChunk):
    """Describes an event of a streamed chat completion."""

    choices: list[ChatPieceChoice]  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None


class ModelAnswer(Model):
    """Describes the model that is served, and which weights it has; or an adapter, whose `parent` is that model."""

    root: str
    parent: str | None
    max_model_len: int
    weight_version: int


class ModelsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class TokensAnswer(BaseModel):
    """Answers /tokenize as vLLM does."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TextAnswer(BaseModel):
    """Answers /detokenize as vLLM does."""

    prompt: str


def num_tokens(outputs: Sequence[RequestOutput], params: SamplingParams) -> int:
    """Return how many tokens an answer may have to be written for, alternatives among them."""
    before, behind = (1 + (count or 0) for count in (params.prompt_logprobs, params.logprobs))
    return sum(
        len(one.prompt_token_ids) * before + sum(len(sample.token_ids) for sample in one.samples) * behind
        for one in outputs
    )


def usage(outputs: list[RequestOutput], *, sampled: bool = True) -> dict[str, Any]:
    """Count tokens. Cached ones are those of the prompt that its first sample did not have to compute."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(sample.token_ids) for output in outputs for sample in output.samples) if sampled else 0
    cached = sum(output.num_cached_tokens for output in outputs)
    counted = CompletionUsage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)
    return {**counted.model_dump(exclude_none=True), "prompt_tokens_details": {"cached_tokens": cached}}
