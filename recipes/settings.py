"""Define every setting of the GRPO recipes, and make the command lines from them."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from samebit.recipes.boards import BOARDS
from samebit.recipes.problem import MARKER
from samebit.rollout import RolloutConfig, SamplingParams

AnySettings = TypeVar("AnySettings", bound="Settings")

ARCHITECTURES = ("dense", "hybrid", "gdn", "moe", "mla")
"""Shapes of the built-in model."""

CORRECTIONS = ("clip", "truncate", "none")
"""What is done where a token was sampled with another probability than the trainer's now."""


def option(default: Any, text: str, **extra: Any) -> Any:
    """Return a field that is also a command-line option; its type is the default's unless `type=` is given."""
    kind = {} if isinstance(default, bool) else {"type": type(default)}
    return field(default=default, metadata={"help": text, **kind, **extra})


@dataclass(frozen=True)
class Settings:
    """Holds the settings of both recipes. The defaults are the ones whose result recipes/README.md reports."""

    model: str | Path | None = option(
        None, "Hugging Face folder (model and tokenizer), or a name of the hub; skips the warm-up", type=str
    )
    data: str | Path | None = option(
        None, "prompts: a .parquet or .jsonl file, or a data set of the hub, NAME or NAME:CONFIG", type=str
    )
    columns: str = option("prompt,answer", "of the data: prompt and answer")
    split: str = option("train", "of a data set of the hub")
    chat: str = option("auto", "auto: ask in the tokenizer's chat template, if it has one", choices=("auto", "never"))
    instruction: str = option("", "text that follows each prompt")
    answer_after: str = option(MARKER, "what the answer stands behind, in completions and in the data's answers")
    architecture: str = option("dense", "shape of the built-in model", choices=ARCHITECTURES)
    prompt_style: str = option("expression", "how chain_sum asks", choices=("expression", "question"))
    out: Path = option(Path("runs/grpo"), "where metrics, figure, TensorBoard events and models go", type=Path)
    device: str = option("cpu", "where trainer and worker compute", choices=("cpu", "cuda"))
    seeds: int = option(1, "run the seeds 0 .. SEEDS-1, one after the other")

    steps: int = option(30, "GRPO steps")
    prompts: int = option(32, "prompts a step")
    samples: int = option(16, "samples a prompt, the group that advantages are taken over")
    temperature: float = option(1.0, "of sampling and of the trainer's log-probabilities")
    max_tokens: int = option(64, "longest completion")
    lr: float = option(2e-4, "learning rate of GRPO, reached after 5 steps")
    clip: float = option(0.2, "how far the probability ratio may move a token's loss")
    correction: str = option(
        "clip",
        "of tokens that the trainer gives another probability than the rollout: a clipped ratio, a weight of at most "
        "TRUNCATION, or none: the ratio is to the trainer's own probability before the step",
        choices=CORRECTIONS,
    )
    truncation: float = option(2.0, "largest weight of a token, with --correction truncate")
    grad_norm: float = option(1.0, "gradients are scaled down to this norm")
    log_to: str = option("tensorboard", "what shows the metrics beside metrics.jsonl", choices=BOARDS)
    samples_shown: int = option(4, "samples a step that are written to samples.jsonl")
    micro_batch_tokens: int = option(8192, "padded tokens in one trainer forward")
    held_out: int = option(400, "held-out problems, the same for every seed")
    eval_every: int = option(10, "steps between greedy evaluations of the held-out problems")

    warm_from: Path | None = option(
        None, "OUT of an earlier run with the same warm-up, whose warmed-up policies this one begins with", type=Path
    )
    warmup_cap: int = option(500, "most supervised steps on answers with working")
    warmup_loss: float = option(0.05, "smoothed loss at which these steps end")
    warmup_mixed: int = option(90, "supervised steps after that, three in four answers direct")

    kv_cache_gb: float = option(0.5, "GiB of the worker's KV cache; a large model needs more")
    max_num_seqs: int = option(512, "samples that decode together")
    max_num_batched_tokens: int = option(4096, "tokens in one engine step")

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device cuda: torch {torch.__version__} sees no CUDA device here")
        if self.data is not None and self.model is None:
            raise ValueError("--data needs --model: the built-in model's tokenizer knows arithmetic only")
        if self.model is not None and self.warm_from is not None:
            raise ValueError("--warm-from is for the built-in model: --model brings its own")
        if self.model is not None and self.architecture != "dense":
            raise ValueError("--architecture is for the built-in model: --model brings its own")
        for name in ("seeds", "steps", "prompts", "max_tokens", "held_out", "eval_every", "warmup_cap"):
            if vars(self)[name] < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.model is None and self.prompt_style != "expression":
            raise ValueError("--prompt-style question needs --model: the built-in model's tokenizer knows no words")
        if self.truncation < 1:
            raise ValueError(f"--truncation must be at least 1, the weight of a token on policy: got {self.truncation}")
        if not self.answer_after:
            raise ValueError("--answer-after must not be empty")
        if len(self.columns.split(",")) != 2 or not all(self.columns.split(",")):
            raise ValueError(f"--columns must be two names, PROMPT,ANSWER, got {self.columns!r}")
        if self.samples < 2:
            raise ValueError("--samples must be at least 2: the advantage of a group of one is always zero")
        if self.temperature <= 0:
            raise ValueError("--temperature must be positive: greedy samples of one prompt are all equal")
        self.worker_config(seed=0)
        self.sampling_params()

    def worker_config(self, seed: int) -> RolloutConfig:
        """Return how the worker is configured, its random numbers by `seed`."""
        return RolloutConfig(
            device=self.device,
            kv_cache_gb=self.kv_cache_gb,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            seed=seed,
        )

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the groups that are learned from."""
        return SamplingParams(n=self.samples, temperature=self.temperature, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class OnPolicy(Settings):
    """Holds the settings of recipes/grpo.py."""

    sync: str = option(
        "shared",
        "how the worker gets the weights: it runs on the trainer's module, or on a copy, or on one in another process "
        "that is fed through shared memory",
        choices=("shared", "copy", "shm"),
    )
    updates: int = option(1, "optimizer steps of a GRPO step, each on an even share of its prompts")
    save_every: int = option(0, "steps between checkpoints, in OUT/seedN/checkpoint; 0 for none")
    resume: bool = option(False, "go on from the checkpoints in OUT, where there are any", action="store_true")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == "cuda" and self.sync == "shm":
            raise ValueError("--sync shm: the other process computes on the CPU; --device cuda takes shared or copy")
        if self.save_every < 0:
            raise ValueError(f"--save-every must be at least 0, got {self.save_every}")
        if self.updates < 1 or self.prompts % self.updates:
            raise ValueError(f"--updates must divide --prompts ({self.prompts}), got {self.updates}")


@dataclass(frozen=True)
class OffPolicy(Settings):
    """Holds the settings of recipes/grpo_async.py."""

    out: Path = option(Path("runs/grpo-async"), "where metrics, figure, TensorBoard events and models go", type=Path)
    in_flight: str = option(
        "recompute",
        "what an update does to a batch that is being sampled: go on with the new weights, KV computed again, or wait "
        "until it is finished",
        choices=("recompute", "wait"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device != "cpu":
            raise ValueError(f"--device {self.device}: the worker's process computes on the CPU; take recipes/grpo.py")


def parse(kind: type[AnySettings], program: str, arguments: Sequence[str] | None = None) -> AnySettings:
    """Return the settings from the command line; an unknown or impossible option ends the program with the reason."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="GRPO whose rollout log-probabilities are bit for bit the trainer's",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for spec in dataclasses.fields(kind):
        parser.add_argument("--" + spec.name.replace("_", "-"), default=spec.default, **spec.metadata)
    values = vars(parser.parse_args(arguments))
    try:
        return kind(**values)
    except ValueError as error:
        parser.error(str(error))
