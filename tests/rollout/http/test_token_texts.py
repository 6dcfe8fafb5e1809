"""Tokens keep their names in log-probabilities, though a tokenizer's decoder takes the space from a text's begin."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from samebit.rollout.integrations.http.openai.logprobs import TokenTexts, of_chat, of_completion

PIECES = ["<unk>", "<s>", "</s>", "\u2581the", "the", "\u2581\u2581a", "\u2581"]
END, SPACED, THE, WIDE, SPACE = range(2, 7)
BEYOND = len(PIECES)


@pytest.fixture
def texts() -> TokenTexts:
    """Give texts of a tokenizer like those of Llama 2, Mistral and Phi-3."""
    backend = Tokenizer(BPE({piece: index for index, piece in enumerate(PIECES)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))


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
