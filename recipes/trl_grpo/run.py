"""Train by GRPO in TRL with exact rollouts: `make trl-grpo`; prints the reward, and how many tokens differ: none.

What a script of TRL's needs for this: the trainer's import from samebit, `bf16=False` (or a bfloat16 model), and
`use_cpu=True`.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)
from samebit.rollout.integrations.trl import GRPOTrainer, RLOOTrainer  # before trl: this says what is missing

# isort: split
import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # read when AsyncGRPO is imported

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from trl import GRPOConfig, RLOOConfig

from samebit.kernels import BindingError
from samebit.recipes.problem import MARKER, reward
from samebit.recipes.prompts import Style
from samebit.recipes.trl_grpo.task import AnswerReward, Task, built_in, of_user
from samebit.rollout import RolloutWorker, SamplingParams
from samebit.rollout.requests.stopping import known_end_tokens

TRAINERS = ("grpo", "rloo", "async")
COLUMNS = {
    "step": "step",
    "reward": "reward",
    "accuracy": "greedy",
    "loss": "loss",
    "entropy": "entropy",
    "samebit/tokens_compared": "tokens",
    "samebit/tokens_differing": "differing",
    "samebit/rollout_probs_diff_max": "probs diff max",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Build or load, train, show."""
    given = _parser().parse_args(arguments)
    console = Console(width=max(Console().width, 110))
    try:
        task = _task(given)
        trainer = build(task, given)
    except (ValueError, BindingError, OSError) as error:
        sys.exit(f"error: {error}")
    trainer.add_callback(Evaluation(task, trainer, given))
    trainer.train(resume_from_checkpoint=given.resume)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trainer.state.log_history))
    trainer.save_model(str(given.out / "policy"))
    console.print(table(rows))
    agreement = trainer.agreement
    console.print(
        f"largest difference of probabilities: {agreement.probs_diff_max}; "
        f"{agreement.differing} of {agreement.compared:,} tokens differ; metrics.jsonl and policy/ are in {given.out}",
        highlight=False,
    )
    if agreement.differing:
        sys.exit("error: rollout and trainer differ")
    if not agreement.compared:
        sys.exit("error: nothing was compared: no step was trained, or none on samples of its own weights")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recipes/trl_grpo/run.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--trainer", choices=TRAINERS, default="grpo", help="of TRL's")
    add("--model", help="folder or name on the Hugging Face hub; default: the small model of recipes/grpo.py")
    add("--data", help="prompts: .parquet, .jsonl or a data set of the hub, with the columns `prompt` and `answer`")
    add(
        "--answer-after", default=MARKER, help="what the answer stands behind, in completions and in the data's answers"
    )
    add("--out", type=Path, default=Path("runs/trl-grpo"), help="where everything goes")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--prompts", type=int, default=16, help="prompts a step")
    add("--samples", type=int, default=16, help="samples a prompt")
    add("--micro-batch", type=int, default=256, help="samples in one forward of the trainer")
    add("--max-tokens", type=int, default=64, help="longest completion")
    add("--lr", type=float, default=2e-4, help="learning rate")
    add("--beta", type=float, default=0.0, help="weight of the KL divergence to the model at the beginning")
    add("--lora", type=int, default=0, help="rank of an adapter to train instead of the model; 0 for none")
    add("--eval-every", type=int, default=5, help="steps between greedy evaluations of held-out problems")
    add("--resume", help="a checkpoint's folder to go on from")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    add("--report-to", nargs="*", default=[], help="tensorboard, wandb, ...: where TRL logs to besides")
    return parser


def _task(given: argparse.Namespace) -> Task:
    count = given.steps * given.prompts
    if not given.answer_after:
        raise ValueError("--answer-after must not be empty")
    if given.model is None:
        if given.data is not None:
            raise ValueError("--data needs --model: the built-in model's tokenizer knows arithmetic only")
        return built_in(given.out / "data", count)
    return of_user(given.model, given.data, count, given.answer_after)


def build(task: Task, given: argparse.Namespace) -> Any:
    """Return the trainer that was asked for.

    Raises:
        ValueError: sizes of a step that do not go together, or with the prompts that there are, by name.
    """
    for name in ("steps", "prompts", "samples", "micro_batch", "max_tokens", "eval_every"):
        if vars(given)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {vars(given)[name]}")
    samples = given.prompts * given.samples
    if samples % given.micro_batch:
        raise ValueError(f"--micro-batch {given.micro_batch} does not divide {samples}, the samples of a step")
    left = len(task.problems.training)
    if given.trainer != "async" and left < given.prompts:  # TRL leaves out a step that is not full, and so all
        raise ValueError(f"--prompts {given.prompts}: {left} are left for training of {given.data or 'chain_sum'}")
    options: dict[str, Any] = {
        "output_dir": str(given.out / "checkpoints"),
        "max_steps": given.steps,
        "per_device_train_batch_size": given.micro_batch,
        "gradient_accumulation_steps": samples // given.micro_batch,
        "num_generations": given.samples,
        "max_completion_length": given.max_tokens,
        "learning_rate": given.lr,
        "bf16": given.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": given.dtype},
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": given.report_to,
        "save_strategy": "steps" if given.save_every else "no",
        "save_steps": given.save_every or 1,
        "gradient_checkpointing": given.model is not None,
    }
    rewards = AnswerReward(answer_after=given.answer_after)
    trainer = _trainer(task, given, options, rewards)
    rewards.end_tokens = trainer.eos_token_ids
    return trainer


def _trainer(task: Task, given: argparse.Namespace, options: dict[str, Any], rewards: AnswerReward) -> Any:
    rest: dict[str, Any] = {"processing_class": task.tokenizer, "peft_config": _adapter(given.lora)}
    data = task.dataset()
    if given.trainer == "async":
        from trl.experimental.async_grpo import AsyncGRPOConfig

        from samebit.rollout.integrations.trl.async_grpo import AsyncGRPOTrainer

        if given.beta:
            raise ValueError("--beta: TRL's AsyncGRPO has no reference model")
        # As many samples as a step learns from, whatever their number of tokens.
        args = AsyncGRPOConfig(token_budget=0, max_staleness=1, **options)
        return AsyncGRPOTrainer(task.model, rewards, args, data, **rest)
    options["beta"] = given.beta
    if given.trainer == "rloo":
        return RLOOTrainer(task.model, rewards, RLOOConfig(**options), train_dataset=data, **rest)
    return GRPOTrainer(task.model, rewards, GRPOConfig(**options), train_dataset=data, **rest)


def _adapter(rank: int) -> Any:
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


class Evaluation(TrainerCallback):
    """Logs the greedy accuracy on held-out problems, before the first step and every few steps.

    Answers end where the trainer's samples do.
    """

    def __init__(self, task: Task, trainer: Any, given: argparse.Namespace) -> None:
        self._task = task
        self._worker: RolloutWorker = trainer.worker
        ends = known_end_tokens(
            trainer.eos_token_ids, self._worker.limits.vocab_size, "the trainer's list of end tokens"
        )
        self._params = SamplingParams(
            temperature=0.0, max_tokens=given.max_tokens, ignore_eos=True, stop_token_ids=ends
        )
        self._every = given.eval_every
        self._answer_after = given.answer_after

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if "loss" in given["logs"] and (state.global_step % self._every == 0 or state.global_step == state.max_steps):
            state.log_history[-1]["accuracy"] = self._accuracy()

    def _accuracy(self) -> float:
        problems, tokenizer = self._task.problems.held_out, self._task.tokenizer
        asked = [Style(chat=True).prompt_ids(tokenizer, problem) for problem in problems]
        outputs = self._worker.generate(asked, self._params)
        answers = [output.samples[0] for output in outputs]
        texts = tokenizer.batch_decode([answer.token_ids for answer in answers], skip_special_tokens=True)
        earned = [
            reward(text, answer.finish_reason == "stop", problem, self._answer_after)
            for text, answer, problem in zip(texts, answers, problems, strict=True)
        ]
        return sum(earned) / len(earned)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one line a step."""
    made = Table(*COLUMNS.values(), box=box.SIMPLE_HEAD)
    for row in rows:
        made.add_row(*(_shown(row.get(name)) for name in COLUMNS))
    return made


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) and not value.is_integer() else f"{value:,.0f}"


if __name__ == "__main__":
    main()
