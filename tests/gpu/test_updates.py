"""A GPU worker's weights arrive from the host, by each way that has no test of its own here, and change its bits.

`samebit check` sends them too, from another process; CUDA IPC is tested in test_cuda_ipc.py.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from transformers import PreTrainedModel

from samebit.kernels import bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, WeightStream

from ..exactness.families import make_model, token_ids

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPTS = token_ids(1, 40, 65)
PARAMS = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in range(len(PROMPTS))]


def scaled(factor: float) -> PreTrainedModel:
    model = bind(make_model("Qwen3", torch.bfloat16)).cuda()
    with torch.no_grad():
        for part in model.parameters():
            part.mul_(factor)
    return model


def logprobs(worker: RolloutWorker) -> list[list[float]]:
    return [sample.logprobs for out in worker.generate(PROMPTS, PARAMS) for sample in out.samples]


def test_weights_arrive_from_the_host() -> None:
    first, second = scaled(1.0), scaled(0.5)
    config = RolloutConfig(device="cuda", max_num_seqs=8, max_model_len=128, num_blocks=32)
    with RolloutWorker(second, config=config) as other:
        expected = logprobs(other)
    with RolloutWorker(first, config=config) as worker, closing(SharedMemorySender()) as sender:
        before, original = (
            logprobs(worker),
            {name: part.to("cpu", copy=True) for name, part in first.state_dict().items()},
        )
        assert before != expected
        with SharedMemoryReceiver(sender.address) as end, ThreadPoolExecutor(1) as another:
            for source, delta in ((WeightStream.of(second), False), (end, False), (end, True)):
                worker.load_state_dict(original)
                assert logprobs(worker) == before
                sending = another.submit(sender.send, second, delta=delta) if source is end else None
                worker.receive_weights(source)
                assert logprobs(worker) == expected
                if sending is not None:
                    sending.result()
