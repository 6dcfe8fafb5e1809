"""Define the parts of a task: a prompt, the expected answer, and the reward for a completion."""

from dataclasses import dataclass

from reasoning_gym.utils import compute_decimal_reward

MARKER = "]"
"""Ends the working of `chain_sum`; the answer stands behind it."""


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

    Text counts as the answer when it is equal or is the same number (`+07` is `7`).
    """
    text = completion.rpartition(answer_after)[2].strip()
    if not finished or not text:
        return 0.0
    same_number = compute_decimal_reward(text, problem.answer, strip_commas=True) == 1.0
    return float(text == problem.answer.strip() or same_number)
