"""Measure what tokens guessed ahead gain: the same requests with and without guesses, in turns, both exact.

    python benchmarks/drafts.py [--json FILE] [--rounds N] [--dtypes fp32 bf16] [--quick]

answered_again_N: time of N requests that were answered with the same tokens before, as where a conversation or an
answer repeats itself word by word: without guesses over with guesses. answered_anew_N: of prompts of random tokens that
a random model answers for the first time, where hardly a guess is right.
"""

# isort: split
import time
from dataclasses import asdict, dataclass, replace

import torch

from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

PROMPT = 256
NEW = 64


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement."""

    shapes: tuple[str, ...] = ("5m", "100m")
    sequences: tuple[int, ...] = (1, 4, 64)
    guesses: int = 7
    rounds: int = 5


def measure(sizes: Sizes, shape: str, dtype: str) -> dict[str, Spread]:
    """Return how many times as long requests take without guesses."""
    room = PROMPT + NEW
    model = models.build(models.SHAPES[shape], models.DTYPES[dtype], room)
    generator = torch.Generator().manual_seed(0)
    metrics: dict[str, Spread] = {}
    config = RolloutConfig(max_model_len=room)
    ahead = replace(config, num_speculative_tokens=sizes.guesses)
    with RolloutWorker(model, config=config) as plain, RolloutWorker(model, config=ahead) as guessing:
        for count in sizes.sequences:
            prompts = torch.randint(plain.limits.vocab_size, (count, PROMPT), generator=generator).tolist()
            for name, seeds in (("anew", range(1, sizes.rounds + 2)), ("again", [0] * (sizes.rounds + 1))):
                turns = [(_seconds(plain, prompts, seed), _seconds(guessing, prompts, seed)) for seed in seeds][1:]
                metrics[f"{shape}_{dtype}_answered_{name}_{count}"] = spread([one / other for one, other in turns])
    return metrics


def _seconds(worker: RolloutWorker, prompts: list[list[int]], seed: int) -> float:
    began = time.perf_counter()
    worker.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True, seed=seed))
    return time.perf_counter() - began


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="each comparison")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=tuple(models.DTYPES))
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds: shows that it runs")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds)
    if arguments.quick:
        sizes = Sizes(shapes=("5m",), sequences=(1, 4), rounds=2)
    metrics: dict[str, Spread] = {}
    for shape in sizes.shapes:
        for dtype in arguments.dtypes:
            found = measure(sizes, shape, dtype)
            metrics.update(found)
            table.show(found)
    if arguments.json:
        results_file.write(arguments.json, results_file.describe(**asdict(sizes)), metrics)


if __name__ == "__main__":
    main()
