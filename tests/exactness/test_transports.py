"""Weights that came another way give the same bits: samples and log-probabilities are the trainer's own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.weight_sync import SharedMemoryReceiver, SharedMemorySender, WeightStream

from ..patience import HANG
from .compare import assert_matches_trainer, assert_same_samples, run
from .families import DTYPES, bound_model, make_model, token_ids

PROMPTS = token_ids(1, 7, 65)
PARAMS = [SamplingParams(n=2, seed=seed, max_tokens=12, ignore_eos=True) for seed in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_into_a_worker_of_its_own_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    trainer = bound_model("Qwen3", dtype)
    expected, _ = run(trainer, PROMPTS, PARAMS)
    start = make_model("Qwen3", dtype)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.mul_(0.5)
    start.save_pretrained(tmp_path / "start")
    trainer.save_pretrained(tmp_path / "trained")
    with (
        SharedMemorySender(bucket_bytes=8192, timeout=HANG) as sender,
        SharedMemoryReceiver(sender.address, timeout=HANG) as end,
        RolloutWorker(tmp_path / "start", config=RolloutConfig()) as worker,
        ThreadPoolExecutor(1) as other,
    ):
        first = worker.generate(PROMPTS, PARAMS)
        for way in ("stream", "folder", "shared memory", "delta"):
            worker.receive_weights(start)
            if way == "delta":
                sent = other.submit(sender.send, start, delta=True)
                worker.receive_weights(end)
                sent.result()
            if way in ("shared memory", "delta"):
                sent = other.submit(sender.send, trainer, delta=way == "delta")
            source = {"stream": WeightStream.of(trainer), "folder": tmp_path / "trained"}.get(way, end)
            report = worker.receive_weights(source, verify=True)
            assert report.verified
            assert report.changed_tensors == report.tensors, way
            if source is end:
                assert sent.result().delta == (way == "delta")
            outputs = worker.generate(PROMPTS, PARAMS)
            assert_same_samples(outputs, expected)
            assert_matches_trainer(trainer, outputs, PARAMS)
    assert first != expected
