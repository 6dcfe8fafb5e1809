"""Measure what small budgets of cached states cost: conversations in turns, on a model with Gated DeltaNet layers.

    python benchmarks/state_budgets.py [--json FILE]

README.md in this folder defines each number.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
from dataclasses import dataclass

from transformers import PreTrainedModel

from samebit.benchmarks.prefix_cache import Prompts, Sizes, multi_turn
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.kernels import bind
from samebit.kernels.binding.binding import binding_of
from samebit.recipes import tiny_model
from samebit.rollout import RolloutConfig, RolloutWorker


@dataclass(frozen=True)
class Budgets:
    """Counts conversations, and the checkpoints that each of them has room for, on average."""

    conversations: int = 16
    turns: int = 5
    checkpoints_each: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 4.0)


def measure(model: PreTrainedModel, budgets: Budgets) -> dict[str, Spread]:
    """Return for each budget the tokens skipped over those in full blocks, and the states that were missed."""
    binding, dtype = binding_of(model), next(model.parameters()).dtype
    assert binding.state_layout is not None
    each = binding.state_layout.bytes_per_checkpoint(dtype) / 2**30
    sizes = Sizes(conversations=budgets.conversations, turns=budgets.turns)
    metrics: dict[str, Spread] = {}
    for share in budgets.checkpoints_each:
        config = RolloutConfig(
            max_model_len=sizes.longest, max_num_seqs=8, state_cache_gb=(share * budgets.conversations + 0.5) * each
        )
        with RolloutWorker(model, config=config) as worker:
            skipped = multi_turn(worker, Prompts(binding.vocab_size), sizes)["multi_turn_skip_ratio"]
            missed = worker.stats()["state_misses_evicted"]
        metrics[f"skip_ratio_with_{share}_checkpoints_each"] = skipped
        metrics[f"evicted_misses_with_{share}_checkpoints_each"] = spread([missed])
    return metrics


def main() -> None:
    parser = benchmark_parser(__doc__)
    args = parser.parse_args()
    length = {"max_position_embeddings": Sizes().longest}
    model = bind(tiny_model.build_model(tiny_model.build_tokenizer(), 0, "gdn", **length))
    budgets = Budgets()
    load_before = results_file.load_average()
    metrics = measure(model, budgets)
    table.show(metrics)
    if args.json:
        meta = results_file.describe(
            workload=vars(budgets), model={"architecture": "gdn", **length}, load_before=load_before
        )
        results_file.write(args.json, meta, metrics)


if __name__ == "__main__":
    main()
