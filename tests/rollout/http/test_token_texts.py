"""Texts and names of tokens keep their spaces, though a tokenizer's decoder takes the space from a text's begin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from samebit.rollout.integrations.http.app import create_app
from samebit.rollout.integrations.http.openai.logprobs import TokenTexts, of_chat, of_completion
from samebit.rollout.integrations.http.service import Service
from samebit.rollout.integrations.http.settings import ServeSettings

from .served import NAME

PIECES = ["<unk>", "<s>", "</s>", "\u2581the", "the", "\u2581\u2581a", "\u2581"]
END, SPACED, THE, WIDE, SPACE = range(2, 7)
BEYOND = len(PIECES)


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Return one like those of Llama 2, Mistral and Phi-3."""
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    backend = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", ignore_merges=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


@pytest.fixture
def texts() -> TokenTexts:
    return TokenTexts(spaced_tokenizer())


def test_a_token_keeps_its_space(texts: TokenTexts) -> None:
    """A token keeps its space: joined, the names are the text, and one with a space is not one without."""
    written = [THE, SPACED, WIDE, SPACE, THE]
    found = of_completion(texts, written, [-1.0] * 5, [{SPACED: -0.5}, *[None] * 4])
    assert found["tokens"] == ["the", " the", "  a", " ", "the"]
    assert found["text_offset"] == [0, 3, 7, 10, 11]
    assert found["top_logprobs"][0] == {"the": -1.0, " the": -0.5}
    (chat,) = of_chat(texts, [SPACED], [-1.0], [{THE: -2.0}], 1)["content"]
    assert (chat["token"], bytes(chat["bytes"]), chat["top_logprobs"][0]["token"]) == (" the", b" the", "the")


def test_a_special_token_is_named_as_it_is_written(texts: TokenTexts) -> None:
    """A special token is named as it is written, as in vLLM; one that the tokenizer does not know has no name but its
    id.
    """
    assert of_completion(texts, [END, BEYOND], [-1.0] * 2, None)["tokens"] == ["</s>", f"token_id:{BEYOND}"]


Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ask(make_worker: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask a model that writes ` the the`, whole and as a stream; return the answer and the events."""
    fakes, tokenizer = sys.modules[make_worker.__module__], spaced_tokenizer()
    monkeypatch.setattr(fakes.FakeRunner, "vocab_size", len(tokenizer))
    monkeypatch.setattr(fakes, "fake_token", lambda *_: SPACED)
    worker, _ = make_worker(tokenizer=tokenizer)
    client = TestClient(create_app(Service(worker, ServeSettings(), NAME, tokenizer)))

    def asked(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        whole = client.post(path, json=body).json()
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
        return [whole, *(json.loads(line[6:]) for line in lines if line.startswith("data: {"))]

    return asked


def first_choices(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["choices"][0] for answer in answers]


@pytest.mark.parametrize("prompt", ["the", [THE], [THE, END]])
def test_a_prompt_and_its_completion_are_the_text_of_their_tokens(ask: Ask, prompt: str | list[int]) -> None:
    """A prompt and its completion are, joined, the text of their tokens, as in vLLM: a word begins with a space."""
    for echo in ({}, {"echo": True}):
        whole, *pieces = first_choices(ask("/v1/completions", {"prompt": prompt, "max_tokens": 2, **echo}))
        assert whole["text"] == "".join(piece["text"] for piece in pieces) == ("the the the" if echo else " the the")
    named, *_ = first_choices(ask("/v1/completions", {"prompt": prompt, "max_tokens": 2, "logprobs": 0}))
    assert "".join(named["logprobs"]["tokens"]) == named["text"]


def test_text_beside_ids_goes_on_from_that_of_the_prompt(ask: Ask) -> None:
    body = {"token_ids": [THE], "sampling_params": {"max_tokens": 2}, "output_mode": "text"}
    whole, *pieces = first_choices(ask("/inference/v1/generate", body))
    assert whole["text"] == "".join(piece["text"] for piece in pieces) == " the the"


def test_an_answer_that_is_continued_goes_on_with_a_space(ask: Ask) -> None:
    """A client appends it to its message."""
    messages = [{"role": "assistant", "content": "the"}]
    body = {"messages": messages, "max_tokens": 2, "add_generation_prompt": False, "continue_final_message": True}
    whole, *pieces = first_choices(ask("/v1/chat/completions", body))
    streamed = "".join(piece["delta"].get("content", "") for piece in pieces)
    assert whole["message"]["content"] == streamed == " the the"
