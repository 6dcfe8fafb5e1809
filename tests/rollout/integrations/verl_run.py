"""Do with a run what the tests of verl's trainer need: start and end it, look at its processes and their sockets."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from samebit.recipes.verl_grpo import task
from samebit.recipes.verl_grpo.launch import Run

from ...forks import python
from ...patience import HANG

IN_VERL = Path(__file__).parent / "in_verl"
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}


def build_data(folder: Path) -> Path:
    """Build a model and prompts, as the recipe has them but smaller."""
    task.build(folder, training=64, held_out=4, warm=False, tie_word_embeddings=False, **TINY)
    return folder


def spied(folder: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Path:
    """Return where the servers of the next run write down what they answered; see verl_spy.py."""
    answers = folder / "spied"
    answers.mkdir()
    found = [str(IN_VERL), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(found), "SPY_FOLDER": str(answers)}
    for name, value in {"VERL_USE_EXTERNAL_MODULES": "verl_spy", **environment}.items():
        monkeypatch.setenv(name, value)
    return answers


@contextmanager
def running(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run; end it, with all its processes, whatever happens. Its first process is a fork, as `forks` says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "command", lambda run, command=Run.command: [*python(), *command(run)[1:]])
        process = run.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in processes_of(run):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def processes_of(run: Run) -> list[psutil.Process]:
    """Return the processes in its folder, where forks too are, and those that began with its metrics file in their
    environment: Ray puts some in sessions of their own.
    """
    mark, folder = run.environment()["VERL_FILE_LOGGER_PATH"], str(run.out.resolve())
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == folder or process.environ().get("VERL_FILE_LOGGER_PATH") == mark:
                found.append(process)
    return found


def names_of(processes: list[psutil.Process]) -> set[str]:
    """Return the names of those that have not ended meanwhile."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found.add(process.name())
    return found


def wait_for_a_step(run: Run, process: subprocess.Popen[bytes]) -> None:
    """Return once it has made a step.

    Raises:
        AssertionError: it has ended, or hangs: neither its log nor its metrics grow.
    """

    def arrived() -> bool:
        assert process.poll() is None, run.log.read_text()[-4000:]
        return bool(run.steps())

    _wait_until(arrived, lambda: (len(run.steps()), run.log.stat().st_size))


def wait_for_end(run: Run, process: subprocess.Popen[bytes]) -> int:
    """Wait for its end; return its exit code.

    Raises:
        AssertionError: it hangs: it makes no more steps, whatever it writes to its log.
    """
    _wait_until(lambda: process.poll() is not None, lambda: len(run.steps()))
    return process.returncode


def _wait_until(happened: Callable[[], bool], heartbeat: Callable[[], object]) -> None:
    """Wait as long as the heartbeat goes on, without a limit."""
    beat, limit = heartbeat(), time.monotonic() + HANG
    while not happened():
        if heartbeat() != beat:
            beat, limit = heartbeat(), time.monotonic() + HANG
        assert time.monotonic() < limit, f"no sign of life for {HANG:.0f} seconds; the last: {beat}"
        time.sleep(0.2)


def listening_elsewhere(run: Run) -> list[str]:
    """Return sockets of its processes that other machines could reach."""
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
