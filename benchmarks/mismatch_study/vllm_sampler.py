"""Sample with vLLM, in a process and an environment of its own, from the trainer's weights in bfloat16.

Invariant: before the first draw it was proven, bit for bit, that an engine with reloaded weights is a new engine.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from transformers import PreTrainedTokenizerFast

from samebit.benchmarks.engines.commands import Limits, Vllm
from samebit.benchmarks.engines.policy_messages import Draw, Drawn, drawing, loading
from samebit.benchmarks.engines.process import EngineProcess, started
from samebit.benchmarks.mismatch_study.freshness import prove_reload
from samebit.benchmarks.mismatch_study.untied import save_untied
from samebit.recipes.experiment import Seed
from samebit.recipes.sync import Synced, in_place
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.weight_sync import SyncReport

DTYPE = "bfloat16"
REFUSED = {
    "gdn": "vLLM's Qwen3.5 imports torchvision, of which no build fits its torch",
    "mla": "vLLM's DeepSeek-V3 finds no place for the correction biases that transformers writes",
    "hybrid": "vLLM's Nemotron-H knows the embedding by another name than transformers writes",
}
"""Shapes of the built-in model that vLLM (0.32) does not compute on a CPU, and why."""
_MEMORY = Path("/dev/shm")
"""Weights travel through memory, as files."""


@dataclass(frozen=True)
class VllmCompletion:
    """Holds one sample."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[tuple[int, int, int]]
    finish_reason: str
    text: str


@dataclass(frozen=True)
class VllmGroup:
    """Holds the samples of one prompt."""

    prompt_token_ids: list[int]
    samples: list[VllmCompletion]


class VllmSampler:
    """Samples as a worker of the recipes does. ends: tokens that end a completion; seed: of all that it draws."""

    def __init__(
        self, engine: EngineProcess, tokenizer: PreTrainedTokenizerFast, ends: tuple[int, ...], seed: int
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._ends = ends
        self._seeds = random.Random(seed)
        self._version = 0

    def load(self, folder: Path, version: int) -> None:
        """Sample with the weights in this folder from now on; version: of these weights."""
        self._engine.ask(loading(str(folder)))
        self._version = version

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[VllmGroup]:
        """Sample `params.n` completions of each prompt.

        Raises:
            ValueError: params that vLLM would not be told of.
            RuntimeError: the engine ended, or gave something other than was asked for.
        """
        seed = self._seeds.getrandbits(48)
        draw = Draw(prompts, params.n, _max_tokens(params), params.temperature, list(self._ends), seed)
        drawn = Drawn(**self._engine.ask(drawing(draw)))
        _check(draw, drawn)
        samples = [self._completion(*one) for one in zip(drawn.tokens, drawn.logprobs, drawn.ended, strict=True)]
        return [
            VllmGroup(prompt, samples[first : first + params.n])
            for prompt, first in zip(prompts, range(0, len(samples), params.n), strict=True)
        ]

    def _completion(self, tokens: list[int], logprobs: list[float], ended: bool) -> VllmCompletion:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        spans = [(0, len(tokens), self._version)]
        return VllmCompletion(tokens, logprobs, spans, "stop" if ended else "length", text)


@contextmanager
def vllm_sampler(vllm: Vllm, seed: Seed, config: RolloutConfig, judge: RolloutWorker) -> Iterator[Synced]:
    """Start vLLM on the policy as it is. judge: a worker on the trainer's module, which is told of each update.

    Raises:
        StaleEngineError: weights that vLLM reloads are not those that it would be built of.
    """
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        folder, other = Path(name) / "policy", Path(name) / "other"
        save_untied(seed.policy, seed.tokenizer, folder)
        save_untied(seed.policy, seed.tokenizer, other, factor=0.5)
        limits = Limits(config.kv_cache_gb, config.max_num_seqs, config.max_num_batched_tokens)
        with started(vllm.policy(other, DTYPE, limits)) as engine:
            prove_reload(engine, folder)
            sampler = VllmSampler(engine, seed.tokenizer, judge.eos_token_ids, config.seed or 0)

            def update(change: Callable[[], object]) -> SyncReport:
                started_at = perf_counter()
                report = in_place(judge)(change)
                save_untied(seed.policy, seed.tokenizer, folder)
                sampler.load(folder, report.version)
                sent = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
                return replace(report, seconds=perf_counter() - started_at, sent_bytes=sent)

            yield Synced(sampler, update)


def check_architecture(architecture: str) -> None:
    """Raise ValueError for a shape of the built-in model that vLLM does not compute."""
    if architecture in REFUSED:
        reason = REFUSED[architecture]
        raise ValueError(f"vLLM cannot sample with --architecture {architecture} (--without-vllm): {reason}")


def _max_tokens(params: SamplingParams) -> int:
    """Return `params.max_tokens`; refuse params that say more than a draw can."""
    most = params.max_tokens
    if most is None or params != SamplingParams(n=params.n, temperature=params.temperature, max_tokens=most):
        raise ValueError(f"vLLM's arm samples by n, temperature and max_tokens alone, got {params}")
    return most


def _check(draw: Draw, drawn: Drawn) -> None:
    """Raise unless there are as many completions as asked for, with a log-probability a token, ended as they say."""
    asked = len(draw.prompts) * draw.samples
    if not len(drawn.tokens) == len(drawn.logprobs) == len(drawn.ended) == asked:
        raise RuntimeError(f"the engine gave {len(drawn.tokens)} completions, asked for {asked}")
    for tokens, logprobs, ended in zip(drawn.tokens, drawn.logprobs, drawn.ended, strict=True):
        rightly = tokens[-1:] != [] and (tokens[-1] in draw.ends) == ended and (ended or len(tokens) == draw.max_tokens)
        if not rightly or len(tokens) != len(logprobs) or len(tokens) > draw.max_tokens:
            raise RuntimeError(f"the engine gave {len(logprobs)} log-probabilities of {tokens}, ended: {ended}")
