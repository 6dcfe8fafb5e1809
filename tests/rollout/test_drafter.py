"""Guesses are as many as may be right, and what they are made from is bounded. No guess changes a sample: see
`tests/exactness/test_drafts.py`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import numpy as np
import pytest

from samebit.rollout.drafts.drafter import Drafter, DraftOptions
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.sampling_params import SamplingParams

PROMPT = [100, 101, 102]
ANSWER = list(range(10, 30))
_ordinals = count()


def _drafter(history: int = 10_000) -> Drafter:
    return Drafter(DraftOptions(num_tokens=4, gram=2, step_tokens=16, history_tokens=history))


def _sequences(prompt: list[int], n: int = 1, **params: float) -> list[Sequence]:
    ordinal = next(_ordinals)
    asked = SamplingParams(n=n, **params)  # type: ignore[arg-type]
    return Request(str(ordinal), np.array(prompt), asked, ordinal=ordinal, max_new_tokens=200).sequences


def _say(sequence: Sequence, tokens: Iterable[int]) -> None:
    for token in tokens:
        sequence.append(token, 0.0, 0.0)


def _answer(drafter: Drafter, prompt: list[int], tokens: list[int], **params: float) -> None:
    """Answer a prompt with one sample, which ends."""
    (sequence,) = _sequences(prompt, **params)
    _say(sequence, tokens)
    sequence.finish("length", None)
    drafter.forget(sequence)


def _abort(drafter: Drafter, prompt: list[int], tokens: list[int]) -> None:
    """Begin to answer a prompt with one sample, which is aborted: it is forgotten before it ends."""
    (sequence,) = _sequences(prompt)
    _say(sequence, tokens)
    drafter.forget(sequence)


def _guess_behind(drafter: Drafter, prompt: list[int], tokens: list[int]) -> tuple[int, ...]:
    """Return what is guessed of a new request for the prompt, whose answer begins with these tokens."""
    (sequence,) = _sequences(prompt)
    _say(sequence, tokens)
    return drafter.guess(sequence, 16)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_text_that_repeats_itself_is_guessed_beyond_its_end(period: int) -> None:
    (sequence,) = _sequences(PROMPT)
    text = [7 + number % period for number in range(20)]
    _say(sequence, text[: 2 * period + 2])
    assert _drafter().guess(sequence, 16) == tuple(text[2 * period + 2 :][:4])


def test_behind_wrong_guesses_a_longer_match_is_asked_for_and_behind_right_ones_a_shorter() -> None:
    drafter = _drafter()
    (sequence,) = _sequences([1, 2, 3, 1, 2, 4, 5, 6, 7, 8, 9])
    _say(sequence, [1, 2])
    assert len(drafter.guess(sequence, 16)) == 4
    _say(sequence, [50, 1, 2])
    assert drafter.guess(sequence, 16) == (), "two tokens match, and what followed them was wrong"
    _say(sequence, [4, 5])
    assert drafter.guess(sequence, 16) == (6, 7, 8, 9), "four tokens match"
    _say(sequence, [6, 7, 8, 9, 60, 2, 3])
    assert drafter.guess(sequence, 16)[:2] == (1, 2), "all were right: two tokens are enough again"


def test_a_prompts_answers_are_kept_whether_they_came_as_one_request_or_as_many() -> None:
    drafter = _drafter()
    others = [[40 + 3 * number, 41 + 3 * number, 42 + 3 * number] for number in range(3)]
    for other in others:
        _answer(drafter, PROMPT, other)
    _answer(drafter, PROMPT, [])
    for first, second, third in others:
        assert _guess_behind(drafter, PROMPT, [first, second])[0] == third
    group = _sequences(PROMPT, n=2)
    for sequence, start in zip(group, (70, 80), strict=True):
        _say(sequence, range(start, start + 5))
        sequence.finish("length", None)
        drafter.forget(sequence)
    assert _guess_behind(drafter, PROMPT, [70, 71]) == (72, 73, 74, 80)
    assert _guess_behind(drafter, PROMPT, [80, 81])[:3] == (82, 83, 84)
    assert _guess_behind(drafter, [5, 6], [70, 71]) == (), "of another prompt"


def test_the_newest_answers_of_a_prompt_are_kept_each_once() -> None:
    drafter = _drafter()
    for number in range(40):
        _answer(drafter, PROMPT, [200 + 3 * number, 201 + 3 * number, 202 + 3 * number])
        _answer(drafter, PROMPT, [1, 2, 3])
    assert _guess_behind(drafter, PROMPT, [1, 2])[0] == 3
    assert _guess_behind(drafter, PROMPT, [200 + 3 * 30, 201 + 3 * 30])[0] == 202 + 3 * 30
    assert _guess_behind(drafter, PROMPT, [200 + 3 * 20, 201 + 3 * 20]) == ()


def test_short_answers_count_for_what_they_take() -> None:
    """An answer of few tokens takes hundreds of bytes, and one that no n-gram fits into is not kept."""
    drafter = _drafter(history=2000)
    for number in range(200):
        _answer(drafter, [number, number], [1, 2, 3])
        _answer(drafter, [number, number, number], [1, 2])
    kept = [number for number in range(200) if _guess_behind(drafter, [number, number], [1, 2])]
    assert kept == list(range(200 - len(kept), 200))
    assert len(kept) <= 30
    assert not any(_guess_behind(drafter, [number] * 3, [1, 2]) for number in range(200))


def test_what_is_aborted_is_no_answer_but_the_beginning_of_one() -> None:
    """What is aborted is no answer but the beginning of one: a request that goes on behind it guesses from what the
    prompt was answered with, and both together are its answer.
    """
    drafter = _drafter()
    _answer(drafter, PROMPT, ANSWER)
    _abort(drafter, PROMPT, ANSWER[:5])
    assert _guess_behind(drafter, [*PROMPT, *ANSWER[:5]], []) == tuple(ANSWER[5:9])
    other = list(range(60, 90))
    _abort(drafter, PROMPT, other[:10])
    assert _guess_behind(drafter, PROMPT, other[:3]) == (), "no answer yet"
    _abort(drafter, [*PROMPT, *other[:10]], other[10:20])
    _answer(drafter, [*PROMPT, *other[:20]], other[20:])
    assert _guess_behind(drafter, PROMPT, other[8:12]) == tuple(other[12:16])
    assert _guess_behind(drafter, PROMPT, other[18:22]) == tuple(other[22:26])
    assert _guess_behind(drafter, PROMPT, ANSWER[:3]) == tuple(ANSWER[3:7])


def test_of_a_group_that_is_aborted_in_part_the_answers_are_kept() -> None:
    drafter = _drafter()
    done, aborted = _sequences(PROMPT, n=2)
    _say(done, ANSWER)
    done.finish("stop", None)
    _say(aborted, range(60, 80))
    for sequence in (done, aborted):
        drafter.forget(sequence)
    assert _guess_behind(drafter, PROMPT, ANSWER[:3]) == tuple(ANSWER[3:7])
    assert _guess_behind(drafter, PROMPT, [60, 61]) == ()


def test_beginnings_that_nobody_goes_on_with_are_dropped_before_answers() -> None:
    drafter = _drafter(history=2000)
    _answer(drafter, PROMPT, ANSWER)
    for number in range(100):
        _abort(drafter, [number, 7], list(range(200, 300)))
    assert _guess_behind(drafter, PROMPT, ANSWER[:3]) == tuple(ANSWER[3:7])
    _answer(drafter, [5, 7, *range(200, 300)], [300, 301, 302])
    assert _guess_behind(drafter, [5, 7], [200, 201]) == (), "its beginning was dropped"
    _answer(drafter, [99, 7, *range(200, 300)], [300, 301, 302])
    assert _guess_behind(drafter, [99, 7], [200, 201]) == (202, 203, 204, 205)


def test_of_answers_that_are_too_much_together_the_newest_are_kept() -> None:
    drafter = _drafter(history=200)
    for start in (10, 40, 70):
        _answer(drafter, PROMPT, list(range(start, start + 20)))
    assert _guess_behind(drafter, PROMPT, [10, 11]) == ()
    assert _guess_behind(drafter, PROMPT, [40, 41]) == (42, 43, 44, 45)
    assert _guess_behind(drafter, PROMPT, [70, 71]) == (72, 73, 74, 75)


def test_nothing_is_kept_where_all_would_be_too_much_or_guesses_are_not_made() -> None:
    drafter = _drafter(history=50)
    _answer(drafter, PROMPT, ANSWER)
    assert _guess_behind(drafter, PROMPT, ANSWER[:3]) == ()
    drafter = _drafter()
    _answer(drafter, PROMPT, ANSWER, repetition_penalty=1.5)
    assert _guess_behind(drafter, PROMPT, ANSWER[:3]) == ()
    _answer(drafter, PROMPT, ANSWER)
    assert _guess_behind(drafter, PROMPT, ANSWER[:3]) == tuple(ANSWER[3:7])


class AskedModel:
    """Stands for a draft model: guesses nines, and notes for how many it was asked."""

    num_blocks = (0, 0)

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.forgotten: list[Sequence] = []

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        self.asked.append([most for _, most in asked])
        return [(9,) * most for _, most in asked]

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def release(self) -> None:
        """Give nothing back, as there is nothing."""


def test_a_draft_model_is_asked_for_equal_shares_where_no_n_gram_has_come_before() -> None:
    model = AskedModel()
    drafter = Drafter(DraftOptions(num_tokens=4, gram=2, step_tokens=16, history_tokens=0), model)
    sequences = [_sequences([1, 2, number])[0] for number in range(3)]
    (repeating,), (penalized,) = _sequences([5, 6, 5, 6]), _sequences([1, 2], repetition_penalty=1.2)
    for sequence in (*sequences, penalized):
        _say(sequence, [40])
    _say(repeating, [5, 6])
    mixed = [sequences[0], repeating, penalized, *sequences[1:]]
    assert [len(guess) for guess in drafter.guesses(mixed, 11)] == [3, 2, 0, 3, 3]
    assert [len(guess) for guess in drafter.guesses(sequences, 2)] == [1, 1, 0]
    assert [len(guess) for guess in drafter.guesses(sequences[:1], 16)] == [4]
    _say(sequences[1], [50] * 198)
    assert [len(guess) for guess in drafter.guesses(sequences[1:2], 16)] == [0], "it gets one more token"
    assert model.asked == [[3, 3, 3], [1, 1], [4]]
    drafter.forget(sequences[0])
    assert model.forgotten == sequences[:1]
