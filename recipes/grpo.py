"""Train by GRPO with rollouts whose log-probabilities are bit for bit the trainer's: `make grpo`.

Worker and trainer share one module, unless `--sync` says otherwise. At every step each sampled token's log-probability,
as the worker reported it, is compared with the one the trainer computes, bit by bit; the run stops with an error if one
differs.

What improves, honestly: the built-in model comes out of its warm-up able to work a sum out in writing, but in the
habit of answering at once. Most of the gain is that GRPO finds out that the working pays (recipes/README.md).
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
from samebit.recipes import experiment
from samebit.recipes.experiment import Seed
from samebit.recipes.learner import Learner
from samebit.recipes.metrics import Row
from samebit.recipes.mismatch import Check, require_none
from samebit.recipes.sampler import Sampler
from samebit.recipes.sampling import sample
from samebit.recipes.settings import OnPolicy, parse
from samebit.recipes.sync import Synced, synced


def run(settings: OnPolicy) -> list[Row]:
    """Run all seeds; return the rows of metrics.jsonl."""
    return experiment.run(settings, lambda seed: train(seed, settings))


def train(seed: Seed, settings: OnPolicy) -> None:
    """Do all GRPO steps of a seed."""
    with synced(settings.sync, seed.policy, seed.tokenizer, seed.folder, seed.config) as rollout:
        learner = Learner(seed.policy, rollout.update, seed.tokenizer, settings, updates=settings.updates)
        learn(seed, settings, rollout, learner)


def learn(
    seed: Seed,
    settings: OnPolicy,
    rollout: Synced,
    learner: Learner,
    judge: Sampler | None = None,
    check: Check = require_none,
) -> None:
    """Do the steps that are left. judge: the worker that answers the held-out problems; without one, the rollout's.

    check: refuses a step, which has been logged, by its metrics.
    """
    judge = judge or rollout.worker
    if seed.steps_done:
        seed.saved.restore(learner.optimizer)
    seed.before(judge)
    for step, problems in zip(bar := seed.steps(), seed.batches(), strict=False):
        scored = sample(rollout.worker, seed.tokenizer, problems, seed.params, seed.style)
        row = {**scored.metrics(), **learner.step(step, scored.trajectories())}
        bar.set_postfix(reward=f"{row['reward/mean']:.3f}", mismatch=row["training/rollout_logprobs_diff_max"])
        seed.evaluate_and_log(step, row, judge, scored.shown(problems, settings.samples_shown))
        check(step, row)
        if settings.save_every and (step % settings.save_every == 0 or step == settings.steps):
            seed.saved.save(step, seed.policy, seed.tokenizer, learner.optimizer)


if __name__ == "__main__":
    settings = parse(OnPolicy, "recipes/grpo.py")
    experiment.main(settings, lambda seed: train(seed, settings))
