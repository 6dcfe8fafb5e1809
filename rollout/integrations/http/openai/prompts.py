"""Make token ids of what is asked: texts, ids, conversations.

Invariants
----------
* What a tokenizer or a chat template raises over a text is the caller's error, with its words. A file that is no
  template is not: it is found before anything is served.
* A message of a developer is shown: in the role "system" where the template does not know that of developers.
* Long texts are tokenized in a thread, and so are many short ones, and many tokens are decoded in one: the other
  requests go on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from samebit.rollout.checks import shown
from samebit.rollout.integrations.http.errors import ApiError
from samebit.rollout.integrations.http.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from samebit.rollout.integrations.http.service import Prompt, Service
from samebit.rollout.requests.tokenizer import decoded

LONG = 1 << 14
"""Texts of more characters together are tokenized in a thread, and more tokens decoded in one."""
_OURS = frozenset(
    (
        "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "messages",
    )
)  # fmt: skip
"""Names what a chat template gets from elsewhere."""
_ABOVE_USERS = ("system", "developer")
Chat = ChatRequest | TokenizeRequest
T = TypeVar("T")


async def completion_prompts(service: Service, asked: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a completion, in their order."""
    given = asked.prompt
    if isinstance(given, str):
        many: list[Any] = [given]
    else:
        many = [given] if isinstance(given[0], int) else list(given)
    if len(many) > service.settings.max_prompts:
        raise ApiError(
            400, f"at most {service.settings.max_prompts} prompts are allowed here, got {len(many)}", param="prompt"
        )
    characters = sum(len(one) for one in many if isinstance(one, str))
    return await apart(lambda: [_prompt(service, one, asked.add_special_tokens) for one in many], characters)


async def token_ids(service: Service, text: str, *, special: bool) -> list[int]:
    """Return the ids of a text. `special`: add the tokens that the tokenizer puts around a text."""
    return await apart(lambda: _encoded(service, text, special), len(text))


async def prompt_texts(service: Service, prompts: list[Prompt]) -> list[str]:
    """Return the texts of prompts; those that came as ids are decoded."""
    size = sum(len(prompt.token_ids) for prompt in prompts if prompt.text is None)
    return await apart(lambda: [_text(service, one) for one in prompts], size)


def _prompt(service: Service, given: str | list[int], special: bool) -> Prompt:
    return Prompt(_encoded(service, given, special), given) if isinstance(given, str) else Prompt(given)


def _text(service: Service, prompt: Prompt) -> str:
    return decoded(service.need_tokenizer(), prompt.token_ids) if prompt.text is None else prompt.text


def _encoded(service: Service, text: str, special: bool) -> list[int]:
    tokenizer = service.need_tokenizer()
    try:
        text.encode()
        ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # boundary: a tokenizer raises what it likes
        raise ApiError(400, f"the tokenizer can not encode {shown(text)}: {error}", param="prompt") from error
    return ids


async def apart(work: Callable[[], T], size: int) -> T:
    """Do what is to be done with so many characters or tokens: in a thread, where that takes long."""
    return await asyncio.to_thread(work) if size > LONG else work()


def read_template(file: str | None, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the chat template that a file holds; None where none is named.

    Raises:
        ValueError: the file can not be read, or is no template.
    """
    if file is None:
        return None
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={file!r} can not be read: {error}") from error
    if tokenizer is not None:
        _check_compiles(file, template, tokenizer)
    return template


def _check_compiles(file: str, template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template={file!r} is no Jinja template: {error.message} (line {error.lineno})"
        ) from error
    except Exception:  # boundary: a template raises what it likes
        pass  # that it does not show this message says nothing about others


def heard(service: Service, asked: Chat) -> list[Message]:
    """Return the messages of a conversation in roles that its template knows.

    Where it has no word for developers, as Qwen's, it would leave out what they say without an error. Then that becomes
    part of one system message, which is the first, since some templates take none behind others. vLLM does the same.
    """
    messages = asked.messages or []
    if all(message.role != "developer" for message in messages) or _knows_developers(service, asked):
        return messages
    service.log_once("the chat template knows no role 'developer': its messages are shown as 'system'")
    rest = [message for message in messages if message.role not in _ABOVE_USERS]
    above = [message for message in messages if message.role in _ABOVE_USERS]
    said = "\n\n".join(words for message in above if (words := message.text))
    first = above[0].model_copy(update={"role": "system", "content": said})
    return [first, *rest]


def _knows_developers(service: Service, asked: Chat) -> bool:
    tools: Any = described(asked.tools) if asked.tools else None
    try:
        template = service.need_tokenizer().get_chat_template(service.model.chat_template, tools)
    except Exception:  # boundary: there is none, and rendering says so
        return True
    return "'developer'" in template or '"developer"' in template


async def chat_text(service: Service, asked: Chat, messages: list[Message]) -> str:
    """Return the text that the chat template makes of a conversation."""
    tokenizer = service.need_tokenizer()
    extra = asked.chat_template_kwargs or {}
    if taken := sorted(_OURS & extra.keys()):
        raise ApiError(400, f"chat_template_kwargs may not have {', '.join(taken)}", param="chat_template_kwargs")
    if asked.add_generation_prompt and asked.continue_final_message:
        raise ApiError(
            400, "continue_final_message goes with add_generation_prompt=false", param="continue_final_message"
        )
    tools: Any = described(asked.tools) if asked.tools else None

    def render() -> str:
        try:
            text: object = tokenizer.apply_chat_template(
                [plain(message) for message in messages],
                tools=tools,
                chat_template=service.model.chat_template,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # boundary: a template raises what it likes
            raise ApiError(
                400, f"the chat template can not render these messages: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    return await asyncio.to_thread(render) if len(messages) > 64 else render()


def described(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools as templates take them."""
    return [tool.model_dump(exclude_none=True, by_alias=True) for tool in tools]


def plain(message: Message) -> dict[str, Any]:
    """Return a message as templates take it: text parts joined, arguments of calls as what their JSON says."""
    given = {**message.model_dump(exclude_none=True), "content": message.text}
    for call in given.get("tool_calls", ()):
        call["function"]["arguments"] = _meant(call["function"]["arguments"])
    return given


def _meant(arguments: str) -> Any:
    """Return the value of a call's arguments; as they are written where they are no JSON.

    A model wrote them so. They are in every later turn, so to refuse them would end the conversation, and `{}` in their
    place would be another one.
    """
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
