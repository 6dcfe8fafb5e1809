"""Measure what sampling through an adapter costs: the same requests through the model alone and through an adapter of
rank 16 on all of its linear layers, in turns.

    python benchmarks/lora.py [--json FILE] [--rounds N] [--dtypes fp32 bf16] [--quick]

decode_tax_N: processor time of a decode step of N sequences, over that of the model alone. prefill_tax: of a prompt.
shared_decode_tax_N: the same of a worker on a trainer's peft model, whose layers are wrapped, over the model alone.
narrow_decode_tax_N: through an adapter whose matrices have the model's dtype. mixed_decode_tax_N: in steps of rows of
two adapters and of none, in turns.
Processor time of the whole process, because it counts in whatever else the machine does.
"""

# isort: split
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from samebit.benchmarks.rounds import results_file
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

PROMPT = 16


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement."""

    shape: str = "100m"
    rank: int = 16
    sequences: tuple[int, ...] = (1, 16, 64)
    new_tokens: int = 12
    rounds: int = 7


def measure(sizes: Sizes, dtype: str) -> dict[str, Spread]:
    """Return the taxes, as ratios."""
    suffix = "" if dtype == "fp32" else f"_{dtype}"
    config = RolloutConfig(
        num_blocks=2 * max(sizes.sequences) * 16, max_model_len=256, max_num_seqs=max(sizes.sequences),
        enable_prefix_caching=False, max_num_batched_tokens=PROMPT * max(sizes.sequences),
    )  # fmt: skip
    metrics: dict[str, Spread] = {}
    with (
        RolloutWorker(models.build(models.SHAPES[sizes.shape], models.DTYPES[dtype], 256), config=config) as alone,
        RolloutWorker(_adapted(sizes, dtype), config=config) as shared,
    ):
        tensors = {name: one for name, one in shared.module.state_dict().items() if ".lora_" in name}
        alone.load_adapter("adapter", tensors, config=_config(sizes.rank))
        narrow = {name: one.to(models.DTYPES[dtype]) for name, one in tensors.items()}
        alone.load_adapter("narrow", narrow, config=_config(sizes.rank), autocast=False)
        for count in sizes.sequences:
            sides = {
                "base": _seconds(alone, ["__base__"], count, sizes.new_tokens),
                "loaded": _seconds(alone, ["adapter"], count, sizes.new_tokens),
                "shared": _seconds(shared, ["default"], count, sizes.new_tokens),
                "mixed": _seconds(alone, ["adapter", "__base__", "narrow"], count, sizes.new_tokens),
            }
            titles = {"loaded": "decode_tax", "shared": "shared_decode_tax", "mixed": "mixed_decode_tax"}
            if dtype != "fp32":
                sides["narrow"] = _seconds(alone, ["narrow"], count, sizes.new_tokens)
                titles["narrow"] = "narrow_decode_tax"
            rounds = [{name: side() for name, side in sides.items()} for _ in range(sizes.rounds + 1)][1:]
            for name, title in titles.items():
                ratios = [one[name][1] / one["base"][1] for one in rounds]
                metrics[f"{title}_{count}{suffix}"] = spread(ratios)
            metrics[f"prefill_tax_{count}{suffix}"] = spread([one["loaded"][0] / one["base"][0] for one in rounds])
    return metrics


def _config(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def _adapted(sizes: Sizes, dtype: str) -> nn.Module:
    model = get_peft_model(models.build(models.SHAPES[sizes.shape], models.DTYPES[dtype], 256), _config(sizes.rank))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)
    return model


def _seconds(
    worker: RolloutWorker, adapters: list[str], count: int, new_tokens: int
) -> Callable[[], tuple[float, float]]:
    """Return a turn: seconds of processor time of the prompts, which go through these adapters in turns, and of the
    decode steps behind them."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(worker.limits.vocab_size, (count, PROMPT), generator=generator).tolist()

    def run(tokens: int) -> float:
        began = time.process_time()
        asked = [
            SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0, adapter=adapters[place % len(adapters)])
            for place in range(count)
        ]
        worker.generate(prompts, asked)
        return time.process_time() - began

    def turn() -> tuple[float, float]:
        prefill = run(1)
        return prefill, run(1 + new_tokens) - prefill

    return turn


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="each comparison")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=tuple(models.DTYPES))
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds: shows that it runs")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds)
    if arguments.quick:
        sizes = Sizes(shape="5m", sequences=(1, 4), new_tokens=4, rounds=2)
    metrics: dict[str, Spread] = {}
    for dtype in arguments.dtypes:
        found = measure(sizes, dtype)
        metrics.update(found)
        for name, one in found.items():
            print(f"{name:<28}{one.value:>8.3f}  ({one.min:.3f} to {one.max:.3f})", flush=True)
    if arguments.json:
        results_file.write(arguments.json, results_file.describe(**asdict(sizes)), metrics)


if __name__ == "__main__":
    main()
