"""Measure forward and backward of log-probabilities: `token_logprobs` beside Hugging Face's module with a log-softmax.

    python benchmarks/training.py [--parts NAME ...] [--json FILE] [--rounds N] [--quick]

A part is a model in a dtype, as 5m_fp32; each is written when it is done, and a file that holds it spares it. README.md
in this folder defines each number.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.parts_file import PartsFile
from samebit.benchmarks.rounds.turns import Calibration, Round, Spread, Turn, alternate, is_steady, kept, ratio, spread
from samebit.benchmarks.workloads import mismatch_models, models
from samebit.kernels import bind, token_logprobs


@dataclass(frozen=True)
class Sizes:
    """Sets a micro-batch: count and length of its sequences, and how often a turn computes it."""

    sequences: int = 4
    tokens: int = 384
    repeats: int = 3


BUILD: dict[str, Callable[[torch.dtype, int], PreTrainedModel]] = {
    "5m": lambda dtype, longest: models.build(models.SHAPES["5m"], dtype, longest),
    "100m": lambda dtype, longest: models.build(models.SHAPES["100m"], dtype, longest),
    "mamba": lambda dtype, longest: models.build_hybrid(models.HYBRID, longest).to(dtype),
    "gdn": lambda dtype, longest: mismatch_models.build("hybrid", longest).to(dtype),
}
PARTS = [f"{name}_{dtype}" for name in BUILD for dtype in models.DTYPES]


def hugging_faces(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens but the first, in float32."""
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    found: Tensor = logprobs.gather(-1, ids[:, 1:, None])
    return found


def turns(model: PreTrainedModel, sizes: Sizes) -> dict[str, Turn]:
    """Return the contestants, each on its own copy: forward and backward, and the forward alone."""
    ours = bind(copy.deepcopy(model))
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "samebit": lambda ids: token_logprobs(ours, ids),
        "hf": lambda ids: hugging_faces(model, ids),
    }

    def turn(name: str, backward: bool) -> Turn:
        own = ours if name == "samebit" else model

        def once(number: int) -> float:
            generator = torch.Generator().manual_seed(number)
            shape = (sizes.sequences, sizes.tokens)
            ids = torch.randint(model.config.vocab_size, shape, generator=generator)
            began = time.perf_counter()
            for _ in range(sizes.repeats):
                with torch.set_grad_enabled(backward):
                    total = scores[name](ids).sum()
                if backward:
                    total.backward()
                    own.zero_grad()
            return time.perf_counter() - began

        return once

    return {f"{name}{what}": turn(name, what == "") for name in scores for what in ("", "_forward")}


def figures(name: str, rounds: list[Round], calibration: Calibration, repeats: int) -> dict[str, Spread]:
    """Return the figures of one part, of its steady rounds."""
    steady = kept(rounds, calibration)
    return {
        f"training_over_hf_{name}": ratio(steady, "samebit", "hf"),
        f"forward_over_hf_{name}": ratio(steady, "samebit_forward", "hf_forward"),
        f"training_ms_{name}": spread([1e3 * one.seconds["samebit"] / repeats for one in steady]),
        f"forward_ms_{name}": spread([1e3 * one.seconds["samebit_forward"] / repeats for one in steady]),
    }


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=6, of="each part", parts=PARTS)
    parser.add_argument("--quick", action="store_true", help="one short sequence, once a turn")
    args = parser.parse_args()
    sizes = Sizes(sequences=1, tokens=48, repeats=1) if args.quick else Sizes()
    done, calibration = PartsFile(args.json), Calibration()
    for name in done.missing(args.parts or PARTS):
        shape, dtype = name.split("_")
        contestants = turns(BUILD[shape](models.DTYPES[dtype], sizes.tokens), sizes)
        for contestant in contestants.values():
            contestant(args.rounds)  # compiles, and touches memory
        rounds = alternate(contestants, args.rounds, calibration)
        metrics = figures(name, rounds, calibration, sizes.repeats)
        steady = sum(is_steady(one, calibration) for one in rounds)
        done.add(name, results_file.describe(sizes=vars(sizes), rounds=len(rounds), rounds_steady=steady), metrics)
        table.show(metrics)
        print(f"{name}: {steady} of {len(rounds)} rounds steady")


if __name__ == "__main__":
    main()
