"""Make what TRL is given: a model folder, problems as its data sets, and the reward."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from samebit.recipes import chain_sum, prompt_file
from samebit.recipes.problem import MARKER, Problem, ProblemSets, reward
from samebit.recipes.verl_grpo import task as with_template

SEED = 0
HELD_OUT = 200

_TEXT_ALONE = {
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}},
    "x-regex": r"(?P<content>[\s\S]*)",
}
"""Tells how to read an answer of the built-in model: AsyncGRPO asks, and knows published chat templates alone."""


@dataclass(frozen=True)
class Task:
    """Holds the folder (or the hub's name) of a model, and the problems."""

    model: str
    tokenizer: Any
    problems: ProblemSets

    def dataset(self) -> Dataset:
        """Return the problems to learn from: `prompt`, a conversation, and `answer`."""
        rows = self.problems.training
        return Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": row.prompt}] for row in rows],
                "answer": [row.answer for row in rows],
            }
        )


def built_in(folder: Path, count: int) -> Task:
    """Return the model of recipes/grpo.py, warmed up and saved with a chat template, or that of an earlier run."""
    with_template.build(folder, training=count, held_out=HELD_OUT, warm=True)
    sets = chain_sum.problem_sets(SEED + 1, count, HELD_OUT)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.response_schema = _TEXT_ALONE
    return Task(str(folder / "model"), tokenizer, sets)


def of_user(model: str, data: str | None, count: int, answer_after: str = MARKER) -> Task:
    """Return a user's model, with the prompts of a file or with `chain_sum` asked in words.

    answer_after: what the answer stands behind in the file's answers, where it does.

    Raises:
        ValueError: a model whose tokenizer has no chat template, or a file that can not be used.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        raise ValueError(f"{model}: its tokenizer has no chat template, in which the prompts would be asked")
    if data is not None:
        return Task(model, tokenizer, prompt_file.problem_sets(data, SEED, HELD_OUT, answer_after=answer_after))
    return Task(model, tokenizer, chain_sum.problem_sets(SEED, count, HELD_OUT, "question"))


class AnswerReward:
    """Gives TRL 1.0 for a completion that ended by itself with the right answer, else 0.0.

    Attributes:
        end_tokens: the trainer's, at which its samples end. TRL wants rewards before there is a trainer, so they are
            given later.
        answer_after: what the answer stands behind, in completions.
    """

    __name__ = "answer"

    def __init__(self, end_tokens: Collection[int] = (), answer_after: str = MARKER) -> None:
        self.end_tokens = end_tokens
        self.answer_after = answer_after

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        ended = [bool(ids) and ids[-1] in self.end_tokens for ids in completion_ids]
        return [
            reward(text, finished, Problem("-", right), self.answer_after)
            for text, finished, right in zip(texts, ended, answer, strict=True)
        ]
