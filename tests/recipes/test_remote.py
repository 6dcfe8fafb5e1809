"""Ray begins and ends with the worker of a recipe, unless the process is connected to one."""

import inspect
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samebit.recipes.remote import remote_worker
from samebit.rollout import RolloutConfig

from ..campaign import long
from ..forks import python
from ..patience import HANG
from .conftest import TINY

ray = pytest.importorskip("ray")
COMMAND = Path(__file__).resolve().parents[2] / "recipes" / "grpo_async.py"


@pytest.mark.parametrize(("running", "expected"), [(False, ["init", "worker", "shutdown"]), (True, ["worker"])])
def test_ray_begins_and_ends_with_a_worker_unless_it_runs(
    monkeypatch: pytest.MonkeyPatch, running: bool, expected: list[str]
) -> None:
    """Ray is started and ended around the worker, but not where it runs already; a stand-in checks what it is given."""
    done: list[str] = []
    own = inspect.signature(ray.init)

    def init(**options: Any) -> None:
        asked = own.bind(**options).arguments
        assert (asked["address"], asked["num_cpus"], asked["include_dashboard"]) == ("local", 3, False)
        done.append("init")

    @contextmanager
    def worker(folder: Path, **options: Any) -> Iterator[None]:
        assert (folder.is_absolute(), options["num_cpus"]) == (True, 3)
        done.append("worker")
        yield

    monkeypatch.setattr(ray, "is_initialized", lambda: running)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr("samebit.rollout.integrations.ray.RayWorker.start", worker)
    with remote_worker(Path("model"), RolloutConfig(), num_threads=3):
        pass
    assert done == expected


@long
def test_the_command_starts_ray_itself(tmp_path: Path) -> None:
    options = {**TINY, "out": tmp_path, "samples": 8}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([*python(), str(COMMAND), *words], check=True, cwd=tmp_path, timeout=HANG)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/tokens_differing"] for row in rows if row["step"]] == [0, 0]
