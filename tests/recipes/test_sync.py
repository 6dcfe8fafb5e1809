"""`--sync`: however the weights get to the worker, a run is the same bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samebit.recipes import grpo, sampling
from samebit.recipes.settings import OnPolicy

pytest.importorskip("ray")

STEPS = 4
DEPENDS_ON_THE_CLOCK = ("perf/", "sync/sent_bytes")


def tiny(out: Path, **changes: Any) -> OnPolicy:
    values: dict[str, Any] = {
        "steps": STEPS,
        "prompts": 4,
        "samples": 4,
        "max_tokens": 12,
        "held_out": 8,
        "eval_every": 2,
        "warmup_cap": 2,
        "warmup_mixed": 1,
        "max_num_seqs": 32,
        "kv_cache_gb": 0.05,
        "lr": 1e-3,
    }
    return OnPolicy(out=out, **{**values, **changes})


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith(DEPENDS_ON_THE_CLOCK)} for row in rows]


@pytest.fixture(scope="module", autouse=True)
def rewarded() -> Iterator[None]:
    """Something that samples of a model that can do nothing differ in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "reward", lambda text, finished, problem: len(set(text)) / 10)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, grpo.run(tiny(folder))


@pytest.mark.parametrize("way", ["copy", "shm"])
def test_a_run_is_the_same_bit_for_bit(way: str, shared: tuple[Path, list[dict[str, float]]], tmp_path: Path) -> None:
    folder, expected = shared
    rows = grpo.run(tiny(tmp_path, sync=way))
    assert without_times(rows) == without_times(expected)
    steps = [row for row in rows if row["step"]]
    assert [row["weight_version"] for row in steps] == list(range(STEPS))
    assert all(row["training/tokens_compared"] > 16 and row["training/tokens_differing"] == 0 for row in steps)
    assert {row["actor/ratio_max"] for row in steps} == {1.0}
    assert all(row["actor/grad_norm"] > 0 and row["sync/changed_tensors"] > 30 for row in steps)
    assert all((row["sync/sent_bytes"] > 0) == (way == "shm") for row in steps)
    ours, theirs = (load_file(path / "seed0" / "policy" / "model.safetensors") for path in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
