"""Describe what may be asked of OpenAI's endpoints, under its names, and under vLLM's where it has more.

Invariants
----------
* A field that is not named here is refused, and so is a value that would have no effect.
* What is wrong in a body is few errors, since each takes far more memory than what it is about: a list is refused at
  its first wrong item, and an object of more fields than can be meant as a whole.
* What is right in a body, and too much of it, is counted before it is read: prompts, messages, tools.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from samebit.rollout.integrations.http.settings import MOST_PROMPTS

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Logit = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
LONGEST_ID = 256
RequestId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]


MOST_FIELDS = 1024


def _of_few_fields(given: object) -> object:
    if isinstance(given, dict) and len(given) > MOST_FIELDS:
        raise PydanticCustomError(
            "too_many_fields",
            "Input should have at most {most} fields, not {count}",
            {"most": MOST_FIELDS, "count": len(given)},
        )
    return given


MOST_MESSAGES = MOST_TOOLS = 1 << 14


def _check_few(count: int, most: int, what: str) -> None:
    if count > most:
        raise PydanticCustomError(
            "too_many_items",
            "Input should have at most {most} {what}, not {count}",
            {"most": most, "what": what, "count": count},
        )


def _of_few_prompts(given: object) -> object:
    if isinstance(given, list) and given and not isinstance(given[0], int):
        _check_few(len(given), MOST_PROMPTS, "prompts")
    return given


def _of_few_messages(given: object) -> object:
    """Count messages with their parts and their calls."""
    if isinstance(given, list):
        _check_few(len(given), MOST_MESSAGES, "messages")
        inner = (one.get(name) for one in given if isinstance(one, dict) for name in ("content", "tool_calls"))
        count = len(given) + sum(len(one) for one in inner if isinstance(one, list))
        _check_few(count, MOST_MESSAGES, "messages, parts and calls")
    return given


def _of_few_tools(given: object) -> object:
    if isinstance(given, list):
        _check_few(len(given), MOST_TOOLS, "tools")
    return given


class Strict(BaseModel):
    """Takes the fields that it names, of their types, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _few = model_validator(mode="before")(_of_few_fields)


class StreamOptions(Strict):
    """Says what a stream has at its end."""

    include_usage: bool = False


class StructuredOutputs(Strict):
    """Constrains a sample, as vLLM names it; `StructuredOutputsParams` says what each does, and takes one."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Strict):
    """Holds what both endpoints take about sampling; `SamplingParams` says what each does."""

    n: int | None = Field(default=None, ge=1, lt=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: str | Texts | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    repetition_penalty: float | None = Field(default=None, gt=0, le=1e6)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Logit], Field(max_length=1024), BeforeValidator(_of_few_fields)] | None = None
    structured_outputs: StructuredOutputs | None = None


class Common(Sampling):
    """Holds the rest of what both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Literal[0] = 0
    request_id: RequestId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None


class CompletionRequest(Common):
    """Asks for continuations of prompts."""

    prompt: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[Texts, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
        BeforeValidator(_of_few_prompts),
    ]
    max_tokens: Count | None = 16
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool = True
    best_of: None = None
    suffix: None = None

    @field_validator("max_tokens")
    @classmethod
    def _usual(cls, value: int | None) -> int:
        """Take null for the default, as OpenAI and vLLM do on this endpoint."""
        return 16 if value is None else value


class TextPart(Strict):
    """Holds a piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    """Holds a call that the model has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """Holds one message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: None = None

    @property
    def text(self) -> str:
        """Return its content in one piece, empty where there is none."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @field_validator("tool_calls")
    @classmethod
    def _none_where_empty(cls, value: list[ToolCall] | None) -> list[ToolCall] | None:
        """Take an empty list for none: templates ask whether there is one, and take the message for a call."""
        return value or None


class Function(Strict):
    """Describes a function to the model. returns: what transformers' `get_json_schema` says beside OpenAI's fields."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    returns: dict[str, Any] | None = Field(default=None, alias="return")
    strict: bool | None = None


class Tool(Strict):
    """Describes a function that the model may call."""

    type: Literal["function"]
    function: Function


Messages = Annotated[list[Message], Field(fail_fast=True), BeforeValidator(_of_few_messages)]
Tools = Annotated[list[Tool], Field(fail_fast=True), BeforeValidator(_of_few_tools)]


class NamedSchema(Strict):
    """Holds a JSON schema under OpenAI's names; a sample keeps to it, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Says what the text of an answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _with_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "json_schema goes with the type 'json_schema', and only with it")
        return self


class NamedFunction(Strict):
    name: str


class NamedChoice(Strict):
    """Names the function that an answer calls."""

    type: Literal["function"]
    function: NamedFunction


def _form_of_choice(value: object) -> str:
    return "[function]" if isinstance(value, dict | NamedChoice) else "[word]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"] | None, Tag("[word]")] | Annotated[NamedChoice, Tag("[function]")],
    Discriminator(_form_of_choice),
]
_NOT_THERE = ("any", "custom", "allowed_tools")


class ChatRequest(Common):
    """Asks for the next message of a conversation."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    store: Literal[False] | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _there(cls, value: object) -> object:
        """Refuse other servers' choices by name."""
        kind = value.get("type") if isinstance(value, dict) else value
        if isinstance(kind, str) and kind in _NOT_THERE:
            raise PydanticCustomError(
                "not_there",
                "{kind} is not there; 'none', 'auto', 'required' and a named function can be honoured",
                {"kind": repr(kind)},
            )
        return value


class TokenizeRequest(Strict):
    """Asks for the ids of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """Asks for the text of ids."""

    model: str | None = None
    tokens: TokenIds
