"""Measure what hybrid models cost and gain: the exact decode step, the cache of states, samebit and Hugging Face.

    python benchmarks/hybrid.py [--parts NAME ...] [--json FILE] [--rounds N] [--quick]

README.md in this folder defines each number.
"""

import samebit.kernels

# isort: split
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from samebit.benchmarks import decode_step
from samebit.benchmarks.contestants.huggingface import hf_generate
from samebit.benchmarks.contestants.samebit_worker import samebit
from samebit.benchmarks.prefix_cache import Prompts
from samebit.benchmarks.rounds import results_file, table
from samebit.benchmarks.rounds.command_line import benchmark_parser
from samebit.benchmarks.rounds.parts_file import PartsFile
from samebit.benchmarks.rounds.turns import Calibration, Spread, Turn, alternate, kept, ratio, spread
from samebit.benchmarks.workloads import models
from samebit.benchmarks.workloads.workload import Run, Tokens, Workload
from samebit.kernels.layout.states.delta import DeltaShape
from samebit.kernels.layout.states.mamba import SSMShape
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

MAMBA = SSMShape(
    models.HYBRID["mamba_num_heads"], models.HYBRID["mamba_head_dim"], models.HYBRID["n_groups"],
    models.HYBRID["ssm_state_size"], taps=4,
)  # fmt: skip
STEPS: dict[str, SSMShape | DeltaShape] = {
    "exact_over_recurrent": MAMBA,
    "exact_over_recurrent_delta": DeltaShape(key_heads=4, value_heads=8, key_dim=128, value_dim=128, taps=4),
    "exact_over_recurrent_kda": DeltaShape(
        key_heads=8, value_heads=8, key_dim=128, value_dim=128, taps=4, by_channel=True
    ),
}
"""Parts that measure the decode step of a layer, by what their figures are called."""

MODELS: dict[str, tuple[Callable[..., PreTrainedModel], dict[str, Any]]] = {
    "hybrid": (models.build_hybrid, models.HYBRID),
    "gdn": (models.build_delta, models.DELTA),
}
"""Parts that measure a whole model."""

WARM_UP_RUNS = 3
"""Sets how often both contestants do the whole work before the first round: a worker fills its cache meanwhile."""


@dataclass(frozen=True)
class Sizes:
    """Sets the size of the measurement, in tokens unless noted otherwise."""

    conversations: int = 16
    turns: int = 6
    first_prompt: int = 200
    turn_input: int = 40
    turn_output: int = 200
    requests: int = 64
    shared: int = 1000
    own: int = 30

    @property
    def longest(self) -> int:
        talk = self.first_prompt + self.turns * (self.turn_input + self.turn_output)
        return max(talk, self.shared + self.own + self.turn_output)


class Talks:
    """Holds conversations on a worker with the cache, the last turn beside a worker without it."""

    def __init__(self, model: PreTrainedModel, sizes: Sizes, stack: ExitStack) -> None:
        self.sizes = sizes
        self.prompts = Prompts(model.config.vocab_size)
        self.on, self.off = (stack.enter_context(_worker(model, sizes, enabled)) for enabled in (True, False))
        for worker in (self.on, self.off):
            worker.generate([self.prompts.tokens(70), self.prompts.tokens(3)], _params(8))

    def measure(self, rounds: int, calibration: Calibration) -> dict[str, Spread]:
        """Return the prompt tokens computed over the fewest possible, and the gain in the last first-token time."""
        computed: list[float] = []
        before: dict[int, float] = {}
        ideal: dict[int, int] = {}
        asked: dict[int, Tokens] = {}

        def with_cache(number: int) -> float:
            outputs = self.on.generate(asked[number], _params(self.sizes.turn_output))
            done = self.on.stats()["prefill_tokens_computed"] - before[number]
            computed.append(done / ideal[number])
            return _first_token(outputs)

        def turn(name: str) -> Turn:
            def once(number: int) -> float:
                if number not in asked:
                    before[number] = self.on.stats()["prefill_tokens_computed"]
                    asked[number], ideal[number] = self._all_but_the_last()
                if name == "on":
                    return with_cache(number)
                return _first_token(self.off.generate(asked[number], _params(1)))

            return once

        steady = kept(alternate({name: turn(name) for name in ("on", "off")}, rounds, calibration), calibration)
        return {
            "multi_turn_computed_over_ideal": spread(computed),
            "multi_turn_ttft_gain": ratio(steady, "off", "on"),
            "multi_turn_ttft_ms": spread([1e3 * one.seconds["on"] for one in steady]),
        }

    def _all_but_the_last(self) -> tuple[Tokens, int]:
        """Return the prompts of the last turn, and the fewest prompt tokens that all turns have to compute."""
        sizes, block = self.sizes, self.on.config.block_size
        talks = [self.prompts.tokens(sizes.first_prompt) for _ in range(sizes.conversations)]
        ideal = sum(map(len, talks))
        for _ in range(sizes.turns - 1):
            outputs = self.on.generate(talks, _params(sizes.turn_output))
            talks = [[*talk, *out.samples[0].token_ids] for talk, out in zip(talks, outputs, strict=True)]
            known = sum((len(talk) - 1) // block * block for talk in talks)  # the last token has no KV yet
            talks = [[*talk, *self.prompts.tokens(sizes.turn_input)] for talk in talks]
            ideal += sum(map(len, talks)) - known
        return talks, ideal


def _worker(model: PreTrainedModel, sizes: Sizes, enabled: bool) -> RolloutWorker:
    config = RolloutConfig(max_model_len=sizes.longest, enable_prefix_caching=enabled)
    return RolloutWorker(model, config=config)


def _params(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, ignore_eos=True)


def _first_token(outputs: list[RequestOutput]) -> float:
    """Return the mean seconds to the first token."""
    return statistics.mean(out.time_to_first_token or 0.0 for out in outputs)


def first_wave(model: PreTrainedModel, sizes: Sizes) -> dict[str, Spread]:
    """Return the share of simultaneous requests, at a cold cache, that skip what they share down to the grid."""
    prompts = Prompts(model.config.vocab_size)
    shared = prompts.tokens(sizes.shared)
    with _worker(model, sizes, True) as worker:
        outputs = worker.generate([[*shared, *prompts.tokens(sizes.own)] for _ in range(sizes.requests)], _params(1))
        grid = sizes.shared // worker.config.block_size * worker.config.block_size
    skipped = sum(out.num_cached_tokens == grid for out in outputs)
    return {"first_wave_hit_ratio_unaligned": spread([skipped / len(outputs)])}


def beside_hugging_face(
    model: PreTrainedModel, kind: str, workload: Workload, rounds: int, calibration: Calibration
) -> dict[str, Spread]:
    """Compare output tokens per second with Hugging Face's, prefill included."""
    vocab_size = model.config.vocab_size

    def turn(name: str, run: Run) -> Turn:
        for unseen in range(10**6, 10**6 + WARM_UP_RUNS):
            run(workload.make_prompts(vocab_size, seed=unseen), workload.new_tokens)
        return workload.turn(name, run, vocab_size)

    with samebit(model, workload, exact=True) as (run, _):
        turns = {"samebit": turn("samebit", run), "hf_generate": turn("hf_generate", hf_generate(model, workload))}
        steady = kept(alternate(turns, rounds, calibration), calibration)
    speeds = {
        f"tokens_per_second_{name}_{kind}": spread([workload.output_tokens / one.seconds[name] for one in steady])
        for name in turns
    }
    return {f"ratio_vs_hf_generate_{kind}": ratio(steady, "hf_generate", "samebit"), **speeds}


def measure(
    built: dict[str, PreTrainedModel], sizes: Sizes, workload: Workload, steps: dict[str, decode_step.Sizes],
    rounds: int,
) -> dict[str, Spread]:  # fmt: skip
    """Measure the steps of layers, and whole models by their kinds: "hybrid" has Mamba2, "gdn" Gated DeltaNet."""
    calibration = Calibration()
    metrics: dict[str, Spread] = {}
    for name, layers in steps.items():
        metrics |= decode_step.measure(layers, name)
    for kind, model in built.items():
        metrics |= beside_hugging_face(model, kind, workload, max(1, rounds - 2), calibration)  # over a minute each
        cached = first_wave(model, sizes)
        with ExitStack() as stack:
            cached |= Talks(model, sizes, stack).measure(rounds, calibration)
        metrics |= {name if kind == "hybrid" else f"{name}_{kind}": value for name, value in cached.items()}
    return metrics


def measure_part(name: str, rounds: int, quick: bool) -> tuple[dict[str, Any], dict[str, Spread]]:
    """Return what says how to repeat a part, and its figures."""
    sizes, workload = Sizes(), Workload()
    load_before = results_file.load_average()
    about: dict[str, Any] = {"load_before": load_before}
    built: dict[str, PreTrainedModel] = {}
    steps: dict[str, decode_step.Sizes] = {}
    if name in MODELS:
        build, shape = MODELS[name]
        built[name] = build(shape, sizes.longest)
        about |= {"workload": vars(workload), "sizes": vars(sizes), "model": shape}
        about |= {"parameters": models.num_parameters(built[name])}
    else:
        steps[name] = decode_step.Sizes(STEPS[name], rounds=2 if quick else decode_step.Sizes.rounds)
        about |= {"shape": vars(STEPS[name])}
    metrics = measure(built, sizes, workload, steps, 1 if quick else rounds)
    return results_file.describe(**about), metrics


def main() -> None:
    parts = [*STEPS, *MODELS]
    parser = benchmark_parser(__doc__, rounds=3, of="each comparison", parts=parts)
    parser.add_argument("--quick", action="store_true", help="one round of everything")
    args = parser.parse_args()
    kept_parts = PartsFile(args.json)
    for name in kept_parts.missing(args.parts or parts):
        about, metrics = measure_part(name, args.rounds, args.quick)
        kept_parts.add(name, about, metrics)
        table.show(metrics)


if __name__ == "__main__":
    main()
