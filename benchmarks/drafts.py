"""Measure what tokens guessed ahead gain: the same requests with and without guesses, in turns, both exact.

    python benchmarks/drafts.py [--json FILE] [--rounds N] [--dtypes fp32 bf16] [--shapes NAME ...] [--quick]

Time without guesses over time with guesses, of N requests of a prompt each, or of the 8 samples of a long one:

* again: answered with the same tokens before, as where a conversation or an answer repeats itself word by word;
* anew: of prompts of random tokens that a random model answers for the first time, where hardly a guess is made;
* wrong: prompts and answers are random tokens of 8, so that there is a guess in nearly every step, mostly a wrong one.

"mamba" and "gdn" are small hybrids of Mamba2 and of Gated DeltaNet, which are measured where they are asked for.
"""

# isort: split
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from transformers import PreTrainedModel

from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

NEW = 64
FEW = 8
"""Tokens that `wrong` is made of."""

BUILD: dict[str, Callable[[torch.dtype, int], PreTrainedModel]] = {
    "5m": lambda dtype, longest: models.build(models.SHAPES["5m"], dtype, longest),
    "100m": lambda dtype, longest: models.build(models.SHAPES["100m"], dtype, longest),
    "mamba": lambda dtype, longest: models.build_hybrid(models.HYBRID, longest).to(dtype),
    "gdn": lambda dtype, longest: models.build_delta(models.DELTA, longest).to(dtype),
}


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement; groups: prompts, samples of each, tokens of each prompt."""

    shapes: tuple[str, ...] = ("5m", "100m")
    groups: tuple[tuple[int, int, int], ...] = ((1, 1, 256), (4, 1, 256), (64, 1, 256), (1, 8, 2048))
    guesses: int = 7
    rounds: int = 5


def measure(sizes: Sizes, shape: str, dtype: str) -> dict[str, Spread]:
    """Return how many times as long requests take without guesses."""
    room = max(tokens for _, _, tokens in sizes.groups) + NEW
    model = BUILD[shape](models.DTYPES[dtype], room)
    generator = torch.Generator().manual_seed(0)
    metrics: dict[str, Spread] = {}
    config = RolloutConfig(max_model_len=room)
    ahead = replace(config, num_speculative_tokens=sizes.guesses)
    with RolloutWorker(model, config=config) as plain, RolloutWorker(model, config=ahead) as guessing:
        for count, samples, tokens in sizes.groups:
            for case in ("anew", "wrong", "again"):
                ids = FEW if case == "wrong" else plain.limits.vocab_size
                prompts = torch.randint(ids, (count, tokens), generator=generator).tolist()
                params = SamplingParams(n=samples, max_tokens=NEW, ignore_eos=True)
                if case == "wrong":
                    params = replace(params, logit_bias=dict.fromkeys(range(FEW), 100.0))
                seeds = [0] * (sizes.rounds + 1) if case == "again" else range(1, sizes.rounds + 2)
                turns = [
                    [_seconds(worker, prompts, replace(params, seed=seed)) for worker in (plain, guessing)]
                    for seed in seeds
                ]
                name = f"{shape}_{dtype}_{case}_{count}" + (f"x{samples}" if samples > 1 else "")
                metrics[name] = spread([one / other for one, other in turns[1:]])
    return metrics


def _seconds(worker: RolloutWorker, prompts: list[list[int]], params: SamplingParams) -> float:
    began = time.perf_counter()
    worker.generate(prompts, params)
    return time.perf_counter() - began


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="each comparison")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=tuple(models.DTYPES))
    parser.add_argument("--shapes", nargs="+", default=list(Sizes.shapes), choices=tuple(BUILD))
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds: shows that it runs")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds, shapes=tuple(arguments.shapes))
    if arguments.quick:
        sizes = Sizes(shapes=("5m",), groups=((1, 1, 256), (1, 8, 512)), rounds=2)
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
