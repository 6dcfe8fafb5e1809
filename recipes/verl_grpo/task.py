"""The files of a tiny run: a model with a chat template, and chain_sum of reasoning-gym as verl's parquet."""

from collections.abc import Sequence
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


def build(folder: Path, *, training: int, held_out: int, warm: bool, architecture: str = "dense", **sizes: Any) -> None:
    """Write `model/`, `train.parquet` and `test.parquet`, unless they are there.

    warm: teach the model the task first, as recipes/grpo.py does; else its weights are random. architecture: see
    `tiny_model.build_model`. sizes: entries of its configuration.
    """
    if (folder / "test.parquet").exists():
        return
    settings = Settings(held_out=held_out, architecture=architecture)
    used = warmup.problems_needed(settings) if warm else 0
    sets = chain_sum.problem_sets(SEED, used + training, held_out)
    _save_model(folder / "model", sets.training[:used], settings, **sizes)
    save_problems(ProblemSets(sets.training[used:], sets.held_out), folder)


def _save_model(folder: Path, problems: Sequence[Problem], settings: Settings, **sizes: Any) -> None:
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = tiny_model.build_model(tokenizer, SEED, settings.architecture, **sizes)
    if problems:
        warmup.warm_up(bind(model), tokenizer, problems, settings, SEED)
    tiny_model.save(model, tokenizer, folder)


def save_problems(sets: ProblemSets, folder: Path) -> None:
    """In the columns that verl reads."""
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
