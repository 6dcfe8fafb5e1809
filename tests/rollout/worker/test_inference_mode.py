"""A worker does not care whether the calling thread is in `torch.inference_mode`: outside of it, as in the thread that
generates, torch lets nobody write to tensors that were made in it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams

from ...exactness.families import make_model, token_ids

PARAMS = SamplingParams(n=4, seed=1, max_tokens=3)
CONFIG = RolloutConfig(max_model_len=128)


def logprobs(worker: RolloutWorker) -> list[list[float]]:
    """Return those of four samples behind a prompt that ends within a block, which each of them has a copy of."""
    [output] = worker.generate(token_ids(70), PARAMS)
    return [sample.logprobs for sample in output.samples]


def expected(model: Any) -> list[list[float]]:
    with RolloutWorker(model, config=CONFIG) as worker:
        return logprobs(worker)


@pytest.mark.parametrize("name", ["Qwen3", "FalconH1"])
def test_a_worker_may_be_built_there(name: str) -> None:
    model = make_model(name, torch.float32)
    with torch.inference_mode(), RolloutWorker(model, config=CONFIG) as worker:
        found = logprobs(worker)
    assert found == expected(model)


def test_weights_of_a_folder_and_what_woke_there_are_written_elsewhere(tmp_path: Path) -> None:
    model = make_model("Qwen3Moe", torch.float32)  # whose folder transformers does not read, in threads of its own
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    others = {name: tensor / 2 for name, tensor in weights.items()}
    with torch.inference_mode():
        worker = RolloutWorker(tmp_path, config=CONFIG)

    def sleep_and_wake() -> None:
        with torch.inference_mode():
            worker.sleep()
            worker.wake_up()

    with worker:
        worker.receive_weights(others)
        in_thread = threading.Thread(target=sleep_and_wake)
        in_thread.start()
        in_thread.join()
        worker.receive_weights(weights)
        found = logprobs(worker)
    assert found == expected(model)
