"""A wrong request is answered with its status and a message that names what is wrong, and the server goes on."""

from __future__ import annotations

import json
import socket

import pytest
from pydantic import ValidationError

from samebit.rollout.integrations.http.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Strict,
    TokenizeRequest,
)
from samebit.rollout.integrations.http.rl.requests import AbortRequest, GenerateRequest, UpdateInfo
from samebit.rollout.integrations.http.settings import MOST_PROMPTS

from .served import Served

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TEXT = {"prompt": "hi", "max_tokens": 1}
IDS = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
LONG_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a" * 65536]}}}
NAMED = {"type": "function", "function": {"name": "add"}}
OTHER = {"type": "function", "function": {"name": "sub"}}
MULTIPLY = {"type": "function", "function": {"name": "mul"}}


def tool(parameters: dict[str, object], **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "mul", "parameters": parameters, **more}}


ADD = {"type": "function", "function": {"name": "add"}}
CALLS = {**CHAT, "tools": [ADD, tool({})], "tool_choice": "required"}
UNREADABLE = "tool_choice='required' can not be honoured: structured_outputs.grammar can not be compiled"
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"

BAD = [
    (COMPLETIONS, {}, 400, "prompt: Field required"),
    (COMPLETIONS, [], 400, "the body: "),
    (COMPLETIONS, {**TEXT, "model": "gpt-9"}, 404, "there is no model 'gpt-9' here"),
    (COMPLETIONS, {**TEXT, "tempurature": 1}, 400, "no field 'tempurature'"),
    (COMPLETIONS, {**TEXT, "": 1}, 400, "no field ''; nothing"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "x-y": 1}]}, 400, "no field 'messages.0.x-y'; nothing"),
    (COMPLETIONS, {**TEXT, "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {**TEXT, "prompt": []}, 400, "prompt: List should have at least 1 item"),
    (COMPLETIONS, {**TEXT, "prompt": 5}, 400, "prompt: Input should be a valid string, or a valid list, got 5"),
    (COMPLETIONS, {**TEXT, "stop": 5}, 400, "stop: Input should be a valid string, or a valid list, got 5"),
    (COMPLETIONS, {**TEXT, "prompt": [[]]}, 400, "the prompt is empty"),
    (COMPLETIONS, {**TEXT, "prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {**TEXT, "prompt": [100000]}, 400, "outside the vocabulary"),
    (COMPLETIONS, {**TEXT, "prompt": [-1]}, 400, "greater than or equal to 0"),
    (COMPLETIONS, {**TEXT, "prompt": [1] * 2048}, 400, "at most 2047 are allowed"),
    (COMPLETIONS, {**TEXT, "prompt": ["a"] * 257}, 400, "at most 256 prompts"),
    (COMPLETIONS, {**TEXT, "prompt": "\ud800"}, 400, "unicode"),
    (COMPLETIONS, {**TEXT, "max_tokens": 5000}, 400, "max_tokens may be at most"),
    (COMPLETIONS, {**TEXT, "max_tokens": 0}, 400, "it goes with echo"),
    (COMPLETIONS, {**TEXT, "max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETIONS, {**TEXT, "n": 0}, 400, "n: "),
    (COMPLETIONS, {**TEXT, "n": 17}, 400, "n may be at most 16 here, got 17"),
    (COMPLETIONS, {**TEXT, "n": "3"}, 400, "n: Input should be a valid integer"),
    (COMPLETIONS, {**TEXT, "prompt": ["a"] * 5, "n": 16}, 400, "at most 64 fit here"),
    (COMPLETIONS, {**TEXT, "temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {**TEXT, "temperature": 1e-9}, 400, "temperature must be 0 (greedy) or at least"),
    (COMPLETIONS, {**TEXT, "temperature": True}, 400, "temperature"),
    (COMPLETIONS, {**TEXT, "top_p": 1.5}, 400, "top_p"),
    (COMPLETIONS, {**TEXT, "logprobs": 21}, 400, "logprobs may be at most 20 here"),
    (COMPLETIONS, {**TEXT, "stop": ["a"] * 17}, 400, "at most 16 stop strings"),
    (COMPLETIONS, {**TEXT, "stop": ["a", ""]}, 400, "stop must be a non-empty string"),
    (COMPLETIONS, {**TEXT, "stop_token_ids": [99999]}, 400, "outside the vocabulary"),
    (COMPLETIONS, {**TEXT, "logit_bias": {"x": 1}}, 400, "which is no token id"),
    (COMPLETIONS, {**TEXT, "logit_bias": {"1": 1000}}, 400, "logit_bias.1"),
    (COMPLETIONS, {**TEXT, "logit_bias": {str(i): 0 for i in range(1025)}}, 400, "at most 1024 fields, not 1025"),
    (COMPLETIONS, {f"a{i}": 0 for i in range(2000)}, 400, "the body: Input should have at most 1024 fields, not 2000"),
    (COMPLETIONS, {**TEXT, "logit_bias": {"5": 1, "05": 2}}, 400, "'05', which is no token id"),
    (COMPLETIONS, {**TEXT, "x-foo": 1}, 400, "no field 'x-foo'"),
    (COMPLETIONS, {**TEXT, "str": 1}, 400, "no field 'str'"),
    (GENERATE, {**IDS, "sampling_params": {"a[0]": 2}}, 400, "no field 'sampling_params.a[0]'"),
    (COMPLETIONS, {**TEXT, "presence_penalty": 3}, 400, "presence_penalty"),
    (COMPLETIONS, {**TEXT, "min_tokens": 9}, 400, "min_tokens must be at most max_tokens"),
    (COMPLETIONS, {**TEXT, "seed": -1}, 400, "seed"),
    (COMPLETIONS, {**TEXT, "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {**TEXT, "priority": 1}, 400, "priority"),
    (COMPLETIONS, {**TEXT, "stream_options": {"include_usage": True}}, 400, "goes with stream=true"),
    (COMPLETIONS, {**TEXT, "stream": True, "echo": True, "logprobs": 1}, 400, "is not streamed"),
    (CHATS, {**CHAT, "messages": []}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "wizard", "content": "a"}]}, 400, "messages.0.role"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
    (CHATS, {**CHAT, "top_logprobs": 2}, 400, "goes with logprobs=true"),
    (CHATS, {**CHAT, "max_completion_tokens": 2}, 400, "differ"),
    (CHATS, {**CHAT, "response_format": {"type": "json_schema"}}, 400, "json_schema goes with the type 'json_schema'"),
    (CHATS, {**CHAT, "response_format": {**SCHEMA, "type": "text"}}, 400, "json_schema goes with the type"),
    (CHATS, {**CHAT, "response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, 400, "give one"),
    (CHATS, {**CHAT, "response_format": {"type": "poem"}}, 400, "response_format.type: Input should be 'text'"),
    (CHATS, {**CHAT, "structured_outputs": {"regex": "a(("}}, 400, "structured_outputs.regex can not be compiled"),
    (COMPLETIONS, {**TEXT, "structured_outputs": {"regex": "a" * 65537}}, 400, "at most 65536 bytes here, got 65537"),
    (CHATS, {**CHAT, "response_format": LONG_SCHEMA}, 400, "structured_outputs may have at most 65536 bytes here"),
    (COMPLETIONS, {**TEXT, "structured_outputs": {}}, 400, "structured_outputs takes exactly one of"),
    (COMPLETIONS, {**TEXT, "structured_outputs": {"structural_tag": "a"}}, 400, "structured_outputs.structural_tag"),
    (GENERATE, {**IDS, "sampling_params": {"structured_outputs": {"json": "{"}}}, 400, "is no JSON"),
    (COMPLETIONS, {**TEXT, "response_format": {"type": "json_object"}}, 400, "no field 'response_format'"),
    (CHATS, {**CHAT, "guided_json": {}}, 400, "no field 'guided_json'"),
    (CHATS, {**CHAT, "tool_choice": "required"}, 400, "'required' needs tools to choose from, and there are none"),
    (CHATS, {**CHAT, "tool_choice": NAMED, "tools": []}, 400, "'add' needs tools to choose from"),
    (CHATS, {**CALLS, "tool_choice": OTHER}, 400, "names the function 'sub'; tools has ['add', 'mul']"),
    (CHATS, {**CALLS, "tools": [ADD, ADD], "tool_choice": NAMED}, 400, "'add', which tools has 2 times"),
    (CHATS, {**CALLS, "tool_choice": "maybe"}, 400, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (CHATS, {**CALLS, "tool_choice": {**NAMED, "name": "add"}}, 400, "no field 'tool_choice.name'"),
    (CHATS, {**CALLS, "tool_choice": {"type": "poem"}}, 400, "tool_choice.type: Input should be 'function'"),
    (CHATS, {**CALLS, "tool_choice": 5}, 400, "tool_choice: Input should be 'none', 'auto' or 'required', got 5"),
    (CHATS, {**CALLS, "tool_choice": {"type": "function", "name": "add"}}, 400, "tool_choice.function: Field required"),
    (CHATS, {**CALLS, "tool_choice": "any"}, 400, "tool_choice: 'any' is not there; 'none', 'auto', 'required' and"),
    (CHATS, {**CALLS, "tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice: 'allowed_tools' is not there"),
    (CHATS, {**CALLS, "response_format": SCHEMA}, 400, "'required' and response_format of type 'json_schema' both"),
    (CHATS, {**CALLS, "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, 400, "'add' and structured_outputs"),
    (CHATS, {**CALLS, "tools": [ADD, tool({"not": {}})]}, 400, UNREADABLE),
    (CHATS, {**CALLS, "tools": [tool({"not": {}})], "tool_choice": MULTIPLY}, 400, 'the tool "mul"'),
    (
        CHATS,
        {**CALLS, "tools": [ADD, tool({"type": "string"})]},
        400,
        "'mul' must be of the type 'object', got 'string'",
    ),
    (CHATS, {**CALLS, "tools": [tool({"enum": ["a" * 65536]})]}, 400, "a grammar of at most 65536 bytes here, got"),
    (CHATS, {**CALLS, "tool_choice": "auto", "parallel_tool_calls": False}, 400, "parallel_tool_calls=false goes with"),
    (CHATS, {**CALLS, "tool_choice": "none", "tools": [tool({}, strict=True)]}, 400, "strict=true goes with"),
    (CHATS, {**CHAT, "chat_template_kwargs": {"tokenize": True}}, 400, "may not have tokenize"),
    (CHATS, {**CHAT, "continue_final_message": True}, 400, "goes with add_generation_prompt=false"),
    (GENERATE, {**IDS, "token_ids": []}, 400, "token_ids"),
    (GENERATE, {**IDS, "sampling_params": {"beam": 2}}, 400, "no field 'sampling_params.beam'"),
    (GENERATE, {**IDS, "stream": True, "sampling_params": {"prompt_logprobs": 1}}, 400, "not streamed"),
    ("/tokenize", {}, 400, "either prompt or messages"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400, "continue_final_message go with messages"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt go with messages"),
    ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools go with messages"),
    ("/detokenize", {"tokens": [5000]}, 400, "outside the vocabulary"),
    ("/v1/embeddings", {}, 404, "Not Found"),
    ("/v1/models", {}, 405, "Method Not Allowed"),
    ("/pause", {}, 404, "control endpoints are not offered here"),
    ("/pause?mode=keep", {}, 404, "control endpoints are not offered here"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), BAD, ids=[f"{p[1:]}-{n}" for n, (p, *_) in enumerate(BAD)])
def test_bad_input_is_named(served: Served, path: str, body: object, status: int, says: str) -> None:
    answer = served.http.post(
        served.base + path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert says in error["message"]
    assert error["type"]
    assert served.service.admission.inside == 0


def test_of_a_long_name_of_a_field_the_beginning_is_told(served: Served) -> None:
    """A name of a field that is as long as a body may be does not come back in the answer, twice."""
    answer = served.post(COMPLETIONS, {**TEXT, "a" * 150_000: 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "a" * 200)
    assert len(answer.content) < 1000


MANY = 5000
USER = {"role": "user"}
FLOODS = [
    (CompletionRequest, {"prompt": [1] * MANY + ["a"]}),
    (CompletionRequest, {"prompt": [None] * MANY}),
    (CompletionRequest, {"prompt": [[1], ["a"] * MANY]}),
    (CompletionRequest, {**TEXT, "stop": [1] * MANY}),
    (CompletionRequest, {**TEXT, "stop_token_ids": ["a"] * MANY}),
    (CompletionRequest, {**TEXT, "logit_bias": {str(token): "a" for token in range(MANY)}}),
    (CompletionRequest, {**TEXT, **{f"field-{number}": 0 for number in range(MANY)}}),
    (ChatRequest, {"messages": [1] * MANY}),
    (ChatRequest, {"messages": [{**USER, "content": [1] * MANY}]}),
    (ChatRequest, {"messages": [{**USER, "content": "a", "tool_calls": [1] * MANY}]}),
    (ChatRequest, {**CHAT, "tools": [1] * MANY}),
    (TokenizeRequest, {"messages": [1] * MANY}),
    (TokenizeRequest, {"prompt": "a", "tools": [1] * MANY}),
    (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    (GenerateRequest, {"token_ids": ["a"] * MANY}),
    (AbortRequest, {"request_ids": [1] * MANY}),
    (UpdateInfo, {"names": [1] * MANY}),
    (UpdateInfo, {"dtype_names": [1] * MANY}),
    (UpdateInfo, {"shapes": [1] * MANY}),
    (UpdateInfo, {"shapes": [["a"] * MANY]}),
]


@pytest.mark.parametrize(("model", "body"), FLOODS)
def test_a_body_that_is_wrong_throughout_is_few_errors(model: type[Strict], body: dict[str, object]) -> None:
    """A body that is wrong throughout is few errors, as each takes far more memory than the item that it is about."""
    with pytest.raises(ValidationError) as wrong:
        model.model_validate(body)
    assert wrong.value.error_count() <= 4  # one for each form that the field may have


SMALL = {"type": "text", "text": ""}
CALLED = {"id": "a", "function": {"name": "a", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "a"}}
CROWDS = [
    (CompletionRequest, {"prompt": [[1]] * (MOST_PROMPTS + 1)}, "prompt", "65536 prompts, not 65537"),
    (CompletionRequest, {"prompt": ["a"] * (MOST_PROMPTS + 1)}, "prompt", "65536 prompts, not 65537"),
    (ChatRequest, {"messages": [USER] * 16385}, "messages", "16384 messages, not 16385"),
    (ChatRequest, {"messages": [{**USER, "content": [SMALL] * 100}] * 163}, "messages", "calls, not 16463"),
    (ChatRequest, {"messages": [{**USER, "tool_calls": [CALLED] * 16384}]}, "messages", "and calls, not 16385"),
    (TokenizeRequest, {"messages": [USER] * 16385}, "messages", "16384 messages, not 16385"),
    (ChatRequest, {**CHAT, "tools": [TOOL] * 16385}, "tools", "16384 tools, not 16385"),
    (TokenizeRequest, {"messages": [USER], "tools": [TOOL] * 16385}, "tools", "16384 tools, not 16385"),
]


@pytest.mark.parametrize(("model", "body", "field", "says"), CROWDS)
def test_too_many_items_are_counted_before_they_are_read(
    model: type[Strict], body: dict[str, object], field: str, says: str
) -> None:
    """Items of which there are too many are counted, and none is read: a million took seconds and a gigabyte."""
    with pytest.raises(ValidationError) as wrong:
        model.model_validate(body)
    [error] = wrong.value.errors()
    assert error["loc"] == (field,)
    assert says in error["msg"]


def test_as_many_items_as_there_may_be_are_read() -> None:
    """A prompt of ids may be longer than there may be prompts."""
    assert len(CompletionRequest(prompt=[1] * (MOST_PROMPTS + 1)).prompt) == MOST_PROMPTS + 1
    assert len(CompletionRequest(prompt=[[1]] * MOST_PROMPTS).prompt) == MOST_PROMPTS
    many = {"messages": [{**USER, "content": [SMALL] * 16383}], "tools": [TOOL] * 16384}
    assert len(ChatRequest.model_validate(many).tools or ()) == 16384


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b'{"prompt": "a", "temperature": NaN}', b'{"a":' * 100000, b"1" * 5000]
)
def test_what_is_no_json_is_400(served: Served, body: bytes) -> None:
    content = {"Content-Type": "application/json"}
    answer = served.http.post(served.base + COMPLETIONS, content=body, headers=content)
    assert answer.status_code in (400, 413)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "says"), [(b'{"prompt": "\xff"}', "can't decode byte 0xff"), (b'{"a":' * 30000, "recursion depth")]
)
def test_a_body_that_can_not_be_read_is_told_why(served: Served, body: bytes, says: str) -> None:
    content = {"Content-Type": "application/json"}
    answer = served.http.post(served.base + COMPLETIONS, content=body, headers=content)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_body_that_does_not_say_that_it_is_json_is_told_how(served: Served) -> None:
    """A body that does not say that it is JSON, as curl sends it unless it is told, is told how."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = served.http.post(served.base + COMPLETIONS, content=json.dumps(TEXT), headers=form)
    assert answer.status_code == 400
    assert "send the header Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_413(served: Served) -> None:
    assert served.post(COMPLETIONS, {"prompt": "a" * 200_001}).status_code == 413
    pieces = (b" " * 50_000 for _ in range(5))  # in chunks, without a length
    answer = served.http.post(served.base + COMPLETIONS, content=pieces, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_what_is_no_http_does_no_harm(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.server.port)) as raw:
        raw.sendall(b"\x16\x03\x01 no http at all\r\n\r\n")
        assert b"400" in raw.recv(1000)
    assert served.http.get(f"{served.base}/health").status_code == 200
