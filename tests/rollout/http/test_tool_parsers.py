"""`--tool-call-parser template` finds calls by the schema or template in the tokenizer's own folder."""

from __future__ import annotations

import copy
import json
from inspect import signature
from pathlib import Path

import pytest
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from samebit.rollout.integrations.http.openai.tools import check_parser, reading

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


TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"},
        "content": {"content": "text", "content_args": {"strip": False}},
    },
}
"""Says what `SCHEMA` does to transformers 5.13 and later."""
TAKEN = signature(PreTrainedTokenizerFast.parse_response).parameters
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read_from_a_folder(folder: Path, **more: object) -> PreTrainedTokenizerBase:
    """Read a tokenizer from a folder, as a server does."""
    byte_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    """Give a tokenizer that each version of transformers can read."""
    loaded = read_from_a_folder(tmp_path, response_schema=SCHEMA, response_template=TEMPLATE)
    check_parser("template", loaded)
    return loaded


def parsed(tokenizer: PreTrainedTokenizerBase, text: str, prompt: str = "") -> tuple[str, list[tuple[str, str]]]:
    ids = tokenizer(prompt)["input_ids"]
    parser = reading("template", tokenizer, ids, [TOOL]).parser()
    assert parser.push(text[:5]).content == parser.push(text[5:]).content == "", "nothing before the end"
    found = parser.finish()
    return found.content, [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]


def test_a_tokenizer_says_how_answers_are_read(tmp_path: Path) -> None:
    """A tokenizer says how answers are read by the name that the installed transformers reads; a key that it does not
    read is none.
    """
    other = {"response_template": TEMPLATE} if "prefix" not in TAKEN else {}
    other |= {"response_schema": SCHEMA} if "tools" in TAKEN else {}
    with pytest.raises(ValueError, match=rf"{transformers.__version__} can read .* does not have a `response_"):
        check_parser("template", read_from_a_folder(tmp_path, **other))


def test_a_call_is_found_as_the_tokenizer_says(tokenizer: PreTrainedTokenizerBase) -> None:
    text = 'Adding. <call>{"function": {"name": "add", "arguments": {"a": 1}}}</call>'
    assert parsed(tokenizer, text) == ("Adding. ", [("add", '{"a": 1}')])
    assert parsed(tokenizer, text.replace("Adding. ", "\n\n")) == ("", [("add", '{"a": 1}')])
    assert parsed(tokenizer, "No call.") == ("No call.", [])


@pytest.mark.skipif("prefix" not in TAKEN, reason="transformers before 5.13 reads no response_template")
def test_what_the_prompt_has_begun_is_read_on(tokenizer: PreTrainedTokenizerBase) -> None:
    parser = reading("template", tokenizer, tokenizer("<|im_start|>assistant\n<think>a")["input_ids"], [TOOL]).parser()
    parser.push("b</think>c")
    found = parser.finish()
    assert (found.reasoning, found.content) == ("ab", "c")


class NewTokenizer(PreTrainedTokenizerFast):
    """Takes what transformers 5.15 and later take, and answers with it."""

    def parse_response(
        self, response: str, schema: None = None, *, prefix: str | None = None, tools: list[object] | None = None
    ) -> dict[str, object]:
        return {"tool_calls": [{"function": {"name": response, "arguments": {"prefix": prefix, "tools": tools}}}]}


def test_the_parser_is_told_of_the_prompt_and_the_tools() -> None:
    tokenizer = NewTokenizer(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|im_end|>")
    vars(tokenizer)["response_template"] = TEMPLATE
    ids = tokenizer("<|im_start|>assistant\n<think>")["input_ids"]
    parser = reading("template", tokenizer, ids, [TOOL]).parser()
    parser.push("said")
    (call,) = parser.finish().calls
    expected = {"prefix": "<|im_start|>assistant\n<think>", "tools": [TOOL]}
    assert json.loads(call["function"]["arguments"]) == expected


@pytest.mark.skipif("tools" in TAKEN, reason="a later transformers reads no response_schema")
@pytest.mark.parametrize("name", ["thinking", "reasoning_content"])
def test_reasoning_is_found_under_both_of_its_names(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Reasoning is found under both of its names: gpt-oss's schema has one, those of Qwen and GLM the other."""
    reasoning = {name: {"type": "string", "x-regex": "<think>(.*?)</think>"}}
    content = {"type": "string", "x-regex": "(?:</think>)?([^>]*)$"}
    other = copy.copy(tokenizer)
    vars(other)["response_template"] = None
    other.response_schema = {"type": "object", "properties": {**reasoning, "content": content}}
    parser = reading("template", other, [], []).parser()
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
        'x <call>{"function": {"name": "add", "arguments": "1 + 1"}}</call>',
        'x <call>{"function": {"name": "add", "arguments": "[1]"}}</call>',
        'x <call>{"function": "add"}</call>',
    ],
)
def test_what_does_not_fit_stays_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert parsed(tokenizer, text) == (text, [])
