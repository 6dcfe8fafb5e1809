"""Define the parts of a task: a prompt, the expected answer, and the reward for a completion."""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

MARKER = "]"
"""Ends the working of `chain_sum`; the answer stands behind it."""

_IN_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
"""Matches a number whose commas stand between groups of three digits; other commas part numbers from each other."""


@dataclass(frozen=True)
class Problem:
    """Holds a prompt and its answer: `prompt` goes to the tokenizer as it is; `answer` is compared with the text after
    the working."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class ProblemSets:
    """Holds the problems of one run; no prompt of `held_out` occurs in `training`."""

    training: list[Problem]
    held_out: list[Problem]


def shows_working(completion: str) -> bool:
    """Return whether the completion has a closed `[...]` before its answer."""
    return "]" in completion


def reward(completion: str, finished: bool, problem: Problem, answer_after: str = MARKER) -> float:
    """Return 1.0 if the completion ended by itself and its text after the last `answer_after` is the answer, else 0.0.

    Text counts as the answer when it is equal or is the same number (`+07` is `7`, `1,000.0` is `1000`).
    """
    text, answer = completion.rpartition(answer_after)[2].strip(), problem.answer.strip()
    if not finished or not text:
        return 0.0
    number = _number(text)
    return float(text == answer or (number is not None and number == _number(answer)))


def _number(text: str) -> Decimal | None:
    """Return the number that a text is; None for any other text."""
    try:
        number = Decimal(text.replace(",", "") if _IN_THOUSANDS.fullmatch(text) else text)
    except InvalidOperation:
        return None
    return None if number.is_nan() else number
