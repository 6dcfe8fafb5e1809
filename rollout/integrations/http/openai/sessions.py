"""Keep the token ids of conversations, so that a turn goes on from the ids of the turn before it.

A chat template renders a conversation anew each turn, and a tokenizer may split the model's own words otherwise than
the model wrote them. Then the ids of the next prompt are not the ids that were sampled: neither the cache nor the
trainer sees one sequence.

Invariants
----------
* With a session, a turn whose first messages are those of an earlier turn and its answer begins with the very ids of
  that turn; only what is behind them is tokenized. Other tools, or other arguments of the template, stand in no ids of
  an earlier turn: with them a conversation is rendered anew.
* An answer that is to be continued begins with its own ids only where it was cut off: others have their end in them.
  Its continuation is part of it: a client appends that to its message.
* At most `most` conversations are kept, the least recently used ones go first.
* What a turn takes over from the turn that it goes on from is kept once: four bytes a token, and no text.
"""

from __future__ import annotations

import uuid
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.openai.requests import Message

Render = Callable[[list[Message]], Awaitable[str]]
Encode = Callable[[str], Awaitable[list[int]]]


@dataclass(frozen=True)
class Conversation:
    """Holds what a chat template shows: messages, and what it gets `beside` them. continued: the last one goes on."""

    messages: list[Message]
    beside: str
    continued: bool = False

    def digests(self) -> list[bytes]:
        """Return what its first messages are known by, none of them first."""
        found = [_digest(self.beside.encode())]
        for message in self.messages:
            found.append(_digest(found[-1] + _key(message).encode()))
        return found

    def answered(self, digests: list[bytes], answer: Message) -> tuple[int, bytes]:
        """Return how many its messages are with an answer, and what they are known by. digests: of its own."""
        if self.continued and self.messages[-1].role == "assistant":
            digests, answer = digests[:-1], _joined(self.messages[-1], answer)
        return len(digests), _digest(digests[-1] + _key(answer).encode())


@dataclass(frozen=True, eq=False)
class Turn:
    """Holds the ids of a conversation with its answer. length: their messages; digest: what they are known by.

    before: the turn with whose ids it begins; added: the ids behind those. ended: its answer was not cut off.
    """

    length: int
    digest: bytes
    before: Turn | None
    added: array[int]
    ended: bool

    @property
    def token_ids(self) -> list[int]:
        parts, turn = [self.added], self.before
        while turn is not None:
            parts.append(turn.added)
            turn = turn.before
        return [token for part in reversed(parts) for token in part]


class Sessions:
    """Knows the last turns of conversations, by the name that clients give them (`X-Session-ID`)."""

    def __init__(self, most: int, per_session: int = 16) -> None:
        self._most = most
        self._per_session = per_session
        self._turns: OrderedDict[str, list[Turn]] = OrderedDict()

    async def prompt(self, name: str, asked: Conversation, render: Render, encode: Encode) -> list[int]:
        """Return the ids of a conversation. A session whose turns it does not go on from is begun anew."""
        messages = asked.messages
        turn = self._longest(name, asked.digests(), asked.continued)
        if turn is None:
            return await encode(await render(messages))
        known, before = turn.length, turn.token_ids
        mark = f"[{uuid.uuid4().hex}]"
        answer = Message(role="assistant", content=mark)
        text = await render([*messages[: known - 1], answer, *messages[known:]])
        if text.count(mark) != 1:
            raise ApiError(400, "the chat template does not show an answer as it was given: leave out X-Session-ID")
        rest = await encode(text.partition(mark)[2])
        ended = bool(rest) and before[-1] == rest[0]
        return before + (rest[1:] if ended else rest)

    def note(
        self, name: str, asked: Conversation, answer: Message, token_ids: list[int], *, ended: bool = True
    ) -> None:
        """Keep a turn: what was asked, what was answered, and the ids of both. ended: the answer was not cut off."""
        digests = asked.digests()
        before = self._longest(name, digests, asked.continued)
        known = [] if before is None else before.token_ids
        if token_ids[: len(known)] != known:  # the prompt was made without that turn
            before, known = None, []
        length, digest = asked.answered(digests, answer)
        turn = Turn(length, digest, before, array("i", token_ids[len(known) :]), ended)
        turns = self._turns.setdefault(name, [])
        self._turns.move_to_end(name)
        turns.append(turn)
        del turns[: -self._per_session]
        while len(self._turns) > self._most:
            self._turns.popitem(last=False)

    def _longest(self, name: str, digests: list[bytes], continued: bool) -> Turn | None:
        """Return the turn that has most of the messages that are known by these digests. continued: the last one is."""
        turns = [turn for turn in self._turns.get(name, ()) if turn.digest in digests[turn.length : turn.length + 1]]
        if continued:
            turns = [turn for turn in turns if not turn.ended or turn.length < len(digests) - 1]
        return max(turns, key=lambda turn: turn.length, default=None)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _joined(begun: Message, more: Message) -> Message:
    """Return an answer with what continues it."""
    calls = [*(begun.tool_calls or ()), *(more.tool_calls or ())]
    return begun.model_copy(update={"content": begun.text + more.text, "tool_calls": calls or None})


def _key(message: Message) -> str:
    """Return what a message is compared by; a client that sends back an answer may leave out empty fields."""
    return message.model_copy(update={"content": message.text}).model_dump_json(
        exclude_none=True, exclude={"reasoning_content"}
    )
