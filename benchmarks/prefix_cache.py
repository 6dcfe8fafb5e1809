"""What the prefix cache gains: samebit with it beside samebit without it, alternating, both exact.

    python benchmarks/prefix_cache.py [--json FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import argparse
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cache_growth
import models
import results_file
import table
import torch
import unshared
from alternate import Calibration, Round, Spread, Turn, alternate, kept, spread
from transformers import PreTrainedModel
from workload import Tokens, timed

from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams


@dataclass(frozen=True)
class Sizes:
    """How much is computed; tokens unless it says otherwise."""

    requests: int = 64
    shared: int = 1024
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
    """Random prompts of this vocabulary; every call gives ones that no cache has seen."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab_size), k=count)

    def sharing(self, sizes: Sizes) -> Tokens:
        """A shared beginning, then ends whose lengths spread like those of chats: log-normal, most of them short."""
        shared = self.tokens(sizes.shared)
        return [[*shared, *self.tokens(self._length(sizes.own_mean))] for _ in range(sizes.requests)]

    def _length(self, mean: int) -> int:
        """Log-normal of sigma 1, cut at four times the mean; what is cut so has a mean of 1.5175."""
        return max(1, min(4 * mean, round(self._random.lognormvariate(0.0, 1.0) * mean / 1.5175)))


class Contest:
    """Two workers on one model, one of them without the cache."""

    def __init__(self, model: PreTrainedModel, sizes: Sizes, stack: ExitStack) -> None:
        self.sizes = sizes
        self.prompts = Prompts(model.config.vocab_size)
        self.calibration = Calibration()
        self.on, self.off = (stack.enter_context(_worker(model, sizes, enabled)) for enabled in (True, False))
        for worker in (self.on, self.off):
            worker.generate([self.prompts.tokens(70), self.prompts.tokens(3)], _params(8))

    def race(self, make: list[Tokens], output: int) -> list[Round]:
        """Both on the same prompts, round by round, each time with a cold cache; and the skipped prefill alone."""
        shared = self.sizes.shared

        def prefill(number: int) -> float:
            beginnings = [self.prompts.tokens(shared) for _ in make[number][1:]]
            return timed(lambda: _tokens(self.off.generate(beginnings, _params(1))))[0]

        def turn(worker: RolloutWorker) -> Turn:
            def once(number: int) -> float:
                worker.reset_prefix_cache()
                return timed(lambda: _tokens(worker.generate(make[number], _params(output))))[0]

            return once

        turns = {"on": turn(self.on), "off": turn(self.off), "prefill": prefill}
        return kept(alternate(turns, len(make), self.calibration), self.calibration)


def _worker(model: PreTrainedModel, sizes: Sizes, enabled: bool) -> RolloutWorker:
    config = RolloutConfig(
        max_num_seqs=sizes.groups * sizes.samples, max_model_len=sizes.longest, enable_prefix_caching=enabled
    )
    return RolloutWorker(model, config=config)


def _params(output: int, n: int = 1) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=output, ignore_eos=True)


def _tokens(outputs: list[RequestOutput]) -> Tokens:
    return [sample.token_ids for output in outputs for sample in output.samples]


def shared_prefix(contest: Contest, rounds: int) -> dict[str, Spread]:
    """Requests that begin alike, for each length of the output."""
    metrics: dict[str, Spread] = {}
    for output in contest.sizes.outputs:
        made = [contest.prompts.sharing(contest.sizes) for _ in range(rounds)]
        steady = contest.race(made, output)
        times = [one.seconds for one in steady]
        metrics[f"speedup_over_ideal_out{output}"] = spread([(t["off"] - t["prefill"]) / t["on"] for t in times])
        metrics[f"requests_per_second_gain_out{output}"] = spread([t["off"] / t["on"] - 1 for t in times])
    return metrics


def first_wave(contest: Contest) -> dict[str, Spread]:
    """Share of the requests that arrive together, at a cold cache, and skip tokens."""
    prompts = contest.prompts.sharing(contest.sizes)
    contest.on.reset_prefix_cache()
    outputs = contest.on.generate(prompts, _params(1))
    return {"first_wave_hit_ratio": spread([sum(out.num_cached_tokens > 0 for out in outputs) / len(outputs)])}


def groups(contest: Contest) -> dict[str, Spread]:
    """Prompt tokens computed for groups of samples, over the tokens of their prompts."""
    sizes = contest.sizes
    prompts = [contest.prompts.tokens(sizes.group_prompt) for _ in range(sizes.groups)]
    before = contest.on.stats()["prefill_tokens_computed"]
    contest.on.generate(prompts, _params(sizes.group_output, sizes.samples))
    computed = contest.on.stats()["prefill_tokens_computed"] - before
    return {"group_prefill_ratio": spread([computed / (sizes.groups * sizes.group_prompt)])}


def multi_turn(contest: Contest) -> dict[str, Spread]:
    """Tokens skipped over those that could be: what a conversation had computed in full blocks before each turn."""
    sizes, worker = contest.sizes, contest.on
    block = worker.config.block_size
    talks = [contest.prompts.tokens(sizes.own_mean) for _ in range(sizes.conversations)]
    skippable = 0
    before = worker.stats()["prefill_tokens_skipped"]
    for turn in range(sizes.turns):
        if turn > 0:
            skippable += sum((len(talk) - 1) // block * block for talk in talks)  # the last token has no KV yet
            talks = [[*talk, *contest.prompts.tokens(sizes.turn_input)] for talk in talks]
        outputs = worker.generate(talks, _params(sizes.turn_output))
        talks = [[*talk, *out.samples[0].token_ids] for talk, out in zip(talks, outputs, strict=True)]
    skipped = worker.stats()["prefill_tokens_skipped"] - before
    return {"multi_turn_skip_ratio": spread([skipped / skippable])}


def nothing_shared(model: PreTrainedModel, sizes: Sizes, rounds: int) -> dict[str, Spread]:
    """Speed with the cache over speed without it, where it can not help."""
    prompts = Prompts(model.config.vocab_size)
    work = [[prompts.tokens(sizes.own_mean) for _ in range(sizes.requests)] for _ in range(4 * rounds)]
    return {"no_share_ratio": unshared.speed_with_over_without(model, work, sizes.unshared_output)}


def measure(model: PreTrainedModel, sizes: Sizes, rounds: int) -> dict[str, Spread]:
    with ExitStack() as stack:
        contest = Contest(model, sizes, stack)
        metrics = {
            **shared_prefix(contest, rounds),
            **first_wave(contest),
            **groups(contest),
            **multi_turn(contest),
        }
    return metrics | nothing_shared(model, sizes, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison (default 3)")
    parser.add_argument("--quick", action="store_true", help="one round of everything")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
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
