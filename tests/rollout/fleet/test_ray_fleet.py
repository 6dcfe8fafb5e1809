"""Replicas in actors of Ray: the bits of one worker, weights for all, and death."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray")

from samebit.kernels import bind, token_logprobs  # noqa: E402
from samebit.rollout import ModelLoadError, RolloutConfig, SamplingParams, WorkerLostError  # noqa: E402
from samebit.rollout.fleet.options import FleetOptions  # noqa: E402
from samebit.rollout.integrations.ray import RayFleet  # noqa: E402

from ...patience import HANG, wait_until  # noqa: E402
from ..tiny_llama import tiny  # noqa: E402

CONFIG = RolloutConfig(max_num_seqs=8, num_blocks=400, seed=3, num_threads=1)
PROMPTS = [[1], [2, 3, 4], list(range(5, 22)), list(range(30, 80))]
LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=temporary,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def fleet(cluster: None, folder: Path) -> Iterator[RayFleet]:
    with RayFleet.start(folder, replicas=2, config=CONFIG, options=FleetOptions(sync_timeout=30)) as one:
        yield one


def differing(model: torch.nn.Module, outputs: list, temperature: float) -> int:
    """How many tokens have another log-probability than the trainer computes."""
    found = 0
    for output in outputs:
        for sample in output.samples:
            ids = torch.tensor([output.prompt_token_ids + sample.token_ids])
            with torch.no_grad():
                scores = token_logprobs(model, ids, temperature=temperature)[0, len(output.prompt_token_ids) - 1 :]
            found += int((scores != torch.tensor(sample.logprobs)).sum())
    return found


def test_its_bits_are_the_trainers_before_and_after_an_update(fleet: RayFleet) -> None:
    params = SamplingParams(n=2, max_tokens=9, temperature=0.7)
    outputs = fleet.generate(PROMPTS * 2, params)
    assert differing(bind(tiny(0)), outputs, 0.7) == 0
    before = {output.request_id: [s.token_ids for s in output.samples] for output in outputs}
    new = tiny(1)
    report = fleet.receive_weights(new)
    assert report.version == fleet.weight_version == 1
    again = fleet.generate(PROMPTS * 2, params)
    assert differing(bind(new), again, 0.7) == 0
    assert [s.token_ids for output in again for s in output.samples] not in list(before.values())
    assert {span[2] for output in again for sample in output.samples for span in sample.weight_versions} == {1}


def test_a_conversation_is_found_in_the_cache_and_streams(fleet: RayFleet) -> None:
    tokens = list(range(1, 60))
    for turn in range(3):
        handle = fleet.submit(tokens, SamplingParams(max_tokens=20, ignore_eos=True), session="talk")
        streamed = [token for chunk in handle for token in chunk.token_ids]
        output = handle.result(HANG)
        assert streamed == output.samples[0].token_ids
        if turn:
            assert output.num_cached_tokens >= len(tokens) - 32
        tokens = tokens + streamed + [turn]
    assert fleet.stats()["router_sessions_moved"] == 0


def test_commands_reach_all_actors(fleet: RayFleet) -> None:
    fleet.pause()
    handle = fleet.submit([1, 2], SamplingParams(max_tokens=3))
    fleet.resume()
    assert handle.result(HANG)
    fleet.sleep(level=1)
    fleet.wake_up()
    fleet.reset_prefix_cache()
    assert len(fleet.generate(PROMPTS, SamplingParams(max_tokens=3))) == len(PROMPTS)
    assert fleet.stats()["replicas_open"] == 2


def test_a_killed_replica_comes_back_with_the_weights_of_the_others(fleet: RayFleet, folder: Path) -> None:
    """The last update was of another model than the folder's."""
    model = tiny(5)
    fleet.receive_weights(model)
    handles = [fleet.submit([number], LONG) for number in range(4)]
    pid = next(iter(fleet._crew.members.values())).pid
    wait_until(lambda: fleet.last_stats()["running"] == 4)
    os.kill(pid, signal.SIGKILL)
    ended = []
    for handle in handles:
        try:
            ended.append(len(handle.result(HANG).samples[0].token_ids))
        except WorkerLostError as error:
            ended.append(str(error))
    assert sum(isinstance(one, str) for one in ended) == 2
    assert ended.count(1900) == 2
    wait_until(lambda: all(fleet.replicas.values()))
    outputs = [
        fleet.submit([number, 7], SamplingParams(max_tokens=5), session=str(number)).result(HANG) for number in range(6)
    ]
    assert differing(bind(model), outputs, 1.0) == 0
    assert fleet.stats()["replica_restarts"] == 1


def test_bad_fleets_are_named(cluster: None, folder: Path) -> None:
    with pytest.raises(ValueError, match="replicas must be an int of at least 1, got 0"):
        RayFleet.start(folder, replicas=0)
    with pytest.raises(ValueError, match="9 replicas of 1 cores need 9, and the Ray cluster has 4"):
        RayFleet.start(folder, replicas=9)
    with pytest.raises(ValueError, match="leave out name"):
        RayFleet.start(folder, replicas=1, name="mine")


@pytest.mark.soak
@pytest.mark.skipif("SAMEBIT_SOAK_CASES" not in os.environ, reason="starts a process: make soak")
def test_a_missing_folder_is_named(cluster: None, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        RayFleet.start(folder / "nowhere", replicas=1)
