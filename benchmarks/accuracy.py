"""Teach a small model, and let it answer few-shot prompts with the prefix cache on and off: same answers, same bits.

    python benchmarks/accuracy.py mla|dsa [--json FILE] [--steps N] [--weights FILE] [--quick]

With "dsa" attention to all keys stands beside it, and a selection by an indexer that has learned nothing.
README.md in this folder defines each number.
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.benchmarks.rounds import results_file
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.kernels import bind
from samebit.recipes import tiny_model
from samebit.recipes.accuracy.answers import Answers, Difference, answer, compare
from samebit.recipes.accuracy.indexer import indexers, teach_indexers
from samebit.recipes.accuracy.models import MODELS, build
from samebit.recipes.accuracy.task import Task
from samebit.recipes.accuracy.teaching import teach
from samebit.rollout import RolloutConfig


@dataclass(frozen=True)
class Sizes:
    """Sets the size of a run. `problems`: in a batch; `chosen`: tokens that one of "dsa" reads, at most a quarter of a
    prompt."""

    held_out: int = 1319
    examples: int = 9
    steps: int = 400
    indexer_steps: int = 100
    problems: int = 64
    row_tokens: int = 256
    chosen: int = 48
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048


QUICK = Sizes(held_out=12, examples=2, steps=2, indexer_steps=2, problems=4, row_tokens=64, chosen=8, max_num_seqs=8)


@dataclass(frozen=True)
class Result:
    """Holds the runs by name ("on" and "off" at least), and in how much these two differ."""

    accuracies: dict[str, float]
    runs: dict[str, Answers]
    difference: Difference
    losses: dict[str, float]

    def metrics(self) -> dict[str, Any]:
        """Return what the file has beside `meta`."""
        shown = {
            name: {
                "accuracy": self.accuracies[name],
                "seconds": run.seconds,
                "hit_rate": run.hit_rate(),
                "prompt_tokens_skipped": run.skipped(),
                "tokens": run.tokens(),
            }
            for name, run in self.runs.items()
        }
        return {"runs": shown, "differing": asdict(self.difference), "losses": self.losses}


class Comparison:
    """Has the task and the sizes; makes models and lets them answer."""

    def __init__(self, sizes: Sizes, weights: Path | None = None) -> None:
        self.sizes = sizes
        self.weights = weights
        self.tokenizer: PreTrainedTokenizerFast = tiny_model.build_tokenizer()
        self.task = Task.draw(sizes.held_out, sizes.examples)
        self.prompts = self.task.prompts(self.tokenizer)

    def run(self, name: str) -> Result:
        """Teach the model of this name and let it answer.

        Raises:
            ValueError: more tokens are chosen than a quarter of the prompt.
        """
        shortest = min(len(prompt) for prompt in self.prompts)
        if name == "dsa" and 4 * self.sizes.chosen > shortest:
            raise ValueError(f"{self.sizes.chosen} chosen of {shortest}; allowed: a quarter of the prompt at most")
        dense = bind(self._model(name))
        losses = self._teach(dense)
        if name == "mla":
            return self._result(dense, {}, losses)
        untaught = bind(self._model(name, dense, self.sizes.chosen))
        losses["indexers"] = self._teach_indexers(dense)
        taught = bind(self._model(name, dense, self.sizes.chosen))
        return self._result(taught, {"all keys": dense, "untaught indexer": untaught}, losses)

    def _teach(self, dense: PreTrainedModel) -> dict[str, float]:
        """Teach it, or give it the weights that were kept; return the loss, if it was taught."""
        if self.weights is not None and self.weights.exists():
            dense.load_state_dict(torch.load(self.weights, weights_only=True))
            return {}
        losses = {"model": teach(dense, self._batches(0), self.sizes.steps)}
        if self.weights is not None:
            torch.save(dense.state_dict(), self.weights)
        return losses

    def _model(self, name: str, like: PreTrainedModel | None = None, chosen: int = 0) -> PreTrainedModel:
        """Return a model that reads `chosen` tokens, or all: its own weights, or those of another."""
        model = build(name, self.tokenizer, chosen or self.sizes.row_tokens + len(self.prompts[0]) + 1)
        if like is not None:
            model.load_state_dict(like.state_dict())
        return model

    def _teach_indexers(self, dense: PreTrainedModel) -> float:
        """Teach on Hugging Face's own class, which shows what its attention reads; give `dense` the weights."""
        plain = self._model("dsa", dense)
        loss = teach_indexers(plain, self._batches(1), self.sizes.indexer_steps)
        for mine, theirs in zip(indexers(dense), indexers(plain), strict=True):
            mine.load_state_dict(theirs.state_dict())
        return loss

    def _result(self, model: PreTrainedModel, others: dict[str, PreTrainedModel], losses: dict[str, float]) -> Result:
        runs = {"on": self._answers(model), "off": self._answers(model, prefix_caching=False)}
        runs |= {name: self._answers(other) for name, other in others.items()}
        accuracies = {name: run.accuracy(self.tokenizer, self.task.held_out) for name, run in runs.items()}
        return Result(accuracies, runs, compare(runs["on"], runs["off"]), losses)

    def _answers(self, model: PreTrainedModel, prefix_caching: bool = True) -> Answers:
        config = RolloutConfig(
            max_num_seqs=self.sizes.max_num_seqs,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            enable_prefix_caching=prefix_caching,
        )
        return answer(model, self.prompts, config)

    def _batches(self, seed: int) -> Any:
        return self.task.batches(self.tokenizer, self.sizes.problems, self.sizes.row_tokens, seed)


def show(name: str, sizes: Sizes, result: Result) -> None:
    """Print the table."""
    table = Table(
        "", "accuracy", "hit rate", "prompt tokens skipped", "seconds", title=f"{name}, {sizes.held_out} prompts"
    )
    titles = {"on": "prefix cache on", "off": "prefix cache off"}
    for run, answers in result.runs.items():
        table.add_row(
            titles.get(run, run),
            f"{result.accuracies[run]:.4f}",
            f"{answers.hit_rate():.3f}",
            f"{answers.skipped():,}",
            f"{answers.seconds:.1f}",
        )
    different = result.difference
    console = Console()
    console.print(table)
    console.print(
        f"on and off: {different.answers} of {sizes.held_out:,} answers differ, {different.tokens} of "
        f"{result.runs['off'].tokens():,} tokens, {different.logprobs} log-probabilities"
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="of teaching")
    parser.add_argument("--weights", type=Path, help="what teaching gave: taken from here if there, else kept here")
    parser.add_argument("--quick", action="store_true", help="sizes that show only that it runs")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes(steps=args.steps)
    meta = results_file.describe(sizes=asdict(sizes), model=args.model)
    comparison = Comparison(sizes, args.weights)
    result = comparison.run(args.model)
    show(args.model, sizes, result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"meta": meta, "metrics": result.metrics()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
