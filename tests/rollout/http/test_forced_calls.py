"""`tool_choice` of "required" or a named function constrains an answer to calls, which are read as they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from samebit.rollout import RolloutConfig, RolloutWorker
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.openai.answers import ChatAnswer, ChatPiece
from samebit.rollout.integrations.http.openai.forced_calls import NamedCall, RequiredCalls
from samebit.rollout.integrations.http.openai.tools import Parsed, ToolParser
from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.settings import ServeSettings
from samebit.weight_sync.transports.addresses import Sources

from ..conftest import FakeRunner
from ..fleet.local_fleet import LocalPort
from .served import NAME, Served, byte_tokenizer

CHATS = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "ab, please"}]


def tool(name: str, values: list[object], **more: object) -> Any:
    """Return a tool of one argument, `x`, that takes one of these values, which its `$defs` hold."""
    parameters = {
        "type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"], "additionalProperties": False,
        "$defs": {"X": {"enum": values}}, "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


VALUES: dict[str, list[object]] = {"add": [1, 22], 'say "é"': ["}", "{\n", '"\\', "😀"]}
TOOLS = [tool(name, values) for name, values in VALUES.items()]
"""Have definitions of one name that differ, and values in which a quote or a brace stands."""
NAMED: Any = {"type": "function", "function": {"name": 'say "é"'}}
CLOSE = byte_tokenizer().convert_tokens_to_ids("]")
ASKED: dict[str, Any] = {
    "model": NAME, "messages": USER, "tools": TOOLS, "max_tokens": 400, "seed": 5, "logit_bias": {str(CLOSE): 3},
}  # fmt: skip


def calls_of(answer: ChatCompletion | dict[str, Any]) -> list[list[tuple[str, str]]]:
    """Return the calls of each choice."""
    whole = ChatAnswer.model_validate(answer if isinstance(answer, dict) else answer.model_dump())
    messages = [choice.message for choice in whole.choices]
    return [[(call.function.name, call.function.arguments) for call in one.tool_calls or ()] for one in messages]


def streamed(served: Served, **asked: Any) -> tuple[list[list[tuple[str, str]]], list[str | None]]:
    """Return the calls of each choice of a stream, and why it ended. A call has its id and name first, once."""
    calls: list[list[list[str]]] = [[] for _ in range(asked.get("n", 1))]
    ended: list[str | None] = [None] * len(calls)
    for piece in served.client.chat.completions.create(**asked, stream=True):
        ChatPiece.model_validate(piece.model_dump())
        for choice in piece.choices:
            ended[choice.index] = choice.finish_reason or ended[choice.index]
            assert not choice.delta.content
            for part in choice.delta.tool_calls or ():
                own = calls[choice.index]
                if part.id is not None:
                    assert (part.index, part.type) == (len(own), "function")
                    own.append([part.function.name, ""])
                assert part.index == len(own) - 1
                assert part.id is not None or (part.function.name, part.type) == (None, None)
                own[-1][1] += part.function.arguments
    return [[(name, arguments) for name, arguments in own] for own in calls], ended


def test_a_named_function_is_called(served: Served) -> None:
    """A named function is called once by each sample, as a stream says it; the finish reason is that of OpenAI."""
    asked = {**ASKED, "n": 8, "tool_choice": NAMED, "logprobs": True, "extra_body": {"return_token_ids": True}}
    answer = served.client.chat.completions.create(**asked)
    calls = calls_of(answer)
    assert {name for own in calls for name, _ in own} == {'say "é"'}
    assert {json.loads(arguments)["x"] for [(_, arguments)] in calls} == set(VALUES['say "é"'])
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert {choice.message.content for choice in answer.choices} == {None}
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls}) == 8
    for choice, [(_, arguments)] in zip(answer.choices, calls, strict=True):
        assert byte_tokenizer().decode(choice.token_ids) == f"{arguments}<|im_end|>"
        assert len(choice.logprobs.content) == len(choice.token_ids)
    assert streamed(served, **asked) == (calls, ["stop"] * 8)


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_call_is_required(served: Served, parallel: bool | None) -> None:
    """Each sample has at least one call, of any tool, and with `parallel_tool_calls=false` one. Arguments are of the
    schema of their own tool, though others have definitions of the same name."""
    more = {} if parallel is None else {"parallel_tool_calls": parallel}
    asked = {**ASKED, "n": 16, "tool_choice": "required", **more}
    answer = served.client.chat.completions.create(**asked)
    calls = calls_of(answer)
    for name, arguments in (call for own in calls for call in own):
        assert json.loads(arguments).keys() == {"x"}
        assert json.loads(arguments)["x"] in VALUES[name]
    assert {name for own in calls for name, _ in own} == set(VALUES)
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert {choice.message.content for choice in answer.choices} == {None}
    counts = [len(own) for own in calls]
    assert min(counts) == 1
    assert max(counts) == 1 if parallel is False else max(counts) > 1
    assert streamed(served, **asked) == (calls, ["tool_calls"] * 16)


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(served: Served) -> None:
    """What was cut is told as far as it came, whole or streamed, under the reason that cut it; before a call's
    arguments nothing is."""
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    [[(name, arguments)]] = calls_of(served.client.chat.completions.create(**asked))
    written = arguments.encode()  # a token a byte
    begun = len(f'[{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '.encode())
    for count in (1, begun - 1, begun, begun + 1, begun + 4, begun + len(written), begun + len(written) + 1):
        short = {**asked, "max_tokens": count}
        answer = served.client.chat.completions.create(**short)
        told = [] if count < begun else [(name, written[: count - begun].decode())]
        assert (calls_of(answer), answer.choices[0].finish_reason) == ([told], "length")
        assert answer.choices[0].message.content == (None if told else "")
        assert streamed(served, **short) == ([told], ["length"])
    stopped = served.client.chat.completions.create(**asked, stop=['"x"'])
    assert (calls_of(stopped), stopped.choices[0].finish_reason) == ([[(name, "{")]], "stop")
    assert streamed(served, **asked, stop=['"x"']) == ([[(name, "{")]], ["stop"])
    named = {**ASKED, "tool_choice": NAMED, "max_tokens": 3}
    assert streamed(served, **named) == ([[('say "é"', '{"x')]], ["length"])


def test_arguments_are_an_object_without_a_schema(served: Served) -> None:
    """A tool without parameters takes any object, and one whose schema names no type takes objects alone."""
    bare = {"type": "function", "function": {"name": "go"}}
    untyped = {"type": "function", "function": {"name": "go", "parameters": {"required": ["a"]}}}
    for one in (bare, untyped):
        for choice in ("required", {"type": "function", "function": {"name": "go"}}):
            asked = {**ASKED, "tools": [one], "tool_choice": choice, "max_tokens": 60, "n": 4}
            for [(name, arguments), *_] in calls_of(served.client.chat.completions.create(**asked)):
                assert (name, arguments[:1]) == ("go", "{")


def test_what_constrained_calls_alone_can_honour_is_taken_of_them(served: Served) -> None:
    """A tool may be `strict` where its calls are constrained, and the format of the answer may be text."""
    asked = {**ASKED, "tools": [tool("add", [1], strict=True)], "response_format": {"type": "text"}}
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        answer = served.client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        assert calls_of(answer) == [[("add", '{"x":1}')]]


NAMES = [
    "\x7f",
    "\x00\t\n\x1b",
    "a b/c.d-e",
    "\u2028\ufeff",
    "\U0001f600",
    '"\\\\"',
    "",
    "<|im_start|>",
    "a<|im_end|>b",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_may_have_any_name(served: Served, name: str) -> None:
    """A tool may have any name, as in vLLM, that of a special token too, and its calls have that name."""
    for choice in ("required", {"type": "function", "function": {"name": name}}):
        asked = {**ASKED, "tools": [tool(name, [1])], "tool_choice": choice, "parallel_tool_calls": False}
        assert calls_of(served.client.chat.completions.create(**asked)) == [[(name, '{"x":1}')]]
        assert streamed(served, **asked) == ([[(name, '{"x":1}')]], ["stop" if choice != "required" else "tool_calls"])


@pytest.mark.parametrize("cut", [False, True])
def test_a_session_goes_on_from_the_ids_of_a_call(served: Served, cut: bool) -> None:
    """A turn goes on from the ids of the calls of the one before, also of one that was cut off."""
    more = {"extra_body": {"return_token_ids": True}, "extra_headers": {"X-Session-ID": f"calls {cut}"}}
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    first = served.client.chat.completions.create(**{**asked, "max_tokens": 40 if cut else 400}, **more)
    assert first.choices[0].finish_reason == ("length" if cut else "tool_calls")
    said = first.choices[0].message.model_dump(exclude_none=True)
    assert len(said["tool_calls"]) == 1
    result = {"role": "tool", "content": "3", "tool_call_id": said["tool_calls"][0]["id"]}
    second = served.client.chat.completions.create(**{**asked, "messages": [*USER, said, result]}, **more)
    start = [*first.prompt_token_ids, *first.choices[0].token_ids]
    assert second.prompt_token_ids[: len(start)] == start
    assert len(calls_of(second)[0]) == 1


def test_a_fleet_without_a_tool_parser_gives_the_same_calls(served: Served) -> None:
    """What a fleet is asked for reaches its replicas, and calls that are constrained need no parser of a model's own
    words. A schema that a replica can not compile is refused with the name of its tool."""
    tokenizer = served.service.need_tokenizer()

    def start(name: str, config: RolloutConfig) -> LocalPort:
        worker = RolloutWorker(served.folder, config=config, tokenizer=tokenizer)
        return LocalPort(ReplicaSide(Sources(), worker), FakeRunner(16))

    fleet = Fleet(start, 1, config=RolloutConfig(num_blocks=256, max_num_seqs=8))
    try:
        client = TestClient(create_app(Service(fleet, ServeSettings(), NAME, tokenizer)))
        for choice in ("required", NAMED):
            body = {**ASKED, "tool_choice": choice, "n": 2}
            assert calls_of(client.post(CHATS, json=body).json()) == calls_of(served.post(CHATS, body).json())
        bad = {"type": "function", "function": {"name": "mul", "parameters": {"not": {}}}}
        refused = client.post(CHATS, json={**ASKED, "tools": [*TOOLS, bad], "tool_choice": "required"})
        assert refused.status_code == 400
        assert 'the parameters of the tool "mul"' in refused.json()["error"]["message"]
        refused = client.post(CHATS, json=ASKED)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert "'required', or a named function" in refused.json()["error"]["message"]
    finally:
        fleet.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.text(max_size=5), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), min_size=1)


def read(parser: ToolParser, pieces: list[str]) -> Parsed:
    found = Parsed()
    for piece in pieces:
        found = found.then(parser.push(piece))
    return found.then(parser.finish())


@given(CALLS, st.lists(st.integers(0, 9)), st.booleans(), st.integers(0, 200))
@example([("a", {"}": "\\"})], [1] * 60, False, 200)
def test_calls_are_read_in_any_pieces(
    calls: list[tuple[str, dict[str, object]]], cuts: list[int], ascii_only: bool, length: int
) -> None:
    """Whatever comes together, the calls of a text are those of the whole, and of a text that is cut their begin."""
    texts = [(name, json.dumps(values, ensure_ascii=ascii_only)) for name, values in calls]
    written = [f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in texts]
    whole = f"[{', '.join(written)}]"
    for text in (whole, whole[:length]):
        pieces, start = [], 0
        for cut in cuts:
            pieces.append(text[start : start + cut])
            start += cut
        found = read(RequiredCalls(), [*pieces, text[start:]])
        told = [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]
        assert found.finish == ("tool_calls" if text == whole else "stop")
        assert (found.content, found.arguments) == ("", "")
        if text == whole:
            assert told == texts
        elif told:
            (*before, (name, arguments)), known = told, texts[: len(told)]
            assert (before, name) == (known[:-1], known[-1][0])
            assert known[-1][1].startswith(arguments)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.lists(st.integers(0, 9)))
def test_arguments_are_read_in_any_pieces(values: dict[str, object], cuts: list[int]) -> None:
    text, pieces, start = json.dumps(values), [" "], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    [call] = read(NamedCall("add"), [*pieces, text[start:]]).calls
    assert call["function"] == {"name": "add", "arguments": text}
    assert read(NamedCall("add"), [" "]).calls == []
