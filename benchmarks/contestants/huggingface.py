"""Run Hugging Face as a contestant: `generate` on one padded batch, and continuous batching.

Both get a copy of the unbound model, SDPA attention, plain sampling at temperature 1 without any logits
processor, and no log-probabilities to compute (samebit reports them).
"""

import copy
import importlib.util
import logging
from dataclasses import dataclass

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from samebit.benchmarks.engines.messages import timed
from samebit.benchmarks.workloads.workload import Run, Timed, Tokens, Workload

CONTINUOUS_NEEDS = "psutil"
"""Without this package continuous batching finds 0 bytes of memory on a CPU and refuses to start."""


@dataclass(frozen=True)
class ContinuousSettings:
    """Holds the settings of continuous batching.

    fork: ask for the samples with `num_return_sequences`, which computes each prompt once; otherwise
        every prompt is sent once a sample.
    step_tokens: `max_batch_tokens`. Its SDPA path lets every token of a step attend to the keys of *all*
        sequences of that step under a mask, so a small step is the cheaper one.
    """

    fork: bool
    step_tokens: int


LIKE_SAMEBIT = ContinuousSettings(fork=False, step_tokens=2048)
"""Sets the limits that samebit runs with: all sequences at once, 2048 tokens a step."""

TUNED = ContinuousSettings(fork=True, step_tokens=32)
"""Is the fastest of the settings tried on the 5 M model (README)."""


def continuous_available() -> bool:
    return importlib.util.find_spec(CONTINUOUS_NEEDS) is not None


def hf_generate(model: PreTrainedModel, workload: Workload) -> Run:
    """Generate with `generate` and its default cache; the prompts are of one length, so nothing is padding."""
    model = copy.deepcopy(model)

    def run(prompts: Tokens, new_tokens: int) -> Timed:
        config = _sampling(new_tokens, num_return_sequences=workload.samples)

        def finish_all() -> Tokens:
            ids = torch.tensor(prompts)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            tokens: Tokens = out[:, ids.shape[1] :].tolist()
            return tokens

        return timed(finish_all)

    return run


def hf_continuous(model: PreTrainedModel, workload: Workload, settings: ContinuousSettings) -> Run:
    """Generate by continuous batching; starting its thread and making its cache are outside of the measured time.

    The manager is used directly because `generate_batch` returns one of the `num_return_sequences`.
    """
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model = copy.deepcopy(model)
    batching = ContinuousBatchingConfig(
        num_blocks=workload.sequences * _blocks(workload), max_batch_tokens=settings.step_tokens
    )

    def run(prompts: Tokens, new_tokens: int) -> Timed:
        inputs = prompts if settings.fork else [prompt for prompt in prompts for _ in range(workload.samples)]
        generation = _sampling(new_tokens, num_return_sequences=workload.samples if settings.fork else 1)
        generation.eos_token_id = -1  # its way to say "none"

        def finish_all() -> Tokens:
            manager.add_requests(inputs=inputs, max_new_tokens=new_tokens)
            outputs: Tokens = []
            while len(outputs) < len(prompts) * workload.samples:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    outputs.append(list(result.generated_tokens))
                elif result is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching stopped: {manager.fatal_error}")
            return outputs

        with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
            return timed(finish_all)

    return run


def _blocks(workload: Workload) -> int:
    """Return the number of blocks of one sequence, and one to spare."""
    return -(-(workload.prompt_tokens + workload.new_tokens) // ContinuousBatchingConfig().block_size) + 1


def _sampling(new_tokens: int, num_return_sequences: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens,
        num_return_sequences=num_return_sequences, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
