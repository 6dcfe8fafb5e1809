"""Adapters that are loaded by name have the trainer's bits on a GPU, beside each other and beside the model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samebit.kernels import bind, token_logprobs
from samebit.rollout import RequestOutput, RolloutConfig, RolloutWorker, SamplingParams

from ..exactness.families import make_model, token_ids

pytest.importorskip("peft", reason="peft is not installed: pip install 'samebit[lora]'")

from ..exactness.lora import SMALLER, add, config_for, make_peft

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
PROMPTS = token_ids(1, 40, 65)


def check(trainer: Any, outputs: list[RequestOutput]) -> None:
    for out in outputs:
        for sample in out.samples:
            ids = torch.tensor([out.prompt_token_ids + sample.token_ids], device=DEVICE)
            scores = token_logprobs(trainer, ids)[0, -len(sample.token_ids) :]
            assert torch.equal(scores.detach().cpu(), torch.tensor(sample.logprobs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["Qwen3", "NemotronH, experts"])
def test_rows_of_several_adapters_have_the_trainers_bits(family: str, dtype: torch.dtype) -> None:
    """Rows of several adapters have the trainer's bits: loaded while the worker generates, one at a time, after a
    sleep.
    """
    names = {"one": "default", "other": "ref", "__base__": None}
    trainer = make_peft(family, dtype, config_for(family, 5))
    add(trainer, "ref", config_for(family, 3))
    trainer = bind(trainer.to(DEVICE))
    base = make_model(family, dtype, **SMALLER.get(family, {})).to(DEVICE)
    config = RolloutConfig(device=DEVICE, max_num_seqs=16, max_model_len=128, num_blocks=64)
    params = [SamplingParams(max_tokens=8, seed=1, ignore_eos=True, adapter=name) for name in names for _ in PROMPTS]
    with RolloutWorker(base, config=config) as worker:
        running = worker.submit_all(PROMPTS, SamplingParams(max_tokens=60, seed=2, ignore_eos=True))
        for name, own in (("one", "default"), ("other", "ref")):
            tensors = {key: part for key, part in trainer.state_dict().items() if f".{own}." in key}
            worker.load_adapter(name, tensors, config=trainer.peft_config[own])
        together = worker.generate(PROMPTS * len(names), params)
        worker.sleep("kv_cache")
        worker.wake_up()
        alone = [worker.generate([prompt], one)[0] for prompt, one in zip(PROMPTS * len(names), params, strict=True)]
        begun = [handle.result() for handle in running]
    for one, other in zip(together, alone, strict=True):
        assert one.samples[0].logprobs == other.samples[0].logprobs
    count = len(PROMPTS)
    for number, own in enumerate(names.values()):
        found = together[number * count : (number + 1) * count]
        if own is None:
            with trainer.disable_adapter():
                check(trainer, [*found, *begun])
        else:
            trainer.set_adapter(own)
            check(trainer, found)
    assert together[0].samples[0].logprobs != together[count].samples[0].logprobs
