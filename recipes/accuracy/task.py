"""Define the task: `chain_sum` of reasoning-gym, three terms of one digit, worked out behind worked examples."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset
from transformers import PreTrainedTokenizerFast

from samebit.recipes.chain_sum import working
from samebit.recipes.lessons import Lesson, Rows, rows
from samebit.recipes.problem import Problem

DRAWN = 12_000
"""Problems that are drawn to find the distinct ones, of which there are about 3,800."""


@dataclass(frozen=True)
class Task:
    """Holds distinct problems: `held_out` are asked, behind the worked `examples` that all share; none of either is
    trained on."""

    training: list[Problem]
    examples: list[Problem]
    held_out: list[Problem]

    @classmethod
    def draw(cls, held_out: int, examples: int, seed: int = 0) -> "Task":
        """Draw the problems of a task.

        Raises:
            ValueError: fewer distinct problems than are asked for, and one to train on.
        """
        config = ChainSumConfig(min_terms=3, max_terms=3, max_digits=1, seed=seed, size=DRAWN)
        found: dict[str, Problem] = {}
        for entry in ChainSumDataset(config):
            expression = entry["metadata"]["expression"].replace(" ", "") + "="
            found.setdefault(expression, Problem(expression, entry["answer"]))
        problems = list(found.values())
        if held_out + examples >= len(problems):
            raise ValueError(
                f"{held_out} problems to ask and {examples} examples; there are {len(problems)} problems, of which "
                "one at least must be left to train on"
            )
        asked = held_out + examples
        return cls(problems[asked:], problems[held_out:asked], problems[:held_out])

    def prompts(self, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
        """Return the tokens of each held-out problem behind the examples, each of which ends with `<eos>`."""
        shared = [tokenizer.bos_token_id]
        for example in self.examples:
            shared += [*_ids(tokenizer, solved(example)), tokenizer.eos_token_id]
        return [[*shared, *_ids(tokenizer, problem.prompt)] for problem in self.held_out]

    def batches(
        self, tokenizer: PreTrainedTokenizerFast, problems: int, row_tokens: int, seed: int = 0
    ) -> Iterator[Rows]:
        """Return endless batches of worked problems, as many in a row as fit into `row_tokens`."""
        generator = random.Random(seed)
        while True:
            drawn = generator.choices(self.training, k=problems)
            yield rows([Lesson(one.prompt, _answer(one)) for one in drawn], tokenizer, row_tokens)


def solved(problem: Problem) -> str:
    """Return a problem with its working and its answer: `7-5+9=[7-5=2;2+9=11]11`."""
    return problem.prompt + _answer(problem)


def _answer(problem: Problem) -> str:
    return working(problem.prompt) + problem.answer


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
