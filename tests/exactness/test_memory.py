"""Released means released: what was put to sleep is no longer resident, and comes back with the same bits.

What is looked at are the pages of memory in which the tensors were: other threads move a process's sum up and down.
"""

import gc
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from samebit.rollout import RequestHandle, RolloutConfig, RolloutWorker, SamplingParams, WorkerStateError

from ..campaign import first_of
from ..patience import HANG
from ..rollout.cache.cache_integrity import check_cache
from .compare import assert_same_samples
from .families import make_model, token_ids

PROMPTS = token_ids(3, 70, 150)
PARAMS = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True, n=2) for seed in range(3)]
ORDERS = [("weights", "kv_cache"), ("kv_cache", "weights")]
CASES = [(family, ORDERS[place], place + 1) for place, family in enumerate(("Qwen3", "NemotronH"))]
CASES += [
    (family, order, level)
    for family, order, level in itertools.product(("Qwen3", "NemotronH"), ORDERS, (1, 2))
    if (family, order, level) not in CASES
]

PAGEMAP = Path("/proc/self/pagemap")
PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.skipif(not PAGEMAP.exists(), reason="needs /proc")


def places_of(tensors: Sequence[torch.Tensor]) -> list[range]:
    """Return the addresses of the tensors, each once."""
    return [range(first, last) for first, last in {(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors}]


def resident(places: Sequence[range]) -> int:
    """Return how many bytes at these addresses are in memory, to whole pages."""
    gc.collect()
    count = 0
    with PAGEMAP.open("rb", buffering=0) as pages:
        for place in places:
            first, last = place.start // PAGE, -(-place.stop // PAGE)
            pages.seek(8 * first)
            entries = np.frombuffer(pages.read(8 * (last - first)), np.uint64)
            count += PAGE * int((entries >> np.uint64(63)).sum())
    return count


def size_of(places: Sequence[range]) -> int:
    return sum(map(len, places))


def cache_tensors(worker: RolloutWorker) -> list[torch.Tensor]:
    runner = worker._engine.runner
    layers = [] if runner.memory.states is None else [*runner.memory.states.layers, *runner.memory.states.checkpoints]
    return [*runner.memory.pages, *(t for layer in layers for t in vars(layer).values() if isinstance(t, torch.Tensor))]


def touch(worker: RolloutWorker) -> None:
    """Write to memory, as what nobody wrote is not resident."""
    for tensor in cache_tensors(worker):
        tensor.fill_(1)
    worker.reset_prefix_cache()


@pytest.mark.parametrize(("family", "order", "level"), first_of(CASES, 2))
def test_what_sleeps_is_no_longer_resident(family: str, order: tuple[str, str], level: int, tmp_path: Path) -> None:
    """Weights that sleep are no longer resident, though they are many tensors of a few hundred kilobytes, where an
    allocator likes to keep what was freed.
    """
    model = make_model(family, torch.float32, hidden_size=400, intermediate_size=800)
    model.save_pretrained(tmp_path)
    states = {"state_cache_gb": 0.01} if family == "NemotronH" else {}
    config = RolloutConfig(max_model_len=256, kv_cache_gb=0.03, max_num_seqs=8, **states)
    with RolloutWorker(tmp_path, config=config) as worker:
        whole = worker.generate(PROMPTS, PARAMS)
        touch(worker)
        weights = [*worker.module.state_dict().values()]
        places = {"weights": places_of(weights), "kv_cache": places_of(cache_tensors(worker))}
        del weights
        for tag in order:
            size = size_of(places[tag])
            assert size > 5e6
            assert resident(places[tag]) > 0.99 * size
            worker.sleep(tag, level=level if tag == "weights" else 1)
            assert resident(places[tag]) < 0.1 * size, f"{tag}: of {size} bytes"
        for tag in order:
            worker.wake_up(tag)
            check_cache(worker._engine.cache)
            stats = worker.stats()
            assert stats["blocks_cached"] == stats.get("states_used", 0) == 0
            assert stats["blocks_free"] == stats["blocks_total"]
        assert not any(tensor.any() for tensor in cache_tensors(worker)), "pages and states are zeroed"
        if level == 2:
            worker.receive_weights(model)
        again = worker.generate(PROMPTS, PARAMS)
        assert_same_samples(again, whole)
        assert [out.num_cached_tokens for out in again] == [0, 0, 0], "nothing from before is hit"


@pytest.mark.parametrize("family", ["Qwen3", "NemotronH"])
def test_a_worker_that_is_dropped_gives_its_cache_back_at_once(family: str) -> None:
    """A worker that is dropped gives its cache (pages are few large objects) back at once, without `close`, and before
    Python looks for circles, which may be long after.
    """
    before = set(threading.enumerate())
    worker = RolloutWorker(make_model(family), config=RolloutConfig(max_model_len=256))
    (thread,) = set(threading.enumerate()) - before
    gc.collect()
    gc.disable()
    try:
        worker.generate(PROMPTS, PARAMS)
        tensors = [weakref.ref(tensor) for tensor in cache_tensors(worker)]
        del worker
        thread.join(HANG)
        assert all(tensor() is None for tensor in tensors)
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["Qwen3", "NemotronH"])
def test_a_worker_that_broke_gives_its_cache_back_when_it_is_closed(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose step failed gives its cache back when it is closed, though the worker itself and the errors of its
    requests are still there, as in a handler that builds the next one.
    """
    model = make_model(family)
    worker = RolloutWorker(model, config=RolloutConfig(max_model_len=256))
    worker.generate(PROMPTS, PARAMS)
    tensors = [weakref.ref(tensor) for tensor in cache_tensors(worker)]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("in the kernel")

    hook = worker.module.get_submodule("lm_head").register_forward_pre_hook(fail)
    caplog.set_level(logging.CRITICAL, logger="samebit")  # pytest keeps records, with the error that was logged
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(WorkerStateError, match="ZeroDivisionError in the generation thread: in the kernel"):
            worker.generate(PROMPTS, PARAMS)
        worker.close()
        assert [tensor() for tensor in tensors] == [None] * len(tensors)
    finally:
        gc.enable()
        hook.remove()


@pytest.mark.parametrize("family", ["Qwen3", "NemotronH"])
def test_sleeping_by_tag_again_and_again_while_requests_run_and_wait(family: str, tmp_path: Path) -> None:
    """Sleeping by tag again and again preempts requests that run and wait; they resume, none is lost, and not a bit
    changes.
    """
    model = make_model(family, torch.float32)
    model.save_pretrained(tmp_path)
    prompts = PROMPTS * 2
    params = [SamplingParams(seed=seed, max_tokens=16, ignore_eos=True) for seed in range(len(prompts))]
    with RolloutWorker(tmp_path, config=RolloutConfig(max_model_len=256)) as worker:
        whole = worker.generate(prompts, params)
    config = RolloutConfig(max_model_len=256, max_num_seqs=3, max_num_batched_tokens=100)
    rounds: list[list[RequestHandle]] = []
    handles: list[RequestHandle] = []
    cycles = 0
    with RolloutWorker(tmp_path, config=config) as worker:
        while cycles < 9 or not all(handle.done for handle in handles):
            if all(handle.done for handle in handles):  # a busy machine makes many steps between two cycles
                handles = [worker.submit(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
                rounds.append(handles)
            slept, woken = ORDERS[cycles & 1], ORDERS[cycles >> 1 & 1]
            level = 1 + (cycles >> 2 & 1)
            for tag in slept[: 1 + cycles % 3]:
                for _ in range(2):
                    worker.sleep(tag, level=level if tag == "weights" else 1)
            for tag in woken:
                worker.wake_up(tag)
            if worker._status.incomplete:
                worker.receive_weights(model, in_flight="recompute")
            cycles += 1
            steps = worker.stats()["steps"]
            while worker.stats()["steps"] < steps + 3 and worker._engine.has_work:
                time.sleep(0.001)
        assert worker.stats()["preemptions"] > 0
        for again in rounds:
            assert_same_samples([handle.result(HANG) for handle in again], whole)
