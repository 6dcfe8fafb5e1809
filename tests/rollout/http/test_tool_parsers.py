"""`--tool-call-parser template`: calls are found by the schema in the tokenizer's own folder."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from samebit.rollout.integrations.http.openai.tools import check_parser, make_parser

from .served import byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "x-regex": "^(.*?)(?=<call>|$)"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": "<call>(.*?)</call>",
            "items": {"type": "object", "x-parser": "json", "additionalProperties": {}},
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Read from a folder, as a server does."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="needs a tokenizer with a response_schema, and this one has none"):
        check_parser("template", tokenizer)
    tokenizer.response_schema = SCHEMA
    tokenizer.save_pretrained(folder)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    check_parser("template", loaded)
    return loaded


def parsed(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = make_parser("template", tokenizer)
    assert parser.push(text[:5]).content == parser.push(text[5:]).content == "", "nothing before the end"
    found = parser.finish()
    return found.content, [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]


def test_a_call_is_found_by_the_schema(tokenizer: PreTrainedTokenizerBase) -> None:
    text = 'Adding. <call>{"function": {"name": "add", "arguments": {"a": 1}}}</call>'
    assert parsed(tokenizer, text) == ("Adding. ", [("add", '{"a": 1}')])
    assert parsed(tokenizer, "No call.") == ("No call.", [])


@pytest.mark.parametrize("name", ["thinking", "reasoning_content"])
def test_reasoning_is_found_under_both_of_its_names(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """gpt-oss's schema has one, those of Qwen and GLM the other."""
    reasoning = {name: {"type": "string", "x-regex": "<think>(.*?)</think>"}}
    content = {"type": "string", "x-regex": "(?:</think>)?([^>]*)$"}
    other = copy.copy(tokenizer)
    other.response_schema = {"type": "object", "properties": {**reasoning, "content": content}}
    parser = make_parser("template", other)
    parser.push("<think>hm</think>so")
    found = parser.finish()
    assert (found.reasoning, found.content) == ("hm", "so")


@pytest.mark.parametrize(
    "text",
    [
        "x <call>{bad</call>",
        "x <call>[1]</call>",
        'x <call>{"a": 1}</call>',
        'x <call>{"function": {"name": 3}}</call>',
        'x <call>{"function": "add"}</call>',
    ],
)
def test_what_does_not_fit_stays_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert parsed(tokenizer, text) == (text, [])
