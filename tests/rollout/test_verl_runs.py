"""A short run of verl's trainer, from its command line to its metrics: exact, and a dead server ends it with the cause.

All processes listen on the loopback interface alone, which is looked at.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

from samebit.recipes.verl_grpo import cases
from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import MISMATCH

from .verl_run import build_data, listening_elsewhere, processes_of, running, wait_for_steps


def test_a_run_in_which_trainer_and_rollout_share_their_resources_until_the_server_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, float32, temperature 0.7, an untied head; with validation. The plugin is named, not found.

    In colocate_async, where verl would try again for ever to reach a dead server.
    """
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "samebit.rollout.integrations.verl")
    options = {
        **cases.settings(200),
        **cases.MODES["colocate_async"],
        "actor_rollout_ref.rollout.temperature": 0.7,
        "actor_rollout_ref.rollout.custom.block_size": 16,
        "trainer.test_freq": 2,
    }
    run = Run(build_data(tmp_path / "data"), tmp_path, options)
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


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("ray::SamebitServer" in part for part in process.cmdline())
    return False
