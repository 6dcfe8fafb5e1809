"""GRPO with rollouts whose log-probabilities are bit for bit the trainer's: `make grpo`.

Worker and trainer share one module. At every step each sampled token's log-probability, as the worker reported it, is
compared with the one the trainer computes, bit by bit; the run stops with an error if one differs.

What improves, honestly: the built-in model comes out of its warm-up able to work a sum out in writing, but in the
habit of answering at once. Most of the gain is that GRPO finds out that the working pays (recipes/README.md).
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import sys
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter

from rich.console import Console
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from samebit.kernels import bind
from samebit.recipes import chain_sum, prompt_file, report, tiny_model, warmup
from samebit.recipes.learner import Learner
from samebit.recipes.metrics import MetricsLog, Row
from samebit.recipes.mismatch import MismatchError, require_none
from samebit.recipes.problem import ProblemSets
from samebit.recipes.sampling import evaluate, sample
from samebit.recipes.settings import Settings, parse
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams


def main() -> None:
    """Run all seeds, then show the table, the figure and the verdict on the log-probabilities."""
    settings = parse()
    transformers_logging.disable_progress_bar()
    try:
        rows = run(settings)
    except (MismatchError, ValueError) as error:
        sys.exit(f"error: {error}")
    console = Console()
    console.print(report.table(rows))
    console.print(report.verdict(rows), highlight=False)
    console.print(f"metrics.jsonl, reward.png and tensorboard/ are in {settings.out}", highlight=False)


def run(settings: Settings) -> list[Row]:
    """All seeds one after the other; the rows of metrics.jsonl."""
    with MetricsLog(settings.out) as log:
        for seed in range(settings.seeds):
            run_seed(settings, seed, log)
    report.figure(log.rows, settings.out / "reward.png")
    return log.rows


def run_seed(settings: Settings, seed: int, log: MetricsLog) -> None:
    """Get a policy and its problems, train it, save it."""
    folder = settings.out / f"seed{seed}"
    if settings.model is None:
        start, sets = _warm_up(settings, seed, folder / "warm")
    else:
        start, sets = {}, _problem_sets(settings, seed)
    policy, tokenizer = tiny_model.load(settings.model or folder / "warm")
    config = RolloutConfig(
        kv_cache_gb=settings.kv_cache_gb,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        seed=seed,
    )
    with closing(RolloutWorker(policy, config=config, tokenizer=tokenizer)) as worker:
        log.write(seed, 0, {**start, **evaluate(worker, tokenizer, sets.held_out, settings.max_tokens)})
        _train(settings, seed, Learner(policy, worker, tokenizer, settings), sets, log)
    tiny_model.save(policy, tokenizer, folder / "policy")


def _train(settings: Settings, seed: int, learner: Learner, sets: ProblemSets, log: MetricsLog) -> None:
    """All GRPO steps of a seed; each is logged, then refused if a token differed."""
    params = SamplingParams(n=settings.samples, temperature=settings.temperature, max_tokens=settings.max_tokens)
    prompts = cycle(sets.training)
    bar = tqdm(range(1, settings.steps + 1), desc=f"seed {seed} GRPO", unit="step", mininterval=1.0)
    for step in bar:
        version = learner.worker.stats()["weight_version"]
        scored = sample(learner.worker, learner.tokenizer, list(islice(prompts, settings.prompts)), params)
        row = {"weight_version": version, **scored.metrics(), **learner.step(step, scored.trajectories())}
        if step % settings.eval_every == 0 or step == settings.steps:
            row |= evaluate(learner.worker, learner.tokenizer, sets.held_out, settings.max_tokens)
        log.write(seed, step, row)
        require_none(step, row)
        bar.set_postfix(reward=f"{row['reward/mean']:.3f}", mismatch=row["training/rollout_logprobs_diff_max"])


def _warm_up(settings: Settings, seed: int, folder: Path) -> tuple[Row, ProblemSets]:
    """Build the built-in model, warm it up, save it to `folder`; what is left of the problems."""
    used = warmup.problems_needed(settings)
    sets = chain_sum.problem_sets(seed, used + settings.steps * settings.prompts, settings.held_out)
    tokenizer = tiny_model.build_tokenizer()
    model = bind(tiny_model.build_model(tokenizer, seed, settings.architecture))
    started = perf_counter()
    result = warmup.warm_up(model, tokenizer, sets.training[:used], settings, seed)
    seconds = perf_counter() - started
    tiny_model.save(model, tokenizer, folder)
    row: Row = {"warmup/steps": result.steps, "warmup/loss": result.loss, "perf/time_warmup": seconds}
    return row, ProblemSets(sets.training[used:], sets.held_out)


def _problem_sets(settings: Settings, seed: int) -> ProblemSets:
    """The problems for a model that is not warmed up here."""
    if settings.data is not None:
        return prompt_file.problem_sets(settings.data, seed, settings.held_out)
    return chain_sum.problem_sets(seed, settings.steps * settings.prompts, settings.held_out, settings.prompt_style)


if __name__ == "__main__":
    main()
