"""A sample has one text, however it is made: at once, as it grows, with and without stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samebit.rollout import RolloutWorker, SamplingParams
from samebit.rollout.requests.stop_strings import StopStringMatcher, text_of

from ...patience import HANG
from ..step_gate import StepGate
from ..tiny_llama import byte_fallback_tokenizer, smallest

TOKENIZER = byte_fallback_tokenizer()
SPACE, A, C = TOKENIZER.convert_tokens_to_ids(["\u2581", "a", "c"])
PARTS = [*([token] for token in (0, 1, 2, *range(SPACE, C + 1))), [byte + 3 for byte in "\u65e5".encode()]]
"""The tokens of letters, of a space, of a character in bytes, and special ones."""
SOME = st.lists(st.sampled_from(PARTS), max_size=8).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=200, deadline=None)
@example([1, SPACE], [SPACE, A])
@example([A, *[2] * 7], [SPACE, A])
@given(SOME, SOME)
def test_a_sample_s_text_goes_on_from_that_of_its_prompt(prompt: list[int], ids: list[int]) -> None:
    """A sample's text goes on from that of its prompt, as in vLLM: SentencePiece takes a text's first space."""
    start, whole = (TOKENIZER.decode(tokens, skip_special_tokens=True) for tokens in (prompt, prompt + ids))
    assert start + text_of(TOKENIZER, ids, prompt) == whole
    matcher = StopStringMatcher(TOKENIZER, (), prompt)
    for token in ids:
        matcher.push(token, search=False)
    matcher.flush()
    assert start + matcher.text == whole


@pytest.mark.parametrize("stop", [None, "never"])
def test_a_word_behind_a_prompt_has_its_space(stop: str | None) -> None:
    letters = dict.fromkeys(range(SPACE, C + 1), 100.0)
    params = SamplingParams(n=16, max_tokens=6, seed=0, ignore_eos=True, logit_bias=letters, stop=stop)
    with RolloutWorker(smallest(vocab_size=len(TOKENIZER)), tokenizer=TOKENIZER) as worker:
        behind, first = worker.generate([[1, C], [1]], params)
    for sample in behind.samples:
        assert f"c{sample.text}" == TOKENIZER.decode([C, *sample.token_ids])
    for sample in first.samples:
        assert sample.text == TOKENIZER.decode(sample.token_ids)
    assert any(sample.text.startswith(" ") for sample in behind.samples)


def test_a_stop_string_with_a_space_ends_a_sample_that_begins_with_it() -> None:
    first_a_space = {"logit_bias": {SPACE: 100, A: 99}, "frequency_penalty": 2, "temperature": 0}
    with RolloutWorker(smallest(vocab_size=len(TOKENIZER)), tokenizer=TOKENIZER) as worker:
        params = SamplingParams(max_tokens=4, stop=" a", ignore_eos=True, **first_a_space)
        (sample,) = worker.generate([[1, C]], params)[0].samples
    assert sample.token_ids == [SPACE, A]
    assert (sample.finish_reason, sample.stop_reason, sample.text) == ("stop", " a", "")


def test_a_whole_character_beside_an_incomplete_one_is_not_lost() -> None:
    whole, part = "\u65e5".encode(), "\u672c".encode()[:2]
    ids = TOKENIZER.convert_tokens_to_ids(["a", *(f"<0x{byte:02X}>" for byte in whole + part), "b"])
    assert TOKENIZER.decode(ids) == "a\ufffd\ufffd\ufffd\ufffd\ufffdb"
    assert text_of(TOKENIZER, ids) == "a\u65e5\ufffd\ufffdb"
    assert text_of(TOKENIZER, ids[:4]) == "a\u65e5"


class Counting:
    """Decodes as a tokenizer of bytes, and remembers the most tokens that it was given at once."""

    most = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(token_ids))
        return bytes(token_ids).decode(errors="replace")


@settings(max_examples=60, deadline=None)
@example([0x80] * 120)
@given(st.lists(st.sampled_from([*"\U0001f600\u65e5a ".encode(), 0x80, 0xFF]), max_size=120))
def test_what_is_no_character_is_decoded_once_and_again_for_a_few_tokens(ids: list[int]) -> None:
    """Bytes of which no character comes are decoded once, and again for a few tokens, not all of them with each."""
    tokenizer = Counting()
    matcher = StopStringMatcher(tokenizer, ())
    for token in ids:
        matcher.push(token, search=False)
    matcher.flush()
    assert matcher.text == bytes(ids).decode(errors="replace")
    assert tokenizer.most <= 32


class Speaking:
    """Decodes bytes, skips the token 0, does not know those above, and remembers the most tokens that it was given at
    once."""

    most = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(token_ids))
        kept = [token for token in token_ids if token < 256 and (token or not skip_special_tokens)]
        return bytes(kept).decode(errors="replace")


@pytest.mark.parametrize("silent", [0, 300])
@pytest.mark.parametrize("before", ["", "ab"])
def test_tokens_that_are_no_text_are_decoded_once(before: str, silent: int) -> None:
    """End tokens that end no sample, and ids beyond the tokenizer's, are decoded once, not all of them with each."""
    tokenizer = Speaking()
    matcher = StopStringMatcher(tokenizer, ("END",))
    ids = [*before.encode(), *[silent] * 100, *b"cEN", *[silent] * 100, ord("D")]
    assert [matcher.push(token, search=True) for token in ids] == [None] * (len(ids) - 1) + ["END"]
    assert matcher.text == f"{before}c"
    assert tokenizer.most <= 8


@pytest.mark.parametrize("silent", [0, 300])
def test_a_token_that_is_no_text_in_a_character_leaves_it_whole(silent: int) -> None:
    first, *rest = "\u65e5".encode()
    matcher = StopStringMatcher(Speaking(), ())
    for token in (first, *[silent] * 20, *rest):
        matcher.push(token, search=False)
    assert matcher.text == "\u65e5"


def test_stop_strings_that_do_not_come_leave_the_text_alone() -> None:
    """Stop strings that do not come leave the text alone, here texts with many bytes that are no whole character."""
    model = smallest(vocab_size=len(TOKENIZER))
    params = {"n": 16, "max_tokens": 20, "seed": 0, "ignore_eos": True}
    with RolloutWorker(model, tokenizer=TOKENIZER) as worker:
        plain, stopped = (
            worker.generate([[1, 5]], SamplingParams(**params, **more))[0].samples for more in ({}, {"stop": "never"})
        )
    assert [sample.token_ids for sample in stopped] == [sample.token_ids for sample in plain]
    assert [sample.text for sample in stopped] == [sample.text for sample in plain]
    assert any("\ufffd" in sample.text for sample in plain)


class Incomplete:
    """Decodes each token to the first byte of three."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes([0xE4] * len(token_ids)).decode(errors="replace")


@pytest.mark.parametrize("stop", [None, "never"])
def test_an_aborted_sample_has_the_text_of_all_its_tokens(
    make_worker: Callable[..., tuple[Any, Any]], stop: str | None
) -> None:
    """An aborted sample has the text of all its tokens, also what is held back for the rest of a character."""
    worker, runner = make_worker(tokenizer=Incomplete())
    runner.gate = StepGate(5)
    handle = worker.submit([3, 1], SamplingParams(max_tokens=30, stop=stop))
    runner.gate.wait_for_a_step()
    handle.cancel()
    runner.gate.release(100)
    (sample,) = handle.result(HANG).samples
    assert (sample.finish_reason, len(sample.token_ids)) == ("abort", 6)
    assert sample.text == "\ufffd" * 6


class Numbers:
    """Decodes each token to its number: none is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"<{token}>" for token in token_ids)


@pytest.mark.parametrize("stop", [None, "><"])
@pytest.mark.parametrize("of_the_model", [False, True])
def test_the_token_that_ends_a_sample_is_not_in_its_text(
    make_worker: Callable[..., tuple[Any, Any]], oracle: Callable[..., list[int]], stop: str | None, of_the_model: bool
) -> None:
    """The token that ends a sample is not in its text, nor does a stop string end in it, as in vLLM. Where the length
    ends a sample, all tokens are in its text.
    """
    first, last = oracle([3, 1], 0, 2)
    worker, _ = make_worker(tokenizer=Numbers(), eos=(last,) if of_the_model else ())
    ends = SamplingParams(max_tokens=2, stop=stop, stop_token_ids=None if of_the_model else [last])
    whole = SamplingParams(max_tokens=2, ignore_eos=True)
    ended, other = (worker.generate([[3, 1]], params)[0].samples[0] for params in (ends, whole))
    assert ended.token_ids == other.token_ids == [first, last]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None if of_the_model else last)
    assert ended.text == f"<{first}>"
    assert (other.finish_reason, other.text) == ("length", f"<{first}><{last}>")
