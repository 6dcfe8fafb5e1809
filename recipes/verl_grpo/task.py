"""Write the files of a tiny run: a model with a chat template, and chain_sum of reasoning-gym as verl's parquet."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from samebit.kernels import bind
from samebit.recipes import chain_sum, tiny_model, warmup
from samebit.recipes.problem import Problem, ProblemSets
from samebit.recipes.settings import Settings

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
SEED = 0


def build(
    folder: Path,
    *,
    training: int,
    held_out: int,
    warm: bool,
    architecture: str = "dense",
    prompt_tokens: int = 0,
    **sizes: Any,
) -> None:
    """Write `model/`, `train.parquet` and `test.parquet`, unless they are there.

    Args:
        warm: Teach the model the task first, as recipes/grpo.py does; otherwise its weights are random.
        architecture: As for `tiny_model.build_model`.
        prompt_tokens: Fill prompts, and the rows of the warm-up, with worked examples up to this number of tokens.
        sizes: Entries of the model's configuration.
    """
    if (folder / "test.parquet").exists():
        return
    settings = Settings(held_out=held_out, architecture=architecture)
    used = warmup.problems_needed(settings) if warm else 0
    sets = chain_sum.problem_sets(SEED, used + training, held_out)
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_model.build_model(tokenizer, SEED, architecture, **sizes)
    if warm:
        warmup.warm_up(bind(model), tokenizer, sets.training[:used], settings, SEED, prompt_tokens)
    tiny_model.save(model, tokenizer, folder / "model")
    asked = (with_examples(problems, prompt_tokens) for problems in (sets.training[used:], sets.held_out))
    save_problems(ProblemSets(*asked), folder)


def with_examples(problems: Sequence[Problem], tokens: int) -> list[Problem]:
    """Put worked examples, the next problems, in front of each: as many as keep the prompt within `tokens`."""
    return [replace(problem, prompt=_prompt(problems, index, tokens)) for index, problem in enumerate(problems)]


def _prompt(problems: Sequence[Problem], index: int, tokens: int) -> str:
    text = problems[index].prompt
    used = 1 + len(text)  # a character is a token; `<bos>` comes in front
    for other in range(index + 1, index + len(problems)):
        shown = problems[other % len(problems)]
        example = f"{shown.prompt}{chain_sum.working(shown.prompt)}{shown.answer}"
        used += len(example) + 1
        if used > tokens:
            break
        text = f"{example}{tiny_model.END}{text}"
    return text


def save_problems(sets: ProblemSets, folder: Path) -> None:
    """Write the problems in the columns that verl reads."""
    for name, problems in (("train", sets.training), ("test", sets.held_out)):
        rows = [
            {
                "data_source": "chain_sum",
                "prompt": [{"role": "user", "content": problem.prompt}],
                "ability": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": problem.answer},
                "extra_info": {"index": index},
            }
            for index, problem in enumerate(problems)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
