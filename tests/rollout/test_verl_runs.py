"""Short runs of verl's trainer, from its command line to its metrics: exact, and dead servers end them with the cause.

All processes listen on the loopback interface.
"""

from __future__ import annotations

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


def finished(run: Run) -> list[dict[str, Any]]:
    """The metrics of its steps."""
    with running(run) as process:
        code = process.wait(LONGEST)
    assert code == 0, run.log.read_text()[-4000:]
    return run.steps()


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
        deadline = time.monotonic() + LONGEST
        while len(run.steps()) < 3:
            assert process.poll() is None, run.log.read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        _check_steps(run.steps())
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


def test_a_run_in_which_the_server_has_resources_of_its_own(data: Path, tmp_path: Path) -> None:
    """bfloat16, dynamic batches; weights by samebit's broadcast; some trajectories are a step old."""
    options = {
        **cases.settings(3),
        **cases.MODES["separate_async"],
        **cases.PACKINGS["dynamic"],
        **cases.DTYPES["bf16"],
    }
    steps = finished(Run(data, tmp_path, options))
    assert len(steps) == 3
    assert sum(row.get("samebit/on_policy/tokens", 0) for row in steps) > 16
    assert all(row.get("samebit/on_policy/tokens_differing", 0) == 0 for row in steps)
    assert [row[name] for name in MISMATCH for row in steps[:1]] == [0.0, 0.0, 0.0]
    assert all(row["samebit/broadcast_bytes"] > 0 for row in steps)


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("ray::SamebitServer" in part for part in process.cmdline())
    return False
