"""Share what the recipes have in common: the policy and problems of each seed, the files of results, the tables."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import cast

from rich.console import Console
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from samebit.kernels import bind
from samebit.recipes import chain_sum, prompt_file, report, tiny_model, warmup
from samebit.recipes.metrics import MetricsLog, Row
from samebit.recipes.mismatch import MismatchError, require_none
from samebit.recipes.problem import Problem, ProblemSets
from samebit.recipes.prompts import Style
from samebit.recipes.sampler import Sampler
from samebit.recipes.sampling import Shown, evaluate
from samebit.recipes.saved_run import SavedRun
from samebit.recipes.settings import OnPolicy, Settings
from samebit.rollout import RolloutConfig, SamplingParams, WorkerLostError
from samebit.rollout.errors import ModelLoadError
from samebit.rollout.models.hub import model_folder

_APART = 1_000_003
"""Keeps the random numbers of a resumed run apart from those that it has drawn."""

_CHECKPOINT = "checkpoint"

_BEFORE_ALL = -1
"""The step before step 0: a run that has no checkpoint yet begins with an empty log."""


@dataclass(frozen=True)
class Seed:
    """Holds a run of one seed at its beginning. `policy` is bound; `folder` holds it as it is now, with its
    tokenizer."""

    settings: Settings
    seed: int
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    problems: ProblemSets
    style: Style
    log: MetricsLog
    warmup_row: Row
    steps_done: int = 0

    @property
    def saved(self) -> SavedRun:
        """Return where its checkpoint is, or would be."""
        return saved_run(self.settings, self.seed)

    @property
    def config(self) -> RolloutConfig:
        return self.settings.worker_config(self.seed + _APART * self.steps_done)

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of the groups that are learned from."""
        return self.settings.sampling_params()

    def batches(self) -> Iterator[list[Problem]]:
        """Yield the problems of each step, from the first that is not done."""
        prompts = islice(cycle(self.problems.training), self.steps_done * self.settings.prompts, None)
        while True:
            yield list(islice(prompts, self.settings.prompts))

    def evaluated(self, worker: Sampler) -> Row:
        """Evaluate the policy on the held-out problems; return the metrics."""
        return evaluate(worker, self.tokenizer, self.problems.held_out, self.settings.max_tokens, self.style)

    def before(self, worker: Sampler) -> None:
        """Log step 0, if the run begins here."""
        if not self.steps_done:
            self.log.write(self.seed, 0, {**self.warmup_row, **self.evaluated(worker)})

    def steps(self) -> "tqdm[int]":
        """Yield the steps that are left, counted from 1, with a progress bar."""
        steps = range(self.steps_done + 1, self.settings.steps + 1)
        return tqdm(steps, desc=f"seed {self.seed} GRPO", unit="step", mininterval=1.0)

    def after(self, step: int, row: Row, worker: Sampler, shown: Sequence[Shown] = ()) -> None:
        """Do as `evaluate_and_log` does, and refuse the step if a token differed."""
        self.evaluate_and_log(step, row, worker, shown)
        require_none(step, row)

    def evaluate_and_log(self, step: int, row: Row, worker: Sampler, shown: Sequence[Shown]) -> None:
        """Evaluate if it is time to, and log the step. shown: samples for the log."""
        if step % self.settings.eval_every == 0 or step == self.settings.steps:
            row = {**row, **self.evaluated(worker)}
        self.log.write(self.seed, step, row, [asdict(one) for one in shown])


Train = Callable[[Seed], None]


def main(settings: Settings, train: Train) -> None:
    """Run all seeds, then show the table, the figure and the verdict on the log-probabilities."""
    transformers_logging.disable_progress_bar()
    try:
        rows = run(settings, train)
    except (MismatchError, WorkerLostError, ModelLoadError, ValueError) as error:
        sys.exit(f"error: {error}")
    console = Console()
    console.print(report.table(rows))
    console.print(report.verdict(rows), highlight=False)
    console.print(f"metrics.jsonl, reward.png and tensorboard/ are in {settings.out}", highlight=False)


def run(settings: Settings, train: Train) -> list[Row]:
    """Run all seeds, one after the other; return the rows of metrics.jsonl."""
    resumed = resumes(settings)
    if not resumed:
        _forget_checkpoints(settings)
    with MetricsLog(settings.out, settings.log_to, resumed=resumed) as log:
        for number in range(settings.seeds):
            with _seed(settings, number, log) as seed:
                train(seed)
    report.figure(log.rows, settings.out / "reward.png")
    return log.rows


@contextmanager
def _seed(settings: Settings, number: int, log: MetricsLog) -> Iterator[Seed]:
    """Make a policy and its problems; save the policy after it was trained."""
    out = settings.out / f"seed{number}"
    saved = saved_run(settings, number)
    done = saved.steps_done() if resumes(settings) else 0
    row: Row = {}
    log.forget_after(number, done or _BEFORE_ALL)
    if done:
        folder = saved.policy
        sets = _left_of_warm_up(settings, number) if settings.model is None else _problem_sets(settings, number)
    elif settings.warm_from is not None:
        folder, sets = warm_folder(settings.warm_from, number), _left_of_warm_up(settings, number)
    elif settings.model is None:
        folder = warm_folder(settings.out, number)
        row, sets = warm_up(settings, number, folder)
    else:
        folder, sets = model_folder(settings.model), _problem_sets(settings, number)
    policy, tokenizer = tiny_model.load(folder, settings.device)
    style = _style(settings, tokenizer)
    yield Seed(settings, number, bind(policy), tokenizer, folder, sets, style, log, row, done)
    tiny_model.save(policy, tokenizer, out / "policy")


def _forget_checkpoints(settings: Settings) -> None:
    """Remove the checkpoints of an earlier run in this folder: a later one would go on from them, under another log.

    Raises:
        ValueError: the model to begin with is in one of them; nothing was removed.
    """
    earlier = [SavedRun(folder / _CHECKPOINT) for folder in settings.out.glob("seed*")]
    if settings.model is not None and any(saved.holds(Path(settings.model)) for saved in earlier):
        raise ValueError(
            f"--model {settings.model} is in a checkpoint that a new run in {settings.out} removes: copy it elsewhere, "
            "name another --out, or go on from it with --resume"
        )
    for saved in earlier:
        saved.forget()


def resumes(settings: Settings) -> bool:
    """Return whether a run goes on from its checkpoints."""
    return isinstance(settings, OnPolicy) and settings.resume


def warm_folder(out: Path, seed: int) -> Path:
    """Return where a run saves the built-in model after its warm-up."""
    return out / f"seed{seed}" / "warm"


def saved_run(settings: Settings, seed: int) -> SavedRun:
    """Return where the checkpoint of a seed is, or would be."""
    return SavedRun(settings.out / f"seed{seed}" / _CHECKPOINT)


def _style(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Style:
    chat = settings.model is not None and settings.chat == "auto" and tokenizer.chat_template is not None
    return Style(chat, settings.instruction, settings.answer_after)


def warm_up(settings: Settings, seed: int, folder: Path) -> tuple[Row, ProblemSets]:
    """Build the built-in model, warm it up, save it to `folder`; what is left of the problems."""
    used = warmup.problems_needed(settings)
    sets = _of_warm_up(settings, seed)
    tokenizer = tiny_model.build_tokenizer()
    model = bind(tiny_model.build_model(tokenizer, seed, settings.architecture))
    cast(nn.Module, model).to(settings.device)
    started = perf_counter()
    result = warmup.warm_up(model, tokenizer, sets.training[:used], settings, seed)
    seconds = perf_counter() - started
    tiny_model.save(model, tokenizer, folder)
    row: Row = {"warmup/steps": result.steps, "warmup/loss": result.loss, "perf/time_warmup": seconds}
    return row, ProblemSets(sets.training[used:], sets.held_out)


def _of_warm_up(settings: Settings, seed: int) -> ProblemSets:
    """Return the problems of the warm-up and, behind them, of GRPO."""
    count = warmup.problems_needed(settings) + settings.steps * settings.prompts
    return chain_sum.problem_sets(seed, count, settings.held_out)


def _left_of_warm_up(settings: Settings, seed: int) -> ProblemSets:
    sets = _of_warm_up(settings, seed)
    return ProblemSets(sets.training[warmup.problems_needed(settings) :], sets.held_out)


def _problem_sets(settings: Settings, seed: int) -> ProblemSets:
    """Return the problems for a model that is not warmed up here."""
    if settings.data is not None:
        prompt, answer = settings.columns.split(",")
        return prompt_file.problem_sets(
            settings.data, seed, settings.held_out, (prompt, answer), settings.split, settings.answer_after
        )
    return chain_sum.problem_sets(seed, settings.steps * settings.prompts, settings.held_out, settings.prompt_style)
