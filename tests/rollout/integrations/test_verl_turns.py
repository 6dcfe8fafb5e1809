"""A short run of verl's tool agent with two servers is exact over turns, which hit the cache, until one dies.

All processes listen on the loopback interface alone, which is looked at.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed: pip install 'samebit[verl]'")

from samebit.benchmarks.verl_matrix import cases
from samebit.recipes.verl_grpo.launch import Run
from samebit.recipes.verl_grpo.mismatch import MISMATCH

from .verl_run import (
    IN_VERL,
    build_data,
    listening_elsewhere,
    names_of,
    processes_of,
    running,
    spied,
    wait_for_a_step,
    wait_for_end,
)

BLOCK = 8


def test_a_run_of_several_turns_with_two_servers_of_their_own_until_one_dies_in_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_python: str
) -> None:
    """A run of several turns with two servers is exact until one dies in an update: verl's agent loop with a tool;
    bfloat16, dynamic batches; weights by broadcast; nothing is sampled ahead.
    """
    answers = spied(tmp_path, monkeypatch, SPY_LAST_UPDATE="4")  # the first is before the first step
    died = answers / "died"
    rollout = "actor_rollout_ref.rollout"
    options = {
        **cases.settings(200),
        **cases.MODES["separate_async"],
        **cases.PACKINGS["dynamic"],
        **cases.DTYPES["bf16"],
        "trainer.v1.separate_async.num_warmup_batches": 0,
        "ray_kwargs.ray_init.num_gpus": 3,
        "ray_kwargs.ray_init.runtime_env.py_executable": ray_python,
        f"{rollout}.n_gpus_per_node": 2,
        f"{rollout}.custom.block_size": BLOCK,
        f"{rollout}.agent.default_agent_loop": "tool_agent",
        f"{rollout}.multi_turn.format": "always",
        f"{rollout}.multi_turn.function_tool_path": IN_VERL / "verl_tool.py",
        f"{rollout}.multi_turn.max_assistant_turns": 2,
    }
    run = Run(build_data(tmp_path / "data"), tmp_path, options)
    with running(run) as process:
        wait_for_a_step(run, process)
        names = names_of(processes_of(run))
        assert {"ray::SamebitServer", "ray::WorkerDict"} <= {name.partition(".")[0] for name in names}, "forks too"
        assert listening_elsewhere(run) == []
        code = wait_for_end(run, process)
    said = run.log.read_text()
    assert code != 0
    assert died.exists(), said[-4000:]
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
    _check_turns([json.loads(line) for file in answers.glob("*.jsonl") for line in file.read_text().splitlines()])


def _check_turns(answers: list[dict[str, Any]]) -> None:
    """Check that a trajectory's second turn goes to the server of its first, with its tokens in front, which are
    cached.

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
