"""The first hours on a GPU go as planned, with stand-ins for what they run, also where little is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samebit.benchmarks import gpu, gpu_day

ROOT = Path(__file__).resolve().parents[2]

LINE = 'import os, time; print("RESULT {\\"value\\": 3}", flush=True); '

BARE = f"""
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = {("ray", "verl", "peft", "trl", "vllm", "fastapi", "hypothesis", "datasets", "accelerate")!r}
        return None if name.partition(".")[0] in missing else super().find_spec(name, path, target)

own = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in own]
sys.path.insert(0, {str(ROOT)!r})
"""
"""Makes a process see a machine that has neither these packages nor an installation of samebit."""


def stand_in(name: str, code: str, limit: float = 60.0) -> gpu_day.Item:
    return gpu_day.Item(name, (sys.executable, "-c", LINE + code), limit, least=1.0)


def lines(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    for line in found:
        line.pop("seconds", None)
    return found


def test_an_item_that_hangs_or_crashes_costs_itself_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What an item has found before it hangs or crashes is on the disk; a second call adds to it."""
    items = [
        stand_in("loud", "print('loud' * 200000)"),
        stand_in("crashes", "os.abort()"),
        stand_in("hangs", "time.sleep(600)", limit=3.0),
    ]
    record = gpu_day.Record(tmp_path / "new")
    assert gpu_day.run(items, record, 600.0) == 2
    ends = {"loud": "ok", "crashes": "failed: exit code -6", "hangs": "stopped: 3 s were over"}
    expected = [
        line for name, end in ends.items() for line in ({"item": name, "value": 3}, {"item": name, "status": end})
    ]
    assert lines(tmp_path / "new") == expected
    log = (tmp_path / "new" / "log.txt").read_text()
    assert "==== crashes, at most 60 s" in log
    assert gpu_day.LOGGED < len(log) < gpu_day.LOGGED + 2000
    shown = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(shown) == len(expected), "results are shown, what items print is not"
    assert gpu_day.run([stand_in("late", "")], gpu_day.Record(tmp_path / "new"), 16.5) == 1
    assert lines(tmp_path / "new") == [*expected, {"item": "late", "status": "not begun: the time was up"}]


def test_why_a_test_failed_is_in_the_log_of_a_run_that_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    one, two = "print('shown')\n    assert 1 == 2", "os.kill(os.getpid(), 9)"
    file.write_text(f"import os\ndef test_one():\n    {one}\ndef test_two():\n    {two}\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", gpu_day.AT_ONCE, str(file))
    assert gpu_day.run([gpu_day.Item("tests", command, 600.0)], gpu_day.Record(tmp_path / "out"), 600.0) == 1
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "test_two.py::test_one (call)" in log
    assert "assert 1 == 2" in log
    assert "shown" in log


def test_what_had_not_ended_is_in_the_log_of_a_run_that_is_interrupted(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text("def test_soon(): pass\ndef test_late(): raise KeyboardInterrupt\n")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", gpu_day.AT_ONCE, str(file))
    assert gpu_day.run([gpu_day.Item("tests", command, 600.0)], gpu_day.Record(tmp_path / "out"), 600.0) == 1
    named = [line for line in (tmp_path / "out" / "log.txt").read_text().splitlines() if line.endswith("had not ended")]
    assert len(named) == 1
    assert "test_two.py::test_late" in named[0]


def test_the_calls_name_what_there_is(tmp_path: Path) -> None:
    calls = gpu_day.calls(tmp_path)
    known = {str(item) for item in gpu.items(list(gpu.SHAPES))}
    for items in calls.values():
        assert sum(item.limit for item in items) <= 60 * gpu_day.MINUTES, "a call that goes badly does not cut its last"
        for item in items:
            files = [part for part in item.command if part.endswith(".py")]
            assert files
            assert [file for file in files if not Path(file).exists()] == []
            assert "-P" in item.command, "else folders of a checkout are packages"
            if "--item" in item.command:
                model, part = item.command[item.command.index("--item") + 1 :]
                assert {model, f"{model} {part}"} & known
    tested = {part for items in calls.values() for item in items for part in item.command if "tests/gpu" in part}
    assert tested == set(map(str, (ROOT / "tests/gpu").glob("test_*.py"))), "each file of tests/gpu has its turn"


def test_a_sanitizer_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer's tests run in one process, as it would not follow those that pytest-xdist starts."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert gpu_day.sanitized(50.0) == []
    monkeypatch.setattr("shutil.which", lambda name: f"/somewhere/{name}")
    (item,) = gpu_day.sanitized(50.0)
    assert item.command[:3] == ("/somewhere/compute-sanitizer", "--tool", "memcheck")
    assert "-n" not in item.command
    assert "pytest" in item.command


def test_a_call_begins_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call runs its items, and never in Triton's interpreter, whatever the environment says."""
    code = "import sys; sys.exit(int(os.environ['TRITON_INTERPRET']))"
    monkeypatch.setattr(gpu_day, "calls", lambda out: {"kernels": [stand_in("one", code)]})
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "kernels", "--out", str(tmp_path)])
    monkeypatch.setattr(os, "environ", {**os.environ, "TRITON_INTERPRET": "1"})
    assert gpu_day.main() == 0
    assert lines(tmp_path) == [{"item": "one", "value": 3}, {"item": "one", "status": "ok"}]


def test_a_machine_without_ray_verl_peft_and_trl_can_run_them(tmp_path: Path) -> None:
    """The command line and the benchmarks load without these packages, and the tests for a GPU are collected."""
    code = (
        "import pytest, samebit.rollout.cli, samebit.weight_sync, samebit.benchmarks.gpu_bits\n"
        "import samebit.benchmarks.gpu, samebit.benchmarks.gpu_day, samebit.benchmarks.tune_tiles\n"
        f"sys.exit(pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', {str(ROOT / 'tests/gpu')!r}]))"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe, "-W", "ignore", "-c", BARE + code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
