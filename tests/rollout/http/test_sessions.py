"""A turn of a conversation goes on from the right token ids, and keeping them costs little."""

from __future__ import annotations

import asyncio
import gc
import sys
from types import FunctionType, ModuleType

from samebit.rollout.integrations.http.openai.requests import Message
from samebit.rollout.integrations.http.openai.sessions import Conversation, Sessions

NAME = "agent"
LONG = "word " * 200


async def render(messages: list[Message]) -> str:
    return "".join(f"<{message.role}>{message.content}" for message in messages)


async def encode(text: str) -> list[int]:
    return [1000 + ord(character) for character in text]


def said(role: str, text: str) -> Message:
    return Message.model_validate({"role": role, "content": text})


def answered(sessions: Sessions, messages: list[Message], text: str, ids: list[int]) -> list[int]:
    """Ask with these messages, and note an answer of these ids; return the ids of the prompt."""
    asked = Conversation(list(messages), "")
    prompt = asyncio.run(sessions.prompt(NAME, asked, render, encode))
    sessions.note(NAME, asked, said("assistant", text), prompt + ids)
    return prompt


def num_bytes(kept: object) -> int:
    """Return the memory of an object and of all that it holds, but for code."""
    found, left = dict[int, object](), [kept]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, type | FunctionType | ModuleType):
            found[id(one)] = one
            left += gc.get_referents(one)
    return sum(map(sys.getsizeof, found.values()))


def test_each_turn_goes_on_from_the_ids_of_the_one_before() -> None:
    """Each turn goes on from the ids of the one before, also of those that are kept no longer by themselves, and of two
    that go on from one.
    """
    sessions, messages, known = Sessions(most=1), [said("user", "0")], []
    for turn in range(40):
        prompt = answered(sessions, messages, "yes", [turn, turn + 1])
        assert prompt[: len(known)] == known
        assert prompt[len(known) :] == asyncio.run(encode(f"<user>{turn}"))
        known = [*prompt, turn, turn + 1]
        messages += [said("assistant", "yes"), said("user", str(turn + 1))]
    branch = [*messages[:-1], said("user", "another")]
    assert answered(sessions, branch, "no", [7]) == known + asyncio.run(encode("<user>another"))
    assert answered(sessions, messages, "no", [8]) == known + asyncio.run(encode("<user>40"))
    more = [*branch, said("assistant", "no"), said("user", "on")]
    prompt = answered(sessions, more, "", [9])
    assert prompt == [*known, *asyncio.run(encode("<user>another")), 7, *asyncio.run(encode("<user>on"))]


def test_a_turn_that_was_not_made_from_the_one_before_has_its_own_ids() -> None:
    """A turn that was not made from the one before has its own ids: of two calls of one session at once, the second was
    rendered before the first was noted.
    """
    sessions, first = Sessions(most=1), [said("user", "a")]
    second = [*first, said("assistant", "b"), said("user", "c")]
    answered(sessions, first, "b", [1])
    sessions.note(NAME, Conversation(second, ""), said("assistant", "d"), [5, 6, 7])
    third = [*second, said("assistant", "d"), said("user", "e")]
    assert answered(sessions, third, "f", [2]) == [5, 6, 7, *asyncio.run(encode("<user>e"))]


def test_an_answer_that_has_ended_is_continued_from_the_ids_of_the_turn_before_it() -> None:
    sessions, messages = Sessions(most=1), [said("user", "a")]
    known = [*answered(sessions, messages, "b", [1]), 1]
    messages += [said("assistant", "b"), said("user", "c")]
    answered(sessions, messages, "d", [2])
    asked = Conversation([*messages, said("assistant", "d")], "", continued=True)
    prompt = asyncio.run(sessions.prompt(NAME, asked, render, encode))
    assert prompt == known + asyncio.run(encode("<user>c<assistant>d"))


def test_a_continuation_is_part_of_the_answer_that_it_continues() -> None:
    """A client appends it to its message: it is continued again from its ids, and the next turn goes on from them."""
    sessions, ask = Sessions(most=1), said("user", "a")
    asked, said_so_far, known = Conversation([ask], ""), "", asyncio.run(encode("<user>a"))
    for number, text in enumerate(["b", " c", " d"]):
        assert asyncio.run(sessions.prompt(NAME, asked, render, encode)) == known
        known = [*known, number]
        sessions.note(NAME, asked, said("assistant", text), known, ended=False)
        said_so_far += text
        asked = Conversation([ask, said("assistant", said_so_far)], "", continued=True)
    messages = [ask, said("assistant", said_so_far), said("user", "e")]
    prompt = answered(sessions, messages, "f", [9])
    assert prompt == known + asyncio.run(encode("<user>e"))


def test_the_answer_to_a_user_s_message_that_is_continued_is_a_message() -> None:
    sessions, begun = Sessions(most=1), said("user", "a")
    known = [*asyncio.run(encode("<user>a")), 1]
    sessions.note(NAME, Conversation([begun], "", continued=True), said("assistant", "b"), known)
    messages = [begun, said("assistant", "b"), said("user", "c")]
    assert answered(sessions, messages, "d", [2]) == known + asyncio.run(encode("<user>c"))


def test_a_conversation_keeps_each_id_once_in_four_bytes() -> None:
    sessions, ids, turns = Sessions(most=1), list[int](), 16
    messages = [said("user", LONG)]
    for turn in range(turns):
        ids += range(5000 * turn, 5000 * turn + 4000)
        answer = said("assistant", f"{turn} {LONG}")
        sessions.note(NAME, Conversation(list(messages), ""), answer, list(ids))
        messages += [answer, said("user", f"{turn} {LONG}")]
    assert 4 * len(ids) < num_bytes(sessions) < 4 * len(ids) + turns * len(LONG)
