"""Say what a sample is constrained to, under vLLM's names: `StructuredOutputsParams`.

Invariants
----------
* Exactly one kind is given, and an instance keeps a copy of its own.
* Whether the text is a schema, an expression or a grammar is checked at submission, by `grammars.Grammars`.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from samebit.rollout.checks import as_bool, shown

Kind = Literal["json", "regex", "choice", "grammar", "json_object"]


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Says what a sample's text is to be. Exactly one is given:

    json: JSON that a schema allows: a dict, or its text.
    regex: what a regular expression matches, from its first character to its last.
    choice: one of these texts.
    grammar: a text of a grammar in Lark's format, whose first rule is ``start``, or in GBNF, where it is ``root``.
    json_object: True for any JSON object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [one.name for one in fields(self)]
        given = [name for name in names if self.__dict__[name] is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(names)}, got {given or 'none'}")
        [name] = given
        value = self.__dict__[name]
        if name == "json":
            object.__setattr__(self, "json", _own_schema(value))
        elif name == "choice":
            object.__setattr__(self, "choice", _own_choice(value))
        elif name == "json_object":
            if as_bool(value) is not True:
                raise ValueError(f"structured_outputs.json_object must be True or None, got {shown(value)}")
        elif not isinstance(value, str) or not value:
            raise ValueError(f"structured_outputs.{name} must be a non-empty string, got {shown(value)}")

    @property
    def num_bytes(self) -> int:
        """Return how long the text is that has to be compiled."""
        return len(self.kind_and_text[1].encode(errors="surrogatepass"))

    @property
    def kind_and_text(self) -> tuple[Kind, str]:
        """Return which kind is given, and its text: equal ones allow equal samples."""
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else json_text.dumps(self.json)
        if self.choice is not None:
            return "choice", json_text.dumps(self.choice)
        if self.regex is not None:
            return "regex", self.regex
        return ("json_object", "") if self.grammar is None else ("grammar", self.grammar)


def _own_schema(given: object) -> dict[str, Any] | str:
    """Return a copy of a schema; a text stays as it is, once it was read."""
    if not isinstance(given, dict | str):
        raise ValueError(f"structured_outputs.json must be a schema, as a dict or its text, got {shown(given)}")
    try:
        schema = json_text.loads(given if isinstance(given, str) else json_text.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is no JSON: {error}; got {shown(given)}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"structured_outputs.json must be the text of a JSON object, got {shown(given)}")
    return given if isinstance(given, str) else schema


def _own_choice(given: object) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError(f"structured_outputs.choice must be a list of non-empty strings, got {shown(given)}")
    return tuple(given)
