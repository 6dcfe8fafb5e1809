"""Measure what the prefix cache gains: samebit with and without it, in turns step by step, both exact.

    python benchmarks/prefix_cache.py [--json FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from samebit.benchmarks import cache_growth
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models, unshared
from samebit.benchmarks.workloads.shared_prefix import SharedPrefix, SharedRound
from samebit.benchmarks.workloads.workload import Tokens
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement, in tokens unless noted otherwise."""

    requests: int = 64
    shared: int = 1024  # full blocks, all of which are skipped
    own_mean: int = 200
    outputs: tuple[int, ...] = (8, 128)
    groups: int = 8
    samples: int = 16
    group_prompt: int = 512
    group_output: int = 64
    conversations: int = 16
    turns: int = 6
    turn_input: int = 40
    turn_output: int = 100
    unshared_output: int = 64

    @property
    def longest(self) -> int:
        shared = self.shared + 4 * self.own_mean + max(self.outputs)
        group = self.group_prompt + self.group_output
        return max(shared, group, self.turns * (self.turn_input + self.turn_output) + self.own_mean)


class Prompts:
    """Draws random prompts of this vocabulary; every call gives ones that no cache has seen."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)

    def sharing(self, sizes: Sizes) -> Tokens:
        """Return prompts with a shared beginning and ends of log-normal lengths, like those of chats."""
        shared = self.tokens(sizes.shared)
        return [[*shared, *self.tokens(self._length(sizes.own_mean))] for _ in range(sizes.requests)]

    def _length(self, mean: int) -> int:
        """Draw a log-normal length of sigma 1, cut at four times the mean; the mean of the cut ones is 1.5175."""
        return max(1, min(4 * mean, round(self._random.lognormvariate(0.0, 1.0) * mean / 1.5175)))


def _worker(model: PreTrainedModel, sizes: Sizes) -> RolloutWorker:
    return RolloutWorker(
        model, config=RolloutConfig(max_num_seqs=sizes.groups * sizes.samples, max_model_len=sizes.longest)
    )


def _params(output: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=output, ignore_eos=True)


def shared_prefix(model: PreTrainedModel, sizes: Sizes, rounds: int) -> dict[str, Spread]:
    """Measure requests that begin alike, for each length of the output. The model is bound already."""
    prompts = Prompts(model.config.vocab_size)
    contest = SharedPrefix(model, sizes.requests, sizes.longest)
    metrics: dict[str, Spread] = {}
    for output in sizes.outputs:
        made = [
            SharedRound(prompts.sharing(sizes), [prompts.tokens(sizes.shared) for _ in range(sizes.requests - 1)])
            for _ in range(rounds)
        ]
        over_ideal, gained = contest.race(made, output)
        metrics |= {f"speedup_over_ideal_out{output}": over_ideal, f"requests_per_second_gain_out{output}": gained}
    return metrics


def first_wave(worker: RolloutWorker, prompts: Prompts, sizes: Sizes) -> dict[str, Spread]:
    """Return the share of simultaneous requests, at a cold cache, that skip tokens."""
    outputs = worker.generate(prompts.sharing(sizes), _params(1))
    return {"first_wave_hit_ratio": spread([sum(out.num_cached_tokens > 0 for out in outputs) / len(outputs)])}


def groups(worker: RolloutWorker, prompts: Prompts, sizes: Sizes) -> dict[str, Spread]:
    """Return the prompt tokens computed for groups of samples, over the tokens of their prompts."""
    made = [prompts.tokens(sizes.group_prompt) for _ in range(sizes.groups)]
    before = worker.stats()["prefill_tokens_computed"]
    worker.generate(made, _params(sizes.group_output, sizes.samples))
    computed = worker.stats()["prefill_tokens_computed"] - before
    return {"group_prefill_ratio": spread([computed / (sizes.groups * sizes.group_prompt)])}


def multi_turn(worker: RolloutWorker, prompts: Prompts, sizes: Sizes) -> dict[str, Spread]:
    """Return the tokens skipped over those in full blocks that the conversation had computed before each turn."""
    block = worker.config.block_size
    talks = [prompts.tokens(sizes.own_mean) for _ in range(sizes.conversations)]
    skippable = 0
    before = worker.stats()["prefill_tokens_skipped"]
    for turn in range(sizes.turns):
        if turn > 0:
            skippable += sum((len(talk) - 1) // block * block for talk in talks)  # the last token has no KV yet
            talks = [[*talk, *prompts.tokens(sizes.turn_input)] for talk in talks]
        outputs = worker.generate(talks, _params(sizes.turn_output))
        talks = [[*talk, *out.samples[0].token_ids] for talk, out in zip(talks, outputs, strict=True)]
    skipped = worker.stats()["prefill_tokens_skipped"] - before
    return {"multi_turn_skip_ratio": spread([skipped / skippable])}


def nothing_shared(model: PreTrainedModel, sizes: Sizes, rounds: int) -> dict[str, Spread]:
    """Return the speed with the cache over the speed without it, where it can not help. The model is bound already."""
    prompts = Prompts(model.config.vocab_size)
    work = [[prompts.tokens(sizes.own_mean) for _ in range(sizes.requests)] for _ in range(rounds)]
    return {"no_share_ratio": unshared.speed_with_over_without(model, work, sizes.unshared_output)}


def measure(model: PreTrainedModel, sizes: Sizes, rounds: int) -> dict[str, Spread]:
    prompts = Prompts(model.config.vocab_size)
    with _worker(model, sizes) as worker:  # binds the model
        counted = (
            first_wave(worker, prompts, sizes) | groups(worker, prompts, sizes) | multi_turn(worker, prompts, sizes)
        )
    return shared_prefix(model, sizes, rounds) | counted | nothing_shared(model, sizes, rounds)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=12, of="each comparison")
    parser.add_argument("--quick", action="store_true", help="one round of everything")
    args = parser.parse_args()
    sizes = Sizes()
    model = models.build(models.SHAPES["5m"], torch.float32, sizes.longest)
    load_before = results_file.load_average()
    metrics = measure(model, sizes, 1 if args.quick else args.rounds)
    metrics |= cache_growth.measure(cache_growth.Sizes())
    table.show(metrics)
    if args.json:
        meta = results_file.describe(workload=vars(sizes), model=models.SHAPES["5m"], load_before=load_before)
        results_file.write(args.json, meta, metrics)


if __name__ == "__main__":
    main()
