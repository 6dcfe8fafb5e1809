"""OpenAI's endpoints answer the real client over a real socket."""

from __future__ import annotations

import http.client
import json
import struct
import threading

import openai
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from transformers import AutoModelForCausalLM

from samebit.kernels import bind, token_logprobs
from samebit.rollout import SamplingParams
from samebit.rollout.integrations.http.openai.answers import ChatAnswer, ChatPiece, CompletionAnswer, CompletionPiece

from ...patience import wait_until
from ..held_steps import held_steps
from .served import CALL, NAME, Served

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "ab, please"}]
Turn = tuple[list[int], list[int], str]


def bits(value: float) -> bytes:
    """Return the bits of a float32 that came as a JSON number; nothing may have been rounded."""
    packed = struct.pack("f", value)
    assert struct.unpack("f", packed)[0] == value
    return packed


def test_log_probabilities_through_http_are_the_trainers_bits(served: Served) -> None:
    prompts = [[1, 5, 9], list(range(40)), [7] * 17]
    version = served.service.versions.name(served.service.worker.weight_version)
    answer = served.client.completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=33, temperature=0.7, top_p=0.9, seed=3, logprobs=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == list(range(6))
    policy = bind(AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32))
    for choice in answer.choices:
        ids = [*choice.prompt_token_ids, *choice.token_ids]
        assert choice.prompt_token_ids == prompts[choice.index // 2]
        expected = token_logprobs(policy, torch.tensor([ids]), temperature=0.7)[0, -33:].detach()
        assert [bits(x) for x in choice.logprobs.token_logprobs] == [bits(x) for x in expected.tolist()]
        assert choice.weight_versions == [{"version": version, "start": 0, "end": 33}]


def test_http_gives_what_the_worker_gives(served: Served) -> None:
    params = SamplingParams(max_tokens=20, seed=11, n=3, stop=["e"], presence_penalty=0.5, frequency_penalty=0.25)
    ours = served.service.worker.generate([served.service.need_tokenizer()("hello")["input_ids"]], params)[0]
    theirs = served.client.completions.create(
        model=NAME, prompt="hello", max_tokens=20, seed=11, n=3, stop=["e"], presence_penalty=0.5,
        frequency_penalty=0.25, logprobs=0, extra_body={"return_token_ids": True},
    )  # fmt: skip
    for mine, choice in zip(ours.samples, theirs.choices, strict=True):
        assert choice.token_ids == mine.token_ids
        assert choice.logprobs.token_logprobs == mine.logprobs
        assert (choice.finish_reason, choice.stop_reason) == (mine.finish_reason, mine.stop_reason)
        assert choice.text == mine.text


@pytest.mark.parametrize("more", [{}, {"stop": ["q", "zz", "xy"]}, {"stop": "k", "extra_body": {"min_tokens": 30}}])
def test_a_stream_is_the_whole_in_pieces(served: Served, more: dict[str, object]) -> None:
    asked = {"model": NAME, "prompt": ["aab", "b"], "n": 4, "max_tokens": 60, "seed": 5, "logprobs": 1, **more}
    whole = served.client.completions.create(**asked)
    texts, logprobs, reasons = [""] * 8, [[] for _ in range(8)], [None] * 8
    stream = served.client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    usage = None
    for piece in stream:
        CompletionPiece.model_validate(piece.model_dump(exclude_unset=True))
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    CompletionAnswer.model_validate(whole.model_dump(exclude_unset=True))


def test_a_chat_is_streamed_as_it_is_answered(served: Served) -> None:
    asked = {"model": NAME, "messages": USER, "n": 2, "max_completion_tokens": 40, "seed": 9}
    whole = served.client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    ChatAnswer.model_validate(whole.model_dump(exclude_unset=True))
    texts, roles = ["", ""], ["", ""]
    for piece in served.client.chat.completions.create(**asked, stream=True):
        ChatPiece.model_validate(piece.model_dump(exclude_unset=True))
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    entry = whole.choices[0].logprobs.content[0]
    assert len(entry.top_logprobs) == 3
    assert entry.top_logprobs[0].logprob >= entry.top_logprobs[2].logprob


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_stream_says_the_versions_of_its_tokens_at_the_end(served: Served, endpoint: str) -> None:
    what = {"prompt": "ab"} if endpoint == "completions" else {"messages": USER}
    asked = {**what, "max_tokens": 7, "n": 2, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    whole = served.post(f"/v1/{endpoint}", asked).json()["choices"]
    with served.http.stream("POST", f"{served.base}/v1/{endpoint}", json={**asked, "stream": True}) as answer:
        pieces = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line[6:7] == "{"]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    last = {choice["index"]: choice for choice in choices}
    assert [last[index]["weight_versions"] for index in range(2)] == [choice["weight_versions"] for choice in whole]
    assert sum("weight_versions" in choice for choice in choices) == 2


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_ignore_eos_is_honoured_on_both_endpoints(served: Served, endpoint: str) -> None:
    eos = served.service.need_tokenizer().eos_token_id
    what = {"prompt": "a"} if endpoint == "completions" else {"messages": USER}
    asked = {**what, "max_tokens": 7, "logit_bias": {str(eos): 100}, "return_token_ids": True}
    ended = served.post(f"/v1/{endpoint}", asked).json()["choices"][0]
    going = served.post(f"/v1/{endpoint}", {**asked, "ignore_eos": True}).json()["choices"][0]
    assert (ended["finish_reason"], ended["token_ids"]) == ("stop", [eos])
    assert (going["finish_reason"], going["token_ids"]) == ("length", [eos] * 7)


def test_null_is_16_tokens_of_a_completion_and_what_fits_of_a_chat(served: Served) -> None:
    """A max_tokens of null gives 16 tokens of a completion and what fits of a chat, as in vLLM."""
    more = {"model": NAME, "max_tokens": None, "extra_body": {"ignore_eos": True}}
    assert served.client.completions.create(prompt="a", **more).usage.completion_tokens == 16
    messages = [{"role": "user", "content": "x" * 1980}]
    chat = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": None, "ignore_eos": True}).json()
    assert chat["usage"]["total_tokens"] == 2048


def test_cached_tokens_are_true(served: Served) -> None:
    prompt = [3] * 70
    first = served.client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
    second = served.client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
    salted = served.client.completions.create(
        model=NAME, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "another"}
    )
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second, salted)]
    assert cached == [0, 64, 0]


def test_echo_scores_a_prompt(served: Served) -> None:
    ids = [4, 8, 15, 16, 23, 42]
    answer = served.client.completions.create(model=NAME, prompt=ids, echo=True, max_tokens=0, logprobs=1)
    policy = bind(AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32))
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores == [None, *token_logprobs(policy, torch.tensor([ids]))[0].tolist()]
    assert answer.usage.completion_tokens == 0
    text = served.client.completions.create(model=NAME, prompt="ab", echo=True, max_tokens=1).choices[0].text
    assert text.startswith("ab")


def test_tokens_are_named_by_their_ids(served: Served) -> None:
    """Tokens are named by their ids when asked, as by vLLM's clients; the sampled token is among the alternatives, also
    where none was asked for.
    """
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked = {"model": NAME, "n": 2, "max_tokens": 6, "seed": 4, "extra_body": more}
    for count in (0, 2):
        for choice in served.client.completions.create(prompt="ab", logprobs=count, **asked).choices:
            names, tops = choice.logprobs.tokens, choice.logprobs.top_logprobs
            assert names == [f"token_id:{token}" for token in choice.token_ids]
            for name, logprob, top in zip(names, choice.logprobs.token_logprobs, tops, strict=True):
                assert top[name] == logprob
                assert max(count, 1) <= len(top) <= count + 1
    chats = served.client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=1, **asked)
    for choice in chats.choices:
        assert [one.token for one in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
        assert all(one.top_logprobs[0].token.startswith("token_id:") for one in choice.logprobs.content)


def test_alternatives_of_one_text_are_all_there(served: Served) -> None:
    """Alternatives of one text, as parts of characters have, are all there; the sampled token's number stands under its
    own name.
    """
    asked = {"model": NAME, "prompt": "ab", "n": 4, "max_tokens": 20, "seed": 6, "logprobs": 20}
    more = {"return_token_ids": True, "ignore_eos": True}
    by_text = served.client.completions.create(**asked, extra_body=more).choices
    by_id = served.client.completions.create(**asked, extra_body={**more, "return_tokens_as_token_ids": True}).choices
    shared = 0
    for named, numbered in zip(by_text, by_id, strict=True):
        assert named.token_ids == numbered.token_ids
        scores, all_of_them = named.logprobs, numbered.logprobs.top_logprobs
        for name, score, top, other in zip(
            scores.tokens, scores.token_logprobs, scores.top_logprobs, all_of_them, strict=True
        ):
            assert top[name] == score
            assert sorted(top.values()) == sorted(other.values())
            shared += "\ufffd" in top and any(one.startswith("token_id:") for one in top)
    assert shared


def test_tokens_and_text(served: Served) -> None:
    asked = served.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert asked["token_strs"] == ["ab", "c"]
    assert served.post("/detokenize", {"tokens": asked["tokens"]}).json() == {"prompt": "abc"}
    many = asked["tokens"] * 10_000  # decoded in a thread
    assert served.post("/detokenize", {"tokens": many}).json() == {"prompt": "abc" * 10_000}
    chat = served.post("/tokenize", {"messages": USER}).json()
    usage = served.client.chat.completions.create(model=NAME, messages=USER, max_tokens=1).usage
    assert chat["count"] == usage.prompt_tokens
    model = served.client.models.list().data[0]
    assert (model.id, model.max_model_len) == (NAME, 2048)


def test_answers_keep_to_what_they_are_constrained_to(served: Served) -> None:
    """A chat keeps to its `response_format`, and both endpoints to vLLM's `structured_outputs`, in streams too."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tight = {**schema, "x-guidance": {"whitespace_flexible": False}}
    asked = {"model": NAME, "messages": USER, "n": 2, "max_tokens": 60}
    answer = served.client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": tight, "strict": True}}
    )
    assert all(json.loads(choice.message.content)["a"] in (1, 2) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    text = served.client.chat.completions.create(**asked, response_format={"type": "json_object"}).choices[0]
    assert text.message.content.lstrip().startswith("{")
    constraint = {"structured_outputs": {"choice": ["yes", "no"]}}
    chat = served.client.chat.completions.create(**asked, extra_body=constraint, stream=True)
    written = ["", ""]
    for piece in chat:
        for choice in piece.choices:
            written[choice.index] += choice.delta.content or ""
    assert set(written) <= {"yes", "no"}
    completion = served.client.completions.create(model=NAME, prompt="x", extra_body=constraint).choices[0]
    assert completion.text in ("yes", "no")


def test_a_tool_call_is_read(served: Served) -> None:
    tokenizer = served.service.need_tokenizer()
    asked = {
        "model": NAME,
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "max_tokens": 5,
        "logit_bias": {str(tokenizer.eos_token_id): 100, str(tokenizer.convert_tokens_to_ids(CALL)): 90},
        "temperature": 0,
        "extra_body": {"min_tokens": 1},
    }
    choice = served.client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1}
    pieces = list(served.client.chat.completions.create(**asked, stream=True))
    calls = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add")]
    assert pieces[-1].choices[0].finish_reason == "tool_calls"
    plain = served.client.chat.completions.create(
        **asked, tool_choice="none", response_format={"type": "text"}
    ).choices[0]
    assert plain.message.content == CALL


def test_a_line_between_calls_is_no_content(served: Served) -> None:
    """A line between calls, as Qwen writes them, is no content: sent back, the model would not have written it."""
    call, line = served.service.need_tokenizer().convert_tokens_to_ids([CALL, "Ċ"])
    asked = {
        "model": NAME, "messages": USER, "tools": [{"type": "function", "function": {"name": "add"}}], "max_tokens": 3,
        "temperature": 0, "logit_bias": {str(call): 100, str(line): 99}, "frequency_penalty": 2,
    }  # fmt: skip
    whole = served.client.chat.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    assert whole.token_ids == [call, line, call]
    assert (whole.message.content, len(whole.message.tool_calls)) == (None, 2)
    deltas = [piece.choices[0].delta for piece in served.client.chat.completions.create(**asked, stream=True)]
    assert [delta.content for delta in deltas if delta.content] == []
    assert [one.index for delta in deltas for one in delta.tool_calls or ()] == [0, 1]


def test_a_session_goes_on_from_its_token_ids(served: Served) -> None:
    """A session goes on from its token ids: the model writes "a" and "b" as two tokens, which the tokenizer would merge
    into one.
    """
    a, b = served.service.need_tokenizer().convert_tokens_to_ids(["a", "b"])

    def turn(messages: list[ChatCompletionMessageParam], session: str | None) -> ChatCompletion:
        return served.client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=2, temperature=0, logit_bias={str(a): 100, str(b): 99},
            frequency_penalty=2, extra_body={"return_token_ids": True},
            extra_headers={} if session is None else {"X-Session-ID": session},
        )  # fmt: skip

    def going_on(said: str | None) -> list[ChatCompletionMessageParam]:
        return [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]

    first = turn(USER, "agent")
    assert first.choices[0].token_ids == [a, b]
    more = going_on(first.choices[0].message.content)
    start = [*first.prompt_token_ids, a, b]
    rendered, kept = turn(more, None), turn(more, "agent")
    assert kept.prompt_token_ids[: len(start)] == start
    assert kept.prompt_token_ids[len(start) :] == rendered.prompt_token_ids[len(start) - 1 :]
    assert rendered.prompt_token_ids[: len(start)] != start
    other = going_on("something else")
    assert turn(other, "agent").prompt_token_ids == turn(other, None).prompt_token_ids
    assert turn(more, "another").prompt_token_ids == rendered.prompt_token_ids
    turn(USER, "third")  # two are kept
    assert turn(more, "agent").prompt_token_ids == rendered.prompt_token_ids


def test_an_answer_that_has_ended_is_continued_before_its_end(served: Served) -> None:
    """An answer that has ended is continued before its end, in a session too; one that was cut off goes on from its
    very ids.
    """
    a, b, end = served.service.need_tokenizer().convert_tokens_to_ids(["a", "b", "<|im_end|>"])

    def turn(messages: list[ChatCompletionMessageParam], session: str | None, then: int, **more: object) -> Turn:
        answer = served.client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=2, temperature=0, logit_bias={str(a): 100, str(then): 99},
            frequency_penalty=2, extra_body={"return_token_ids": True, **more},
            extra_headers={} if session is None else {"X-Session-ID": session},
        )  # fmt: skip
        return answer.prompt_token_ids, answer.choices[0].token_ids, answer.choices[0].message.content

    def going_on(said: str, session: str | None) -> list[int]:
        messages = [*USER, {"role": "assistant", "content": said}]
        return turn(messages, session, b, add_generation_prompt=False, continue_final_message=True)[0]

    for then, more in ((end, {}), (b, {"stop": ["b"]})):
        _, ids, said = turn(USER, f"ended {then}", then, **more)
        assert (ids, said) == ([a, then], "a")
        assert going_on(said, f"ended {then}") == going_on(said, None)
    start, ids, said = turn(USER, "cut", b)
    assert ids == [a, b]
    assert going_on(said, "cut") == [*start, a, b] != going_on(said, None)


def test_an_answer_is_continued_again_and_again_from_its_ids(served: Served) -> None:
    """An answer is continued again, and the user's next turn goes on from all of its ids, where each continuation was
    appended to the answer.
    """
    a, b = served.service.need_tokenizer().convert_tokens_to_ids(["a", "b"])

    def turn(messages: list[ChatCompletionMessageParam], **more: object) -> list[int]:
        """Return the ids of the prompt; the answer is `ab`, of two tokens, which together are another one."""
        answer = served.client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=2, temperature=0, logit_bias={str(a): 100, str(b): 99},
            frequency_penalty=2, extra_body={"return_token_ids": True, **more},
            extra_headers={"X-Session-ID": "again and again"},
        )  # fmt: skip
        assert (answer.choices[0].token_ids, answer.choices[0].message.content) == ([a, b], "ab")
        return answer.prompt_token_ids

    start = turn(USER)
    for times in (1, 2):
        so_far = [*USER, {"role": "assistant", "content": "ab" * times}]
        assert turn(so_far, add_generation_prompt=False, continue_final_message=True) == start + [a, b] * times
    last = [*USER, {"role": "assistant", "content": "ab" * 3}, {"role": "user", "content": "go on"}]
    assert turn(last)[: len(start) + 6] == start + [a, b] * 3


def test_a_session_with_other_tools_is_rendered_anew(served: Served) -> None:
    def turn(messages: list[ChatCompletionMessageParam], session: str | None, *names: str) -> ChatCompletion:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return served.client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=1, temperature=0, tools=tools or None,
            extra_body={"return_token_ids": True}, extra_headers={} if session is None else {"X-Session-ID": session},
        )  # fmt: skip

    first = turn(USER, "tools", "add")
    said = first.choices[0].message.content
    more = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    start = [*first.prompt_token_ids, *first.choices[0].token_ids]
    assert turn(more, "tools", "add").prompt_token_ids[: len(start)] == start
    for others in ((), ("add", "multiply")):
        assert turn(more, "tools", *others).prompt_token_ids == turn(more, None, *others).prompt_token_ids


def test_a_client_that_goes_away_aborts_its_request(served: Served) -> None:
    worker = served.service.worker
    before = worker.stats()["requests_aborted"]
    with held_steps(worker) as released:
        released.release()
        stream = served.client.completions.create(
            model=NAME, prompt="a", stream=True, max_tokens=9, extra_body={"ignore_eos": True, "return_token_ids": True}
        )
        next(iter(stream))
        stream.close()
        wait_until(lambda: served.service.admission.inside == 0)
        wait_until(lambda: worker.stats()["requests_aborted"] == before + 1)
        going = http.client.HTTPConnection("127.0.0.1", served.server.port)
        body = {"model": NAME, "prompt": "a", "n": 16, "max_tokens": 9, "ignore_eos": True}
        going.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: served.service.admission.inside == 16)
        going.close()
        wait_until(lambda: served.service.admission.inside == 0)
        wait_until(lambda: worker.stats()["requests_aborted"] == before + 2)
        assert worker.stats()["running"] == 0


def test_a_full_queue_answers_429(served: Served) -> None:
    served.service.worker.pause()
    inside: list[threading.Thread] = []
    try:
        for _ in range(4):
            ask = {"model": NAME, "prompt": "a", "max_tokens": 1, "n": 16}
            inside.append(threading.Thread(target=lambda ask=ask: served.client.completions.create(**ask)))
            inside[-1].start()
        wait_until(lambda: served.service.admission.inside == 64)
        with pytest.raises(openai.RateLimitError) as refused:
            served.client.completions.create(model=NAME, prompt="a", max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
    finally:
        served.service.worker.resume()
        for thread in inside:
            thread.join()
    assert served.client.completions.create(model=NAME, prompt="a", max_tokens=1).choices
