"""Sample with vLLM on a CPU for a trainer, in the environment that `make bench-vllm` sets up.

    python -m samebit.benchmarks.engines.vllm_policy FOLDER --dtype bfloat16 --kv-gb 0.5 --sequences 512
        --step-tokens 4096

It imports no package of samebit's.

vLLM's `reload_weights` (0.32) forgets on a CPU to pack two things again that it packs when an engine is built: routed
experts, which `load` does itself, and an output layer whose weights are tied to the embedding's. So folders must hold
models that are not tied.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from samebit.benchmarks.engines.messages import own_stdout
from samebit.benchmarks.engines.policy_messages import Draw, Drawn, serve_policy
from samebit.benchmarks.engines.vllm_engine import logprobs_of_sampled, versions_of_vllm


class VllmPolicy:
    """Holds one engine at a time, with vLLM's defaults: compiled, prefix cache, chunked prefill."""

    def __init__(self, folder: str, **limits: Any) -> None:
        from vllm import envs

        if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            raise RuntimeError("vLLM must compute in this process, whose random numbers it then draws")
        self._limits = limits
        self._llm = self._built(folder)

    @property
    def versions(self) -> dict[str, str]:
        return versions_of_vllm()

    def load(self, folder: str) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._llm.apply_model(_pack_experts)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def build(self, folder: str) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()
        self._llm = self._built(folder)

    def draw(self, draw: Draw) -> Drawn:
        import torch
        from vllm import SamplingParams

        params = SamplingParams(
            n=draw.samples,
            temperature=draw.temperature,
            max_tokens=draw.max_tokens,
            ignore_eos=True,
            stop_token_ids=draw.ends,
            detokenize=False,
            logprobs=0,
        )
        torch.manual_seed(draw.seed)  # a seed of a request raises on a CPU where a prefill is chunked (0.32)
        prompts = [{"prompt_token_ids": prompt} for prompt in draw.prompts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        samples = [sample for out in outputs for sample in out.outputs]
        return Drawn(
            [list(sample.token_ids) for sample in samples],
            [logprobs_of_sampled(sample) for sample in samples],
            [sample.finish_reason == "stop" for sample in samples],
        )

    def _built(self, folder: str) -> Any:
        from vllm import LLM

        if json.loads((Path(folder) / "config.json").read_text())["tie_word_embeddings"]:
            raise ValueError(f"{folder} holds a model with tied weights, which vLLM would not reload")
        return LLM(folder, skip_tokenizer_init=True, logprobs_mode="processed_logprobs", **self._limits)


def _pack_experts(model: Any) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model's folder")
    parser.add_argument("--dtype", required=True, help="float32 or bfloat16")
    parser.add_argument("--kv-gb", type=float, required=True, help="memory for KV")
    parser.add_argument("--sequences", type=int, required=True, help="most samples at once")
    parser.add_argument("--step-tokens", type=int, required=True, help="most tokens of a step")
    args = parser.parse_args()
    answers = own_stdout()
    engine = VllmPolicy(
        args.folder,
        dtype=args.dtype,
        kv_cache_memory_bytes=int(args.kv_gb * 2**30),
        max_num_seqs=args.sequences,
        max_num_batched_tokens=args.step_tokens,
    )
    serve_policy(engine, answers)


if __name__ == "__main__":  # vLLM starts processes that import this module again
    main()
