"""A request that nobody holds any more is freed at once: its tokens, scores and experts wait for no collection.

What waits for Python's collector of circles is there for as long as it likes, whatever memory its arrays take: it
counts objects.
"""

import gc
from collections.abc import Callable, Iterator

import pytest

from samebit.rollout import RolloutConfig, RolloutWorker, SamplingParams
from samebit.rollout.control.delivery import Delivery, RequestHandle
from samebit.rollout.requests.request import Request, Sequence
from samebit.rollout.requests.shared import Shared

from ..patience import HANG, wait_until
from ..rollout.held_steps import held_steps
from .families import EXPERTS, bound_model, token_ids

KINDS = (Request, Shared, Sequence, Delivery, RequestHandle)
PROMPTS = token_ids(40, 3, 70)
ALL = SamplingParams(
    n=3, max_tokens=9, seed=1, ignore_eos=True, logprobs=2, prompt_logprobs=2, return_routed_experts=True,
    repetition_penalty=1.1,
)  # fmt: skip


def left() -> list[object]:
    """Return what is there of requests, reachable or not."""
    return [one for one in gc.get_objects() if isinstance(one, KINDS)]


@pytest.fixture
def worker() -> Iterator[RolloutWorker]:
    """Give a worker in whose time nothing is collected, beside which there are no requests."""
    gc.collect()
    gc.freeze()
    gc.disable()
    config = RolloutConfig(max_num_batched_tokens=40, max_num_seqs=4, max_model_len=160)
    with RolloutWorker(bound_model(EXPERTS[0]), config=config) as made:
        yield made
    gc.enable()


def submit(worker: RolloutWorker) -> list[RequestHandle]:
    return [worker.submit(prompt, ALL) for prompt in PROMPTS]


def generate(worker: RolloutWorker) -> None:
    outputs = worker.generate(PROMPTS, ALL)
    assert all(sample.routed_experts is not None for output in outputs for sample in output.samples)


def abort(worker: RolloutWorker) -> None:
    with held_steps(worker) as steps:
        handles = submit(worker)
        steps.release(2)
        handles[1].cancel()
        worker.abort([handle.request_id for handle in handles])
        assert {sample.finish_reason for handle in handles for sample in handle.result(HANG).samples} == {"abort"}


def stream(worker: RolloutWorker) -> None:
    handle = worker.submit(PROMPTS[0], ALL)
    assert sum(len(chunk.token_ids) for chunk in handle) == 27
    submit(worker)  # nobody waits for these
    handle.result(HANG)


def update(worker: RolloutWorker) -> None:
    with held_steps(worker) as steps:
        handles = submit(worker)
        steps.release(2)
        with worker.weight_update(in_flight="abort"):
            pass
    assert all(handle.result(HANG).samples for handle in handles)


@pytest.mark.parametrize("use", [generate, abort, stream, update], ids=lambda use: use.__name__)
def test_what_has_ended_is_freed_with_its_last_reference(
    worker: RolloutWorker, use: Callable[[RolloutWorker], None]
) -> None:
    use(worker)
    wait_until(lambda: worker.stats()["running"] == worker.stats()["waiting"] == 0)
    worker.reset_prefix_cache()  # behind the step in flight
    assert left() == []


def test_what_a_caller_keeps_is_all_that_is_kept(worker: RolloutWorker) -> None:
    handles = submit(worker)
    outputs = [handle.result(HANG) for handle in handles]
    worker.reset_prefix_cache()
    kept = handles.pop()
    handles.clear()
    assert [one.request_id for one in left() if isinstance(one, Request)] == [kept.request_id]
    assert kept.result(HANG) == outputs[-1]
