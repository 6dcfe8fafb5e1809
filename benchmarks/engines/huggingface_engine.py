"""Run Hugging Face's `generate` in a process of its own: SDPA, its default cache, all sequences in one batch.

    python -m samebit.benchmarks.engines.huggingface_engine FOLDER --dtype float32

All prompts of a job have one length. Log-probabilities are the log-softmax, in float32, of the logits that `generate`
sampled from; there is no prefix cache.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from samebit.benchmarks.engines.messages import Done, Job, own_stdout, serve, timed


class HuggingFaceEngine:
    """Wraps a model that nothing of samebit is bound to."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.generation_config.eos_token_id = None
        self._model = model.eval()

    @property
    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("torch", "transformers")}

    def forget(self) -> None:
        """Do nothing: no prefix outlives a call."""

    def run(self, job: Job) -> Done:
        config = GenerationConfig(
            max_new_tokens=job.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=job.samples,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=job.logprobs,
        )
        seconds = 0.0
        tokens: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for part in job.parts():
            ids = torch.tensor(part)
            mask = torch.ones_like(ids)
            took, out = timed(
                lambda ids=ids, mask=mask: self._model.generate(ids, attention_mask=mask, generation_config=config)
            )
            seconds += took
            tokens.append(out.sequences[:, ids.shape[1] :])
            if job.logprobs:
                logprobs = torch.stack(out.logits, 1).float().log_softmax(-1)
                found.append(logprobs.gather(-1, tokens[-1][..., None])[..., 0])
        return Done(seconds, torch.cat(tokens).tolist(), torch.cat(found).tolist() if job.logprobs else None)


@contextmanager
def opened(line: Sequence[str]) -> Iterator[HuggingFaceEngine]:
    """Make the engine that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model's folder")
    parser.add_argument("--dtype", required=True, help="float32 or bfloat16")
    args = parser.parse_args(line)
    dtype = getattr(torch, args.dtype)
    yield HuggingFaceEngine(AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype, attn_implementation="sdpa"))


if __name__ == "__main__":
    answers = own_stdout()
    with opened(sys.argv[1:]) as engine:
        serve(engine, answers)
