"""Write log-probabilities as OpenAI's two endpoints do.

Invariant: a number is the worker's float32 as it is: at the sampling temperature, before top-k, top-p and penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from samebit.rollout.requests.tokenizer import decoded

Top = dict[int, float]
_SPACE = "\u2581"
"""Stands for a space in SentencePiece's pieces."""


class TokenTexts:
    """Remembers the text of each token that was asked for. as_ids: all are written `token_id:5`, as vLLM does if
    asked for `return_tokens_as_token_ids`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, as_ids: bool = False) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._text(token)
        return self._known[token]

    def _text(self, token: int) -> str:
        """Return a token's text; `token_id:5` where the tokenizer has none."""
        text = "" if self._tokenizer is None else _text_of(self._tokenizer, token)
        return text or f"token_id:{token}"


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a token behind others: SentencePiece's decoders take a space from where a text begins. A
    special token has the text that it is written as."""
    text = decoded(tokenizer, [token]) or decoded(tokenizer, [token], skip_special=False)
    piece: str | None = tokenizer.convert_ids_to_tokens([token])[0]
    if piece is None or text.startswith(_SPACE):
        return text
    lacking = _leading(piece, _SPACE) - _leading(text, " ")
    return " " * lacking + text


def _leading(text: str, character: str) -> int:
    return len(text) - len(text.lstrip(character))


def of_completion(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Top | None] | None,
    offset: int = 0,
) -> dict[str, Any]:
    """Return the `logprobs` of /v1/completions: parallel lists. The alternatives of a token are as many as were asked
    for, and the token itself. offset: of the text."""
    names = [texts[token] for token in token_ids]
    offsets: list[int] = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "tokens": names,
        "token_logprobs": list(logprobs),
        "top_logprobs": [
            None if logprob is None else _by_text(texts, token, {**(other or {}), token: logprob})
            for token, logprob, other in zip(token_ids, logprobs, top or [None] * len(token_ids), strict=True)
        ],
        "text_offset": offsets,
    }


def of_chat(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Top] | None, count: int
) -> dict[str, Any]:
    """Return the `logprobs` of /v1/chat/completions: an object a token."""
    content = []
    for index, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        best = ranked(top[index])[:count] if top is not None and count else []
        content.append({**_one(texts, token, logprob), "top_logprobs": [_one(texts, *pair) for pair in best]})
    return {"content": content, "refusal": None}


def ranked(top: Top) -> list[tuple[int, float]]:
    """Return alternatives, the likeliest first, the lower id on ties."""
    return sorted(top.items(), key=lambda pair: (-pair[1], pair[0]))


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text = texts[token]
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _by_text(texts: TokenTexts, token: int, top: Top) -> dict[str, float]:
    """Name a token and its alternatives by their text. Where several have one, as parts of characters have, it is the
    name of the token itself, or of the likeliest of them; the others are called `token_id:5`."""
    owners = {texts[token]: token}
    for other, _ in ranked(top):
        owners.setdefault(texts[other], other)
    names = {owner: text for text, owner in owners.items()}
    return {names.get(one, f"token_id:{one}"): logprob for one, logprob in ranked(top)}
