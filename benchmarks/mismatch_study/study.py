"""Train by GRPO with samplers that differ from the trainer by known amounts: does mismatch matter?

    python benchmarks/mismatch_study/study.py --out runs/study [--arms NAME ...] [--steps N] [--seeds N]
        [--lr LR] [--updates N]
        [--architecture dense|hybrid|gdn|moe|mla] [--vllm PYTHON | --without-vllm]

All arms of a seed begin with one warmed-up policy and see the same problems. Judged by one figure that was chosen
beforehand: greedy accuracy on the held-out problems, by exact kernels on the trainer's own weights, at the last step.
What is finished in OUT is not run again; an arm that was interrupted goes on from its last checkpoint. In the arms of
vLLM, which `make bench-vllm` installs, a step whose samples are further from the trainer than a just built engine's
ends the run.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from samebit.benchmarks.engines.commands import VLLM_PYTHON, Vllm
from samebit.benchmarks.mismatch_study import figure
from samebit.benchmarks.mismatch_study.arms import ARMS, Arm
from samebit.benchmarks.mismatch_study.freshness import Freshness
from samebit.benchmarks.mismatch_study.samplers import sampler
from samebit.benchmarks.mismatch_study.vllm_sampler import check_architecture
from samebit.recipes import experiment
from samebit.recipes.experiment import Seed
from samebit.recipes.grpo import learn
from samebit.recipes.learner import Learner
from samebit.recipes.mismatch import Check, require_none
from samebit.recipes.settings import ARCHITECTURES, OnPolicy
from samebit.rollout import RolloutWorker

_DRAWS_APART = 7_777_777
VLLM = Vllm(VLLM_PYTHON, "in-process")


def run(settings: OnPolicy, arms: Sequence[Arm], vllm: Vllm = VLLM) -> None:
    """Run the arms, one after the other, in folders of their own in `settings.out`.

    Raises:
        ValueError: an arm needs vLLM, which does not compute this architecture.
        FileNotFoundError: an arm needs vLLM, which is not there.
        StaleEngineError: vLLM sampled with other weights than the trainer's.
    """
    if any(arm.vllm for arm in arms):
        check_architecture(settings.architecture)
        vllm.check()
    warm = settings.out / "warm"
    for seed in range(settings.seeds):
        folder = experiment.warm_folder(warm, seed)
        if not folder.is_dir():
            experiment.warm_up(settings, seed, folder)
    for arm in arms:
        own = replace(settings, out=settings.out / arm.name, correction=arm.correction, warm_from=warm, resume=True)
        experiment.run(own, partial(train, own, arm, vllm))
    figure.draw(settings.out)


def train(settings: OnPolicy, arm: Arm, vllm: Vllm, seed: Seed) -> None:
    """Do the steps of an arm that are left; a worker on the trainer's own module judges."""
    config = replace(seed.config, seed=(seed.config.seed or 0) + arm.draws * _DRAWS_APART)
    with (
        RolloutWorker(seed.policy, config=config, tokenizer=seed.tokenizer) as judge,
        sampler(arm, seed, config, judge, vllm) as rollout,
    ):
        learner = Learner(
            seed.policy, rollout.update, seed.tokenizer, settings, exact=arm.exact, updates=settings.updates
        )
        learn(seed, settings, rollout, learner, judge, check_of(arm))


def check_of(arm: Arm) -> Check:
    """Return what refuses a step of this arm: a token that differs, a stale engine, nothing."""
    if arm.exact:
        return require_none
    return Freshness() if arm.vllm else lambda step, metrics: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    names = tuple(ARMS)
    parser.add_argument("--arms", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--vllm", type=Path, default=VLLM_PYTHON, metavar="PYTHON", help="of vLLM's environment")
    parser.add_argument("--without-vllm", action="store_true", help="leave its arms out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=OnPolicy.lr)
    parser.add_argument("--updates", type=int, default=OnPolicy.updates, help="optimizer steps of a batch of samples")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="dense")
    arguments = parser.parse_args()
    settings = OnPolicy(
        out=arguments.out, steps=arguments.steps, seeds=arguments.seeds, lr=arguments.lr, updates=arguments.updates,
        architecture=arguments.architecture, save_every=25,
    )  # fmt: skip
    transformers_logging.disable_progress_bar()
    arms = [ARMS[name] for name in arguments.arms]
    wanted = [arm for arm in arms if not (arm.vllm and arguments.without_vllm)]
    run(settings, wanted, replace(VLLM, python=arguments.vllm))
    figure.show(settings.out, Console())


if __name__ == "__main__":
    main()
