"""Fleets run over two nodes of Ray on this machine, and outlive fronts that are killed: each starts processes of its
own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from samebit.kernels import bind, token_logprobs  # noqa: E402
from samebit.rollout import RolloutConfig, SamplingParams  # noqa: E402
from samebit.rollout.integrations.ray import RayFleet  # noqa: E402

from ...patience import HANG, wait_until  # noqa: E402
from ..http.served import NAME, build_folder  # noqa: E402

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif("SAMEBIT_SOAK_CASES" not in os.environ, reason="starts many processes: make soak"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def two_nodes() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        small = {"num_cpus": 1, "object_store_memory": 80 << 20}
        cluster = Cluster(
            initialize_head=True, head_node_args={**small, "temp_dir": temporary, "include_dashboard": False}
        )
        cluster.add_node(**small)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()
        cluster.shutdown()


def test_weights_are_broadcast_to_two_nodes(two_nodes: None, folder: Path) -> None:
    """Weights are broadcast to two nodes: a node has one core, so each gets one replica; one that is killed gets its
    weights from the other node.
    """
    config = RolloutConfig(max_num_seqs=8, num_blocks=200, num_threads=1)
    torch.manual_seed(7)
    new = LlamaForCausalLM(LlamaForCausalLM.from_pretrained(folder).config)

    def node(actor: object) -> str:
        return ray.get_runtime_context().get_node_id()

    with RayFleet.start(folder, replicas=2, config=config) as fleet:
        ports = [member.port for member in fleet._crew.members.values()]
        nodes = {ray.get(port.actor.__ray_call__.remote(node)) for port in ports}
        assert len(nodes) == 2
        assert fleet.receive_weights(new).version == 1
        os.kill(next(iter(fleet._crew.members.values())).pid, signal.SIGKILL)
        wait_until(lambda: fleet.stats()["replica_restarts"] == 1 and all(fleet.replicas.values()))
        for prompt in range(6):
            output = fleet.submit([prompt] * 30, SamplingParams(max_tokens=9)).result(HANG)
            ids = torch.tensor([output.prompt_token_ids + output.samples[0].token_ids])
            with torch.no_grad():
                exact = token_logprobs(bind(new), ids)[0, 29:]
            assert torch.equal(exact, torch.tensor(output.samples[0].logprobs))


def test_a_replica_that_no_node_fits_is_refused(two_nodes: None, folder: Path) -> None:
    with pytest.raises(ValueError, match="the Ray cluster has 2: its nodes have 1, 1, where 0 of that size fit"):
        RayFleet.start(folder, replicas=1, num_cpus=2)


def test_a_front_that_is_killed_leaves_nothing_and_begins_again(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        started = answered_and_killed(folder, port)
        replicas = [pid for pid, name in started.items() if "FleetActor" in name]
        assert len(replicas) == 2
        wait_until(lambda replicas=replicas: not any(alive(pid) for pid in replicas))
        for pid in started:  # Ray's agents take their time
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def answered_and_killed(folder: Path, port: int) -> dict[int, str]:
    """Return the processes of a front that has answered a request, and was killed, with their names."""
    front, base = start_front(folder, port), f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: front.poll() is not None or ready(base))
        assert front.poll() is None, "the server has ended"
        body = {"model": NAME, "prompt": [5] * 20, "max_tokens": 5}
        assert httpx.post(f"{base}/v1/completions", json=body, timeout=HANG).status_code == 200
        started = {pid: name_of(pid) for pid in children(front.pid)}
    finally:
        front.kill()
        front.wait()
    assert started
    return started


def start_front(folder: Path, port: int) -> subprocess.Popen[bytes]:
    flags = ["--port", str(port), "--replicas", "2", "--replica-cpus", "1", "--num-threads", "1", "--num-blocks", "200"]
    command = [sys.executable, "-m", "samebit.rollout.cli", "serve", str(folder), "--served-model-name", NAME, *flags]
    return subprocess.Popen(command, env={**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})


def ready(base: str) -> bool:
    try:
        return httpx.get(f"{base}/readiness").status_code == 200
    except httpx.TransportError:
        return False


def children(pid: int) -> set[int]:
    """Return all processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found: set[int] = set()
    grown = {pid}
    while grown:
        grown = {child for child, parent in parents.items() if parent in grown} - found
        found |= grown
    return found


def name_of(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
