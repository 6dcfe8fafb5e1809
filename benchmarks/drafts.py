"""Measure what tokens guessed ahead gain: the same requests with and without guesses, in turns, both exact.

    python benchmarks/drafts.py [--json FILE] [--rounds N] [--dtypes fp32 bf16] [--shapes NAME ...] [--cases CASE ...]
        [--quick]

Time without guesses over time with guesses, of N requests of a prompt each, or of the 8 samples of a long one:

* again: answered with the same tokens before, as where a conversation or an answer repeats itself word by word;
* anew: of prompts of random tokens that a random model answers for the first time, where hardly a guess is made;
* wrong: prompts and answers are random tokens of 8, so that there is a guess in nearly every step, mostly a wrong one;
* draft_right, draft_wrong: guessed by a draft model alone, of a third of the layers, in a model whose other layers add
  nothing: of greedy answers every guess is right, of such that are drawn at random hardly one. For "5m" and "100m".

"mamba" and "gdn" are small hybrids of Mamba2 and of Gated DeltaNet, which are measured where they are asked for.
"""

# isort: split
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.turns import Spread, spread
from samebit.benchmarks.workloads import models
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

NEW = 64
FEW = 8
"""Tokens that `wrong` is made of."""
BY_NGRAMS = ("anew", "wrong", "again")
BY_DRAFT = ("draft_right", "draft_wrong")

BUILD: dict[str, Callable[[torch.dtype, int], PreTrainedModel]] = {
    "5m": lambda dtype, longest: models.build(models.SHAPES["5m"], dtype, longest),
    "100m": lambda dtype, longest: models.build(models.SHAPES["100m"], dtype, longest),
    "mamba": lambda dtype, longest: models.build_hybrid(models.HYBRID, longest).to(dtype),
    "gdn": lambda dtype, longest: models.build_delta(models.DELTA, longest).to(dtype),
}


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement; groups: prompts, samples of each, tokens of each prompt."""

    shapes: tuple[str, ...] = ("5m", "100m")
    groups: tuple[tuple[int, int, int], ...] = ((1, 1, 256), (4, 1, 256), (64, 1, 256), (1, 8, 2048))
    guesses: int = 7
    rounds: int = 5
    cases: tuple[str, ...] = (*BY_NGRAMS, *BY_DRAFT)

    @property
    def room(self) -> int:
        """Return how many tokens a sequence may have."""
        return max(tokens for _, _, tokens in self.groups) + NEW


def measure(sizes: Sizes, shape: str, dtype: str) -> dict[str, Spread]:
    """Return how many times as long requests take without guesses, in each case that this shape has."""
    model, config = BUILD[shape](models.DTYPES[dtype], sizes.room), RolloutConfig(max_model_len=sizes.room)
    ahead = replace(config, num_speculative_tokens=sizes.guesses)
    metrics = dict(_compared(sizes, f"{shape}_{dtype}", BY_NGRAMS, model, (config, ahead)))
    if shape in models.SHAPES:
        with TemporaryDirectory() as folder:
            _split_off_draft(model, models.SHAPES[shape], Path(folder))
            by_model = {"draft_model": folder, "prompt_lookup_min": sizes.room, "speculative_history_tokens": 0}
            alone = replace(ahead, **by_model)  # no n-gram is that long
            metrics |= _compared(sizes, f"{shape}_{dtype}", BY_DRAFT, model, (config, alone))
    return metrics


def _compared(
    sizes: Sizes, name: str, cases: tuple[str, ...], model: PreTrainedModel, configs: tuple[RolloutConfig, ...]
) -> Iterator[tuple[str, Spread]]:
    """Yield a figure for each group of each case that is asked for."""
    generator = torch.Generator().manual_seed(0)
    plain, guessing = (RolloutWorker(model, config=config) for config in configs)
    with plain, guessing:
        for count, samples, tokens in sizes.groups:
            for case in (case for case in cases if case in sizes.cases):
                ids = FEW if case == "wrong" else plain.limits.vocab_size
                prompts = torch.randint(ids, (count, tokens), generator=generator).tolist()
                params = SamplingParams(n=samples, max_tokens=NEW, ignore_eos=True)
                if case == "wrong":
                    params = replace(params, logit_bias=dict.fromkeys(range(FEW), 100.0))
                if case == "draft_right":
                    params = replace(params, temperature=0.0)
                seeds = [0] * (sizes.rounds + 1) if case == "again" else range(1, sizes.rounds + 2)
                turns = [
                    [_seconds(worker, prompts, replace(params, seed=seed)) for worker in (plain, guessing)]
                    for seed in seeds
                ]
                group = f"{count}x{samples}" if samples > 1 else f"{count}"
                yield f"{name}_{case}_{group}", spread([one / other for one, other in turns[1:]])


@torch.no_grad()
def _split_off_draft(model: PreTrainedModel, shape: dict[str, Any], folder: Path) -> None:
    """Save the first third of a Qwen3's layers as a model, and let the others add nothing: both say the same then."""
    layers: Any = model.get_submodule("model.layers")
    count = max(1, len(layers) // 3)
    draft = models.build({**shape, "num_hidden_layers": count}, model.dtype, model.config.max_position_embeddings)
    own = model.state_dict()
    draft.load_state_dict({name: own[name] for name in draft.state_dict()})
    draft.save_pretrained(folder)
    for layer in layers[count:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _seconds(worker: RolloutWorker, prompts: list[list[int]], params: SamplingParams) -> float:
    began = time.perf_counter()
    worker.generate(prompts, params)
    return time.perf_counter() - began


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=Sizes.rounds, of="each comparison")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=tuple(models.DTYPES))
    parser.add_argument("--shapes", nargs="+", default=list(Sizes.shapes), choices=tuple(BUILD))
    parser.add_argument("--cases", nargs="+", default=list(Sizes.cases), choices=Sizes.cases)
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds: shows that it runs")
    arguments = parser.parse_args()
    sizes = Sizes(rounds=arguments.rounds, shapes=tuple(arguments.shapes), cases=tuple(arguments.cases))
    if arguments.quick:
        sizes = replace(sizes, shapes=("5m",), groups=((1, 1, 256), (1, 8, 512)), rounds=2)
    metrics: dict[str, Spread] = {}
    for shape in sizes.shapes:
        for dtype in arguments.dtypes:
            found = measure(sizes, shape, dtype)
            metrics.update(found)
            table.show(found)
    if arguments.json:
        results_file.write(arguments.json, results_file.describe(**asdict(sizes)), metrics)


if __name__ == "__main__":
    main()
