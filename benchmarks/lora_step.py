"""Measure a step of GRPO that trains an adapter beside one that trains all weights: the same prompts, in turns.

    python benchmarks/lora_step.py [--json FILE] [--rounds N] [--quick]

A step samples groups, scores them with gradients, and lets AdamW write the weights of the module that worker and
trainer share. full_NAME and lora_NAME: seconds of processor time of sampling, training and the update; lora_over_full:
of the whole step. full_gib and lora_gib: weights, gradients and AdamW's moments, in GiB.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from samebit.benchmarks.rounds import results_file
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models
from samebit.kernels import token_logprobs
from samebit.recipes.grpo_loss import group_advantages, grpo_loss
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

PARTS = ("sampling", "training", "update")


@dataclass(frozen=True)
class Sizes:
    """Sets the size of a step."""

    shape: str = "100m"
    rank: int = 16
    prompts: int = 4
    samples: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    rounds: int = 4


class Contestant:
    """Trains a model, or an adapter of it, on samples of its own."""

    def __init__(self, sizes: Sizes, *, adapted: bool) -> None:
        self._sizes = sizes
        longest = sizes.prompt_tokens + sizes.new_tokens
        model: nn.Module = models.build(models.SHAPES[sizes.shape], torch.float32, longest)
        if adapted:
            config = LoraConfig(r=sizes.rank, lora_alpha=2 * sizes.rank, target_modules="all-linear")
            model = get_peft_model(model, config)
        rows = sizes.prompts * sizes.samples
        self.worker = RolloutWorker(
            model, config=RolloutConfig(num_blocks=rows * (longest // 16 + 2), max_num_seqs=rows, max_model_len=longest)
        )
        self._model = model
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, 1e-5)
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.prompts, sizes.prompt_tokens)
        self._prompts = torch.randint(self.worker.limits.vocab_size, shape, generator=generator).tolist()

    def step(self) -> dict[str, float]:
        """Take a step; return the seconds of processor time of its parts."""
        began = time.process_time()
        wanted = SamplingParams(n=self._sizes.samples, max_tokens=self._sizes.new_tokens, seed=0, ignore_eos=True)
        outputs = self.worker.generate(self._prompts, wanted)
        sampled = time.process_time()
        self._backward(outputs)
        trained = time.process_time()
        with self.worker.weight_update():
            self._optimizer.step()
        self._optimizer.zero_grad()
        ended = time.process_time()
        return dict(zip(PARTS, (sampled - began, trained - sampled, ended - trained), strict=True))

    def gib(self) -> float:
        """Return the size of weights, gradients and AdamW's moments, after a step."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held()) / (1 << 30)

    def _held(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._trained  # each has a gradient of its size
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _backward(self, outputs: list[RequestOutput]) -> None:
        rewards = torch.rand(len(outputs), self._sizes.samples, generator=torch.Generator().manual_seed(0))
        tokens = self._sizes.prompts * self._sizes.samples * self._sizes.new_tokens
        for output, advantages in zip(outputs, group_advantages(rewards), strict=True):
            ids = torch.tensor([output.prompt_token_ids + sample.token_ids for sample in output.samples])
            reported = torch.zeros(ids.shape[0], ids.shape[1] - 1)
            reported[:, -self._sizes.new_tokens :] = torch.tensor([sample.logprobs for sample in output.samples])
            mask = torch.zeros_like(reported, dtype=torch.bool)
            mask[:, -self._sizes.new_tokens :] = True
            grpo_loss(token_logprobs(self._model, ids), reported, advantages, mask, tokens, clip=0.2).backward()


def measure(sizes: Sizes) -> dict[str, Spread]:
    """Return the figures; one round that is not counted comes first."""
    with ExitStack() as stack:
        sides = {"full": Contestant(sizes, adapted=False), "lora": Contestant(sizes, adapted=True)}
        for side in sides.values():
            stack.enter_context(side.worker)
        rounds = [{name: side.step() for name, side in sides.items()} for _ in range(sizes.rounds + 1)][1:]
        metrics = {f"{name}_{part}": spread([one[name][part] for one in rounds]) for name in sides for part in PARTS}
        ratios = [sum(one["lora"].values()) / sum(one["full"].values()) for one in rounds]
        metrics["lora_over_full"] = spread(ratios)
        return metrics | {f"{name}_gib": spread([side.gib()]) for name, side in sides.items()}


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="steps")
    parser.add_argument("--quick", action="store_true", help="a small model and step: shows that it runs")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds)
    if arguments.quick:
        sizes = Sizes("5m", prompts=2, samples=2, prompt_tokens=8, new_tokens=4, rounds=arguments.rounds)
    metrics = measure(sizes)
    for name, one in metrics.items():
        print(f"{name:<28}{one.value:>8.3f}  ({one.min:.3f} to {one.max:.3f})")
    if arguments.json:
        results_file.write(arguments.json, results_file.describe(**asdict(sizes)), metrics)


if __name__ == "__main__":
    main()
