"""Short runs of verl's trainer, from its command line to its metrics: exact, and dead servers end them with the cause.

All processes listen on the loopback interface alone, which both look at.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

from samebit.recipes.verl_grpo import cases, task
from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import MISMATCH

LONGEST = 150
BLOCK = 8
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    task.build(folder, training=64, held_out=4, warm=False, tie_word_embeddings=False, **TINY)
    return folder


@contextmanager
def running(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """Ended, with all its processes, whatever happens."""
    process = run.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in processes_of(run):
            one.kill()
        process.wait()


def processes_of(run: Run) -> list[psutil.Process]:
    """Those that have its metrics file in their environment: Ray puts some in sessions of their own."""
    mark = run.environment()["VERL_FILE_LOGGER_PATH"]
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("VERL_FILE_LOGGER_PATH") == mark:
                found.append(process)
    return found


def wait_for_steps(run: Run, process: subprocess.Popen[bytes], steps: int) -> None:
    deadline = time.monotonic() + LONGEST
    while len(run.steps()) < steps:
        assert process.poll() is None, run.log.read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def listening_elsewhere(run: Run) -> list[str]:
    """Sockets of its processes that other machines could reach."""
    found = []
    for process in processes_of(run):
        with suppress(psutil.Error):
            sockets = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            addresses = [f"{one.laddr.ip} {one.laddr.port}" for one in sockets if not _is_loopback(one.laddr.ip)]
            found += [f"{process.name()}: {address}" for address in addresses]
    return found


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def test_a_run_in_which_trainer_and_rollout_share_their_resources_until_the_server_dies(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, float32, temperature 0.7, an untied head; with validation. The plugin is named, not found.

    In colocate_async, where verl would try again for ever to reach a dead server.
    """
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "samebit.rollout.integrations.verl")
    options = {
        **cases.settings(200),
        **cases.MODES["colocate_async"],
        "actor_rollout_ref.rollout.temperature": 0.7,
        "actor_rollout_ref.rollout.custom.block_size": 16,
        "trainer.test_freq": 2,
    }
    run = Run(data, tmp_path, options)
    with running(run) as process:
        wait_for_steps(run, process, 3)
        _check_steps(run.steps())
        assert listening_elsewhere(run) == []
        servers = [one for one in processes_of(run) if "SamebitServer" in one.name() or _is_server(one)]
        assert len(servers) == 1
        servers[0].kill()
        killed = time.monotonic()
        assert process.wait(60) != 0
        assert time.monotonic() - killed < 10
    said = run.log.read_text()
    assert "samebit_server_0 is lost" in said or "ActorDiedError" in said
    assert "actor died" in said


def _check_steps(steps: list[dict[str, Any]]) -> None:
    for row in steps:
        assert [row[name] for name in MISMATCH] == [0.0, 0.0, 0.0]
        assert row["samebit/on_policy/trajectories"] == 16
        assert row["samebit/on_policy/tokens"] > 16
        assert row["samebit/on_policy/tokens_differing"] == 0
        assert row["samebit/requests_finished"] >= 16
        assert row["samebit/syncs"] >= 1
        assert row["samebit/released_bytes"] > 0
    assert any(name.startswith("val-core/chain_sum") for row in steps for name in row)


def test_a_run_of_several_turns_with_two_servers_of_their_own_until_one_dies_in_an_update(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's agent loop with a tool; bfloat16, dynamic batches; weights by broadcast; nothing is sampled ahead."""
    here = Path(__file__).parent / "in_verl"
    spied = tmp_path / "spied"
    spied.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_spy")
    monkeypatch.setenv("SPY_FOLDER", str(spied))
    monkeypatch.setenv("SPY_LAST_UPDATE", "4")  # the first is before the first step
    rollout = "actor_rollout_ref.rollout"
    options = {
        **cases.settings(200),
        **cases.MODES["separate_async"],
        **cases.PACKINGS["dynamic"],
        **cases.DTYPES["bf16"],
        "trainer.v1.separate_async.num_warmup_batches": 0,
        "ray_kwargs.ray_init.num_gpus": 3,
        f"{rollout}.n_gpus_per_node": 2,
        f"{rollout}.custom.block_size": BLOCK,
        f"{rollout}.agent.default_agent_loop": "tool_agent",
        f"{rollout}.multi_turn.format": "always",
        f"{rollout}.multi_turn.function_tool_path": here / "verl_tool.py",
        f"{rollout}.multi_turn.max_assistant_turns": 2,
    }
    run = Run(data, tmp_path, options)
    with running(run) as process:
        wait_for_steps(run, process, 1)
        assert listening_elsewhere(run) == []
        code = process.wait(LONGEST)
        ended = time.time()
    said = run.log.read_text()
    assert code != 0
    assert (spied / "died").exists(), said[-4000:]
    assert ended - (spied / "died").stat().st_mtime < 10
    assert "actor died" in said
    steps = run.steps()
    assert len(steps) == 2
    for row in steps:
        assert [row[name] for name in MISMATCH] == [0.0, 0.0, 0.0]
        assert row["samebit/on_policy/trajectories"] == 16
        assert 16 < row["samebit/on_policy/tokens"] < row["response_length/mean"] * 16, (
            "the tool's tokens are not sampled"
        )
        assert row["samebit/on_policy/tokens_differing"] == 0
        assert row["samebit/prefix_hit_rate"] > 0
        assert row["samebit/broadcast_bytes"] > 0
    _check_turns([json.loads(line) for file in spied.glob("*.jsonl") for line in file.read_text().splitlines()])


def _check_turns(answers: list[dict[str, Any]]) -> None:
    """A trajectory's second turn goes to the server of its first, with the same tokens in front, which are cached.

    verl gives each turn an id of its own: what belongs together is known by its tokens.
    """
    assert len({answer["server"] for answer in answers}) == 2
    seconds: set[int] = set()
    for (_, first), (number, second) in itertools.permutations(enumerate(answers), 2):
        before = first["prompt"] + first["tokens"]
        if first["server"] == second["server"] and second["prompt"][: len(before)] == before:
            seconds.add(number)
            assert len(second["prompt"]) > len(before)
            assert second["cached"] >= (len(before) - 1) // BLOCK * BLOCK
    assert len(answers) - len(seconds) >= 3 * 16, "trajectories: as many began before the server died"
    assert len(seconds) >= 3 * 16 - 4, "all but those whose first answer leaves no room have a second turn"


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("ray::SamebitServer" in part for part in process.cmdline())
    return False
