"""Constrain an answer to calls of tools, as `tool_choice` asks, and read the calls as they are written.

Invariants
----------
* An answer is the arguments of the function that is named, or `[{"name": ..., "parameters": {...}}, ...]` in exactly
  these words: only a name and its arguments are the model's choice, and arguments are an object of the tool's schema.
* A schema is one of its own in the grammar: its references stay within it.
* A call is told as soon as it has a name, its arguments as they are written; what stands around calls is no content.
* A call that was cut off is told as far as it came, and then `finish_reason` is not "tool_calls".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from samebit.rollout.checks import shown
from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.openai.requests import ChatRequest, Function, NamedChoice
from samebit.rollout.integrations.http.openai.tools import Parsed, Reading, new_call
from samebit.rollout.structured_outputs.params import StructuredOutputsParams

_BEGUN = re.compile(r'\s*(?:\[|\},)\s*\{"name": ("(?:[^"\\]|\\.)*"), "parameters": ')
"""Matches what stands before the arguments of a call of several."""
_UNWRITABLE = (ValueError, RecursionError)


@dataclass(frozen=True)
class ForcedCalls:
    """Says what an answer calls: this function once where it is `named`, or else at least one of these, once if
    `single`."""

    functions: list[Function]
    named: bool
    single: bool

    def __str__(self) -> str:
        return f"tool_choice={shown(self.functions[0].name) if self.named else repr('required')}"

    def constraint(self, most_bytes: int) -> StructuredOutputsParams:
        """Return what samples are constrained to.

        Raises:
            ApiError: 400, the tools' parameters describe no objects, or are more than these bytes of a grammar.
        """
        try:
            found = StructuredOutputsParams(grammar="\n".join(self._rules()))
        except _UNWRITABLE as error:
            raise ApiError(400, f"{self}: the tools' parameters are no JSON: {error}", param="tools") from error
        if found.num_bytes > most_bytes:
            raise ApiError(
                400, f"{self}: tools may make a grammar of at most {most_bytes} bytes here, got {found.num_bytes}",
                param="tools",
            )  # fmt: skip
        return found

    def reading(self) -> Reading:
        """Return how the samples are read."""
        return Reading(None, partial(NamedCall, self.functions[0].name) if self.named else RequiredCalls)

    def _rules(self) -> Iterator[str]:
        """Yield the lines of a grammar. The library quotes the two lines before a schema that it can not compile: they
        name the tool."""
        if self.named:
            yield "start: parameters_0"
        else:
            more = "" if self.single else '(", " call)* '
            yield f'start: "[" call {more}"]"'
            yield f"call: {' | '.join(f'call_{number}' for number in range(len(self.functions)))}"
        for number, function in enumerate(self.functions):
            before = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "parameters": '
            if not self.named:
                yield f'call_{number}: {json.dumps(before)} parameters_{number} "}}"'
            yield f"// the parameters of the tool {json.dumps(function.name)}"
            yield f"parameters_{number}: %json {json.dumps(self._schema(function), allow_nan=False)}"

    def _schema(self, function: Function) -> dict[str, object]:
        schema = {"type": "object", **(function.parameters or {})}
        if schema["type"] != "object":
            raise ApiError(
                400,
                f"{self}: the parameters of the tool {shown(function.name)} must be of the type 'object', "
                f"got {shown(schema['type'])}",
                param="tools",
            )
        return schema


def forced_calls(asked: ChatRequest) -> ForcedCalls | None:
    """Return what a chat's `tool_choice` forces it to call; None where it forces nothing.

    Raises:
        ApiError: 400, it can not be honoured, or what goes with it alone is asked without it.
    """
    choice, tools = asked.tool_choice, asked.tools or []
    if not isinstance(choice, NamedChoice) and choice != "required":
        _check_free(asked)
        return None
    named = isinstance(choice, NamedChoice)
    wanted = choice.function.name if isinstance(choice, NamedChoice) else None
    functions = [tool.function for tool in tools if wanted in (None, tool.function.name)]
    _check_there(wanted, functions, [tool.function.name for tool in tools])
    forced = ForcedCalls(functions, named, single=asked.parallel_tool_calls is False)
    other = "structured_outputs" if asked.structured_outputs is not None else None
    if asked.response_format is not None and asked.response_format.type != "text":
        other = f"response_format of type {asked.response_format.type!r}"
    if other is not None:
        raise ApiError(400, f"{forced} and {other} both constrain the answer; give one", param="tool_choice")
    return forced


def _check_there(wanted: str | None, found: list[Function], names: list[str]) -> None:
    """Raise ApiError unless there is what is to be called."""
    if not names:
        asked = repr("required") if wanted is None else shown(wanted)
        raise ApiError(400, f"tool_choice={asked} needs tools to choose from, and there are none", param="tool_choice")
    if not found:
        raise ApiError(
            400, f"tool_choice names the function {shown(wanted)}; tools has {shown(names)}", param="tool_choice"
        )
    if wanted is not None and len(found) > 1:
        raise ApiError(
            400, f"tool_choice names the function {shown(wanted)}, which tools has {len(found)} times",
            param="tool_choice",
        )  # fmt: skip


def _check_free(asked: ChatRequest) -> None:
    """Raise ApiError for what can only be honoured of calls that are constrained."""
    alone = "goes with tool_choice='required' or a named function: other answers are not constrained"
    if asked.parallel_tool_calls is False:
        raise ApiError(400, f"parallel_tool_calls=false {alone}", param="parallel_tool_calls")
    strict = next((number for number, tool in enumerate(asked.tools or ()) if tool.function.strict), None)
    if strict is not None:
        raise ApiError(400, f"strict=true {alone}", param=f"tools.{strict}.function.strict")


class NamedCall:
    """Reads a sample that is the arguments of the function of this name. Its `finish_reason` is "stop", as of OpenAI
    and vLLM."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> Parsed:
        if self._begun:
            return Parsed(arguments=text)
        text = text.lstrip()
        self._begun = bool(text)
        return Parsed(calls=[new_call(self._name, text)] if text else [])

    def finish(self, ended_by: int | None = None) -> Parsed:
        return Parsed(finish="stop")


class RequiredCalls:
    """Reads a sample that is a list of calls."""

    def __init__(self) -> None:
        self._around = ""
        self._arguments: _GrowingObject | None = None

    def push(self, text: str) -> Parsed:
        found = Parsed()
        while text:
            if self._arguments is None:
                begun = _BEGUN.match(self._around + text)
                if begun is None:
                    self._around += text
                    break
                text, self._around = (self._around + text)[begun.end() :], ""
                self._arguments = _GrowingObject()
                found.calls.append(new_call(json.loads(begun[1]), ""))
            end = self._arguments.end_in(text)
            found = found.then(Parsed(arguments=text[:end]))
            if end is not None:
                self._arguments, text = None, text[end:]
            else:
                break
        return found

    def finish(self, ended_by: int | None = None) -> Parsed:
        return Parsed(finish="tool_calls" if self._around.strip() == "}]" else "stop")


class _GrowingObject:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Return where in the next piece the object ends; None where it goes on."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    return place + 1
        return None
