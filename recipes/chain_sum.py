"""Define the task `chain_sum` of reasoning-gym, three to five terms of one digit, with and without working.

An answer is direct, `11`, or follows its working, `[7-5=2;2+9=11]11`.
"""

import re
from collections.abc import Iterator
from itertools import islice

from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

from samebit.recipes.problem import Problem, ProblemSets

# Problem i of a data set is drawn from seed + i, so the sets of two seeds are kept this far apart.
SEED_STRIDE = 10_000_000


def problems(seed: int, prompt_style: str = "expression") -> Iterator[Problem]:
    """Return endless problems. Different seeds draw independently, and may draw the same ones: there are few."""
    start = SEED_STRIDE * (seed + 1)
    size = SEED_STRIDE
    dataset = ChainSumDataset(ChainSumConfig(min_terms=3, max_terms=5, max_digits=1, seed=start, size=size))
    for i in range(size):
        entry = dataset[i]
        expression = entry["metadata"]["expression"].replace(" ", "") + "="
        yield Problem(expression if prompt_style == "expression" else entry["question"], entry["answer"])


def held_out_problems(count: int, prompt_style: str = "expression") -> list[Problem]:
    """Return the first `count` distinct problems of a seed that no run uses."""
    found: dict[str, Problem] = {}
    for problem in problems(-1, prompt_style):
        found.setdefault(problem.prompt, problem)
        if len(found) == count:
            break
    return list(found.values())


def problem_sets(seed: int, training: int, held_out: int, prompt_style: str = "expression") -> ProblemSets:
    """Return `training` problems of this seed, and the `held_out` problems common to all seeds."""
    kept_back = held_out_problems(held_out, prompt_style)
    prompts = {problem.prompt for problem in kept_back}
    fresh = (problem for problem in problems(seed, prompt_style) if problem.prompt not in prompts)
    return ProblemSets(list(islice(fresh, training)), kept_back)


def working(prompt: str) -> str:
    """Return the working of a problem: `[7-5=2;2+9=11]` for `7-5+9=`."""
    first, *operations = re.findall(r"[+-]?\d+", prompt)
    total = int(first)
    steps = []
    for operation in operations:
        result = total + int(operation)
        steps.append(f"{total}{operation}={result}")
        total = result
    return "[" + ";".join(steps) + "]"
