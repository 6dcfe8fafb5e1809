"""A fleet keeps to grammars as one worker does, and a replica that is lost costs no constrained request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy

import pytest
import torch

from samebit.rollout import (
    NoTokenLeftError,
    RequestError,
    RequestOutput,
    RolloutConfig,
    RolloutWorker,
    SamplingParams,
    StructuredOutputsParams,
    WorkerLostError,
)
from samebit.rollout.fleet.fleet import Fleet
from samebit.rollout.fleet.options import FleetOptions
from samebit.rollout.fleet.replica import ReplicaSide
from samebit.weight_sync.transports.addresses import Sources

from ...patience import HANG, wait_until
from ..conftest import FakeRunner
from ..held_steps import held_steps
from ..requests.test_structured_outputs import KINDS, TOKENIZER, asked, batched, policy
from .local_fleet import LocalPort

CONFIG = RolloutConfig(num_blocks=64, block_size=16, seed=3)
PROMPTS = [[1, 2, 3]] * len(KINDS)
PARAMS = [batched(kind) for kind in range(len(KINDS))]


@contextmanager
def fleet_of(replicas: int) -> Iterator[tuple[Fleet, dict[str, LocalPort]]]:
    """Give a fleet of workers in this process, and the ports of those that live."""
    ports: dict[str, LocalPort] = {}
    model = policy()  # here: the replicas start in threads, and torch's random numbers are those of all threads

    def start(name: str, config: RolloutConfig) -> LocalPort:
        worker = RolloutWorker(deepcopy(model), config=config, tokenizer=TOKENIZER)
        ports[name] = LocalPort(ReplicaSide(Sources(), worker), FakeRunner(16))
        return ports[name]

    fleet = Fleet(start, replicas, config=CONFIG, options=FleetOptions(restart_seconds=1e-6))
    try:
        yield fleet, ports
    finally:
        fleet.close()


def drawn(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float], str | None]]:
    return [(one.token_ids, one.logprobs, one.text) for output in outputs for one in output.samples]


def test_a_fleet_keeps_to_grammars_as_a_worker_does() -> None:
    """A fleet draws what one worker draws, and a request that is refused or has no token left fails alone."""
    with RolloutWorker(policy(), config=CONFIG, tokenizer=TOKENIZER) as here:
        expected = drawn(here.generate(PROMPTS, PARAMS))
    nothing = SamplingParams(min_tokens=9, structured_outputs=StructuredOutputsParams(regex="ab"))
    with fleet_of(2) as (fleet, _):
        assert drawn(fleet.generate(PROMPTS, PARAMS)) == expected
        refused, empty, *others = fleet.submit_all([[1], [1], *PROMPTS], [asked(regex="a(("), nothing, *PARAMS])
        with pytest.raises(RequestError, match=r"structured_outputs\.regex can not be compiled"):
            refused.result(HANG)
        with pytest.raises(NoTokenLeftError, match="structured_outputs"):
            empty.result(HANG)
        assert drawn([one.result(HANG) for one in others]) == expected
        streamed = fleet.submit(PROMPTS[0], PARAMS[0])
        assert sorted(token for chunk in streamed for token in chunk.token_ids) == sorted(
            token for tokens, _, _ in expected[:2] for token in tokens
        )


def test_a_replica_that_comes_back_keeps_to_grammars() -> None:
    """A constrained request of a replica that is lost fails by name; the one that comes back draws the same again."""
    params = asked(seed=7, regex="[cd]{60}")
    with fleet_of(1) as (fleet, ports):
        expected = drawn(fleet.generate([[1, 2]], params))
        with held_steps(ports["0"].side.rollout) as steps:
            handle = fleet.submit([1, 2], params)
            steps.release(5)
            next(iter(handle))
            ports["0"].kill(fleet._crew.background.loop)
            with pytest.raises(WorkerLostError):
                handle.result(HANG)
        wait_until(lambda: fleet.stats()["replica_restarts"] == 1 and fleet.replicas["0"])
        assert drawn(fleet.generate([[1, 2]], params)) == expected
    assert re.fullmatch("[cd]{60}", expected[0][2] or "")


def test_a_constrained_request_goes_on_over_an_update_of_the_fleet() -> None:
    """A constrained request goes on in its grammar when all replicas get other weights."""
    with fleet_of(2) as (fleet, ports), ExitStack() as held:
        steps = [held.enter_context(held_steps(port.side.rollout)) for port in ports.values()]
        handle = fleet.submit([1, 2], asked(seed=7, regex="[cd]{60}"))
        for one in steps:
            one.release(5)
        next(iter(handle))
        new = policy()
        with torch.no_grad():
            for weight in new.parameters():
                weight.mul_(1.1)
        fleet.receive_weights(new)
        held.close()
        sample = handle.result(HANG).samples[0]
    assert [span[2] for span in sample.weight_versions] == [0, 1]
    assert re.fullmatch("[cd]{60}", sample.text or "")
