"""Run a samebit worker in a process of its own, with the default limits and room for 64 sequences at once.

python -m samebit.benchmarks.engines.samebit_engine FOLDER --dtype float32 --max-len 384 [--step-tokens N]
"""

import samebit.kernels  # noqa: F401  (before torch: see samebit.kernels.openmp)

# isort: split
import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

from samebit.benchmarks.engines.messages import Done, Job, own_stdout, serve, timed
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

SEQUENCES = 64


class SamebitEngine:
    """Wraps a worker; log-probabilities are always computed, and left out of the answer when not asked for."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker
        self._seed = 0

    @property
    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("torch", "transformers", "numba")}

    def forget(self) -> None:
        self._worker.reset_prefix_cache()

    def run(self, job: Job) -> Done:
        self._seed += 1
        params = SamplingParams(n=job.samples, max_tokens=job.new_tokens, ignore_eos=True, seed=self._seed)
        seconds, outputs = timed(lambda: [out for part in job.parts() for out in self._worker.generate(part, params)])
        samples = [sample for out in outputs for sample in out.samples]
        return Done(
            seconds,
            [list(sample.token_ids) for sample in samples],
            [[float(value) for value in sample.logprobs] for sample in samples] if job.logprobs else None,
            sum(out.num_cached_tokens for out in outputs),
        )


@contextmanager
def opened(line: Sequence[str]) -> Iterator[SamebitEngine]:
    """Make the engine that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model's folder")
    parser.add_argument("--dtype", required=True, help="float32 or bfloat16")
    parser.add_argument("--max-len", type=int, required=True, help="most tokens of a sequence")
    parser.add_argument("--step-tokens", type=int, help="most tokens of a step; samebit's own default without")
    args = parser.parse_args(line)
    config = RolloutConfig(dtype=args.dtype, max_num_seqs=SEQUENCES, max_model_len=args.max_len)
    if args.step_tokens is not None:
        limits = (args.step_tokens, min(SEQUENCES, args.step_tokens))
        config = replace(config, max_num_batched_tokens=limits[0], max_num_seqs=limits[1])
    with RolloutWorker(args.folder, config=config) as worker:
        yield SamebitEngine(worker)


if __name__ == "__main__":
    answers = own_stdout()
    with opened(sys.argv[1:]) as engine:
        serve(engine, answers)
