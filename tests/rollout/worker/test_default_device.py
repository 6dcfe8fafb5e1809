"""A worker does not care where the calling thread makes its tensors, nor which GPU is that thread's current one.

The device "meta" stands in for a GPU that the caller has chosen for new tensors: what is made there can not be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from samebit.kernels import bind
from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.runner.model_runner import ModelRunner
from samebit.rollout.self_test import remembered
from samebit.weight_sync import Manifest, WeightStream, sleeping
from samebit.weight_sync.quantized import _of_fp8, _of_mxfp4
from samebit.weight_sync.sleeping import SleepingWeights
from samebit.weight_sync.transports import broadcast
from samebit.weight_sync.wire import destination

from ...exactness.families import make_model

REQUEST = [[5, 6, 7]], SamplingParams(seed=1, max_tokens=3, logit_bias={3: 1.0}, logprobs=1)
CONFIG = RolloutConfig(max_num_seqs=2, num_blocks=8, max_model_len=32, self_test=True)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights be written as those of a model on a GPU are."""
    monkeypatch.setattr(destination, "in_place_bytes", lambda tensor: None)
    monkeypatch.setattr(sleeping, "in_place_bytes", lambda tensor: None)


def test_a_worker_is_built_and_updated_all_the_same(copied: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "has_passed", lambda key: False)
    model, other = bind(make_model("Qwen3", torch.float32)), make_model("Qwen3", torch.float32)
    with RolloutWorker(model, config=CONFIG) as worker:
        expected = worker.generate(*REQUEST)[0].samples[0].logprobs
    with torch.device("meta"), RolloutWorker(model, config=CONFIG) as worker:
        worker.receive_weights(WeightStream.of(other))
        assert worker.generate(*REQUEST)[0].samples[0].logprobs == expected


def test_a_worker_is_built_with_the_gpu_of_its_model_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bind(make_model("Qwen3", torch.float32))
    current: list[torch.Tensor] = []
    seen: list[bool] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    warm_up = ModelRunner.warm_up

    def watched(self: ModelRunner, block_tables: object) -> None:
        seen.append(any(part is one for part in model.parameters() for one in current))
        warm_up(self, block_tables)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "warm_up", watched)
    RolloutWorker(model, config=CONFIG).close()
    assert seen == [True]


def test_weights_are_read_and_written_on_the_host(copied: None) -> None:
    """Weights are read and written on the host in the caller's thread too, where no command of a worker has one of its
    own.
    """
    module = nn.Linear(3, 5)
    before = module.weight.detach().clone()
    blocks, scales = torch.zeros(2, 3, 4, 16, dtype=torch.uint8), torch.zeros(2, 3, 4, dtype=torch.uint8)
    with torch.device("meta"):
        memory = SleepingWeights(module, Manifest.of(module))
        memory.free(keep_copy=True)
        assert memory.restore()
        frames = broadcast._frames([], 1024)
        of_fp8 = _of_fp8(before, torch.ones(1, 1, device="cpu"), rows=5, columns=3, dtype=torch.bfloat16)
        made = [_of_mxfp4(blocks, scales), of_fp8, *frames]
    assert torch.equal(module.weight, before)
    assert {str(one.device) for one in made} == {"cpu"}
