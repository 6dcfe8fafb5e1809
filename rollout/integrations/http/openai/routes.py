"""List OpenAI's endpoints, and vLLM's for a tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from samebit.rollout.integrations.http.errors import ApiError, ErrorAnswer, JsonAnswer
from samebit.rollout.integrations.http.openai.answers import (
    ChatAnswer,
    CompletionAnswer,
    ModelsAnswer,
    TextAnswer,
    TokensAnswer,
)
from samebit.rollout.integrations.http.openai.chat import chat
from samebit.rollout.integrations.http.openai.completions import complete
from samebit.rollout.integrations.http.openai.prompts import apart, chat_text, heard, token_ids
from samebit.rollout.integrations.http.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from samebit.rollout.integrations.http.service import Service
from samebit.rollout.requests.tokenizer import decoded

_OF_MESSAGES = {
    name: TokenizeRequest.model_fields[name].default
    for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
}
"""Lists the fields of /tokenize that say something of a conversation alone, with what they are where nobody asks."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 409, 413, 422, 429, 500, 502, 503, 504)
}


def routes(service: Service) -> APIRouter:
    """Return the endpoints of this service."""
    router = APIRouter(responses=ERRORS)

    @router.post("/v1/completions", response_model=CompletionAnswer)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        """Continue prompts; a stream of `CompletionPiece` with `stream`."""
        return await complete(service, asked, request)

    @router.post("/v1/chat/completions", response_model=ChatAnswer)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        """Answer a conversation; a stream of `ChatPiece` with `stream`."""
        return await chat(service, asked, request)

    @router.get("/v1/models", response_model=ModelsAnswer)
    async def models() -> Response:
        """List the model that is served, and its adapters."""
        adapters = [_adapter(service, name) for name in service.adapters]
        return JsonAnswer({"object": "list", "data": [_model(service), *adapters]})

    @router.post("/tokenize", response_model=TokensAnswer)
    async def tokenize(asked: TokenizeRequest) -> Response:
        """Return the ids of a text or a conversation."""
        service.adapter_of(asked.model)
        return JsonAnswer(await _tokens(service, asked))

    @router.post("/detokenize", response_model=TextAnswer)
    async def detokenize(asked: DetokenizeRequest) -> Response:
        """Return the text of ids, special ones included."""
        service.adapter_of(asked.model)
        return JsonAnswer({"prompt": await _text(service, asked.tokens)})

    return router


def _adapter(service: Service, name: str) -> dict[str, Any]:
    root = service.model.adapter_folders.get(name, name)
    return {**_model(service), "id": name, "root": root, "parent": service.model.name}


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "samebit",
        "root": service.model.name,
        "parent": None,
        "max_model_len": service.worker.limits.max_model_len,
        "weight_version": service.worker.weight_version,
    }


async def _tokens(service: Service, asked: TokenizeRequest) -> dict[str, Any]:
    if (asked.prompt is None) == (not asked.messages):
        raise ApiError(400, "either prompt or messages is given, with something in it", param="prompt")
    if asked.messages:
        text = await chat_text(service, asked, heard(service, asked))
    elif of_messages := [name for name, usual in _OF_MESSAGES.items() if vars(asked)[name] != usual]:
        raise ApiError(400, f"{', '.join(of_messages)} go with messages, and a prompt was given", param=of_messages[0])
    else:
        text = asked.prompt or ""
    special = asked.prompt is not None if asked.add_special_tokens is None else asked.add_special_tokens
    ids = await token_ids(service, text, special=special)
    tokenizer = service.need_tokenizer()
    names = await apart(lambda: tokenizer.convert_ids_to_tokens(ids), len(ids)) if asked.return_token_strs else None
    limit = service.worker.limits.max_model_len
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names}


async def _text(service: Service, ids: list[int]) -> str:
    tokenizer, most = service.need_tokenizer(), service.worker.limits.vocab_size
    bad = next((token for token in ids if token >= most), None)
    if bad is not None:
        raise ApiError(400, f"token id {bad} is outside the vocabulary (0 to {most - 1})", param="tokens")
    return await apart(lambda: decoded(tokenizer, ids, skip_special=False), len(ids)) if ids else ""
