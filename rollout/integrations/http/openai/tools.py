"""Read tool calls out of what a model wrote.

Invariants
----------
* Text that is no well-formed call stays text; nothing the model wrote is lost but white space between calls, or between
  one and the message's beginning or end.
* A call that is given out can be sent back: its arguments are a JSON object.
* A streamed call is sent whole, when its end has been read; text before it is sent as it comes. (Calls that an answer
  is constrained to are read by `forced_calls`, which sends them as they grow.)
* Tags are found whether they are special tokens of the tokenizer or not.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Literal, Protocol

import transformers
from transformers import PreTrainedTokenizerBase

from samebit.rollout.integrations.http.openai.sample_text import (
    KeepingSpecial,
    ended_by,
    overlap,
    special_tokens,
    text_by,
    whole_text,
)
from samebit.rollout.outputs import SampleOutput
from samebit.rollout.requests.stop_strings import Ids
from samebit.rollout.requests.tokenizer import Tokenizer, decoded

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PARSERS = ("hermes", "template")
_UNFIT = (ValueError, KeyError, TypeError, RecursionError)
"""Says that a sample is no call, and stays text; a schema that needs a package that is missing is another error."""


@dataclass
class Parsed:
    """Holds text, and the calls that were found in it.

    Attributes:
        arguments: more of the arguments of the last call that was found before.
        finish: why a message that has calls ends, where it stopped.
    """

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str | None = None
    arguments: str = ""
    finish: Literal["tool_calls", "stop"] = "tool_calls"

    def then(self, last: Parsed) -> Parsed:
        """Return this and what came last, together."""
        calls, arguments = self.calls, self.arguments + last.arguments
        if calls and last.arguments:
            calls, arguments = [*calls[:-1], _longer(calls[-1], last.arguments)], self.arguments
        return Parsed(self.content + last.content, calls + last.calls, last.reasoning, arguments, last.finish)

    def finish_reason(self, given: str | None) -> str | None:
        """Return why the message ends, of a sample that ended as `given`."""
        return self.finish if self.calls and given == "stop" else given


class ToolParser(Protocol):
    """Reads one sample."""

    def push(self, text: str) -> Parsed:
        """Take more text; return what is certain."""

    def finish(self, ended_by: int | None = None) -> Parsed:
        """Return what is left at the end. ended_by: the token that ended the sample, which is not in the text."""


class HermesParser:
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3)."""

    def __init__(self) -> None:
        self._text = ""
        self._space: str | None = ""  # white space that may be all there is before a call; None: there is more
        self._called = False

    def push(self, text: str) -> Parsed:
        self._text += text
        found = Parsed()
        while True:
            start = self._text.find(OPEN)
            if start < 0:
                self._give(found, len(self._text) - overlap(self._text, OPEN))
                return found
            self._give(found, start)
            end = self._text.find(CLOSE)
            if end < 0:
                return found
            end += len(CLOSE)
            call = _call(self._text[len(OPEN) : end - len(CLOSE)])
            if call is None:
                self._give(found, end)
            else:
                found.calls.append(call)
                self._text, self._space, self._called = self._text[end:], "", True

    def finish(self, ended_by: int | None = None) -> Parsed:
        rest, self._text = f"{self._space or ''}{self._text}", ""
        return Parsed("" if self._called and rest.isspace() else rest)

    def _give(self, found: Parsed, end: int) -> None:
        """Give text, and white space once it is known that it does not only set a call apart."""
        given, self._text = self._text[:end], self._text[end:]
        if self._space is not None:
            given = self._space + given
            self._space = None if given.strip() else given
        if self._space is None:
            found.content += given


class TemplateParser:
    """Reads as the tokenizer's own response schema or template says, when the sample has ended: a text with its special
    tokens. context: `context_of` its request. special: `special_tokens` of the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: dict[str, Any], special: dict[int, str]) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._special = special
        self._text = ""

    def push(self, text: str) -> Parsed:
        self._text += text
        return Parsed()

    def finish(self, ended_by: int | None = None) -> Parsed:
        """Read also with the token that ended the sample, where that is a special one: to some it ends a call."""
        end = "" if ended_by is None else self._special.get(ended_by, "")
        read = [one for text in dict.fromkeys((self._text, self._text + end)) if (one := self._read(text)) is not None]
        found = max(read, key=lambda one: len(one.calls), default=Parsed(self._text))
        reasoning = None if found.reasoning is None else self._plain(found.reasoning)
        content = self._plain(found.content)
        return Parsed("" if found.calls and content.isspace() else content, found.calls, reasoning)

    def _read(self, text: str) -> Parsed | None:
        try:
            message: Any = self._tokenizer.parse_response(text, **self._context)
            if not isinstance(message, dict):
                return None
            calls = [_named(call["function"]) for call in message.get("tool_calls") or ()]
        except _UNFIT:
            return None
        reasoning = message.get("thinking", message.get("reasoning_content"))  # gpt-oss's name, and Qwen's
        content = message.get("content") or ""
        readable = isinstance(content, str) and isinstance(reasoning, str | None)
        return Parsed(content, calls, reasoning) if readable else None

    def _plain(self, text: str) -> str:
        for token in self._special.values():
            text = text.replace(token, "")
        return text


@dataclass(frozen=True)
class Reading:
    """Says how the samples of a request are read.

    Attributes:
        tokenizer: decodes the text that is read; None if that is the sample's own.
        parser: makes the parser of one sample.
    """

    tokenizer: Tokenizer | None
    parser: Callable[[], ToolParser]

    def read(self, sample: SampleOutput, own: Tokenizer, prompt: Ids) -> Parsed:
        """Return what a sample that has ended says. own: the tokenizer of its own text. prompt: what it answers."""
        parser = self.parser()
        other = self.tokenizer
        text = whole_text(own, sample, prompt) if other is None else text_by(other, sample, prompt)
        first = parser.push(text)
        return first.then(parser.finish(ended_by(sample, sample.token_ids)))


def reading(
    name: str, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], tools: list[dict[str, Any]]
) -> Reading:
    """Return how the samples of a request are read by the parser of this name."""
    special = special_tokens(tokenizer)
    if name == "hermes":
        skipped = not {OPEN, CLOSE}.isdisjoint(special.values())
        return Reading(KeepingSpecial(tokenizer, (OPEN, CLOSE)) if skipped else None, HermesParser)
    context = context_of(tokenizer, prompt_ids, tools)
    return Reading(KeepingSpecial(tokenizer, None), partial(TemplateParser, tokenizer, context, special))


def context_of(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], tools: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what `parse_response` takes of a request, by the installed version of transformers.

    Up to 5.14 it reads a `response_schema`, which takes nothing; from 5.13 on a `response_template`, which takes the
    prompt, and in later versions the tools.
    """
    taken = signature(tokenizer.parse_response).parameters
    if "prefix" not in taken or vars(tokenizer).get("response_template") is None:
        return {}
    given = {"prefix": decoded(tokenizer, prompt_ids, skip_special=False), "tools": tools}
    return {name: value for name, value in given.items() if name in taken}


def check_parser(name: str | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise ValueError for a parser that there is not, or that this tokenizer can not serve."""
    if name is None:
        return
    if name not in PARSERS:
        raise ValueError(f"tool_call_parser must be one of {', '.join(PARSERS)}, got {name!r}")
    if tokenizer is None:
        raise ValueError("tool_call_parser needs a tokenizer, and the model's folder has none")
    if name == "template":
        _check_readable(tokenizer)


def _check_readable(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a tokenizer without what the installed transformers reads answers by."""
    try:
        tokenizer.parse_response("", **context_of(tokenizer, [], []))
    except AttributeError as error:
        raise ValueError(
            "tool_call_parser='template' needs a tokenizer by which transformers "
            f"{transformers.__version__} can read answers: {error}"
        ) from error
    except _UNFIT:
        pass  # an empty text is no message, and says nothing about others


def _call(text: str) -> dict[str, Any] | None:
    try:
        return _named(json.loads(text))
    except _UNFIT:
        return None


def _named(given: object) -> dict[str, Any]:
    """Return a call as OpenAI writes it. Raises an error that is `_UNFIT` for what is no call."""
    if not isinstance(given, dict):
        raise TypeError("a call is an object")
    arguments = given.get("arguments", {})
    written = (arguments or "{}") if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    meant = json.loads(written)
    if not isinstance(given["name"], str) or not isinstance(meant, dict):
        raise TypeError("a call has a name, and an object of arguments")
    shown = json.dumps(meant, ensure_ascii=False)
    f"{given['name']}{shown}".encode()  # half of a character would be refused when the call is sent back
    return new_call(given["name"], written)


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """Return a call as OpenAI writes it. arguments: as they are written, so far."""
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _longer(call: dict[str, Any], more: str) -> dict[str, Any]:
    """Return a call whose arguments go on."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": function["arguments"] + more}}
