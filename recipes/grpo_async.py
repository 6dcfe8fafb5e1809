"""Train by GRPO one step off policy: while the trainer learns from a batch, a worker in its own process samples the
next.

The new weights go to the worker through shared memory as soon as they are there, into the middle of the batch that is
being sampled. So a batch holds tokens of two versions of the weights. Each token knows its version, and its importance
weight is the trainer's probability now over the one it was sampled with. That one is exact: each token's
log-probability, as the worker reported it, is compared bit by bit with the trainer's under the weights of that version,
of which a copy is kept for this.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter

import numba
import torch

from samebit.recipes import experiment
from samebit.recipes.experiment import Seed
from samebit.recipes.learner import Learner
from samebit.recipes.metrics import Row
from samebit.recipes.previous import PreviousPolicy
from samebit.recipes.remote import remote_worker
from samebit.recipes.sampling import Scored, sample
from samebit.recipes.settings import OffPolicy, parse
from samebit.recipes.sync import own_copy, sent


def run(settings: OffPolicy) -> list[Row]:
    """Run all seeds; return the rows of metrics.jsonl."""
    return experiment.run(settings, lambda seed: train(seed, settings))


def train(seed: Seed, settings: OffPolicy) -> None:
    """Do all GRPO steps of a seed, with half of the threads for the trainer and half for the worker."""
    with (
        half_of_the_threads() as threads,
        remote_worker(seed.folder, own_copy(seed.config), threads) as worker,
        ThreadPoolExecutor(1) as beside,
    ):
        update = sent(worker, seed.policy, settings.in_flight)
        learner = Learner(seed.policy, update, seed.tokenizer, settings, PreviousPolicy(seed.policy))
        seed.before(worker)
        batches = seed.batches()

        def begin() -> Future[Scored]:
            return beside.submit(sample, worker, seed.tokenizer, next(batches), seed.params, seed.style)

        sampling = begin()
        for step in (bar := seed.steps()):
            started = perf_counter()
            scored = sampling.result()
            waited = perf_counter() - started
            if step < settings.steps:
                sampling = begin()
            row = {**scored.metrics(), **learner.step(step, scored.trajectories()), "perf/time_wait": waited}
            bar.set_postfix(reward=f"{row['reward/mean']:.3f}", mismatch=row["training/rollout_logprobs_diff_max"])
            seed.after(step, row, worker)


@contextmanager
def half_of_the_threads() -> Iterator[int]:
    """Leave the trainer's thread half of the threads; return their number."""
    whole = torch.get_num_threads()
    half = max(1, whole // 2)
    torch.set_num_threads(half)
    numba.set_num_threads(half)
    try:
        yield half
    finally:
        torch.set_num_threads(whole)
        numba.set_num_threads(whole)


if __name__ == "__main__":
    settings = parse(OffPolicy, "recipes/grpo_async.py")
    experiment.main(settings, lambda seed: train(seed, settings))
