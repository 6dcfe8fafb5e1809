"""Ask an engine that runs in a process of its own; one message to it, one answer, over its stdin and stdout.

Invariant: when the context ends, the process and all that it started have ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samebit.benchmarks.engines.messages import Done, Job

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 2000
"""Characters of an engine's stderr that an error shows."""


@dataclass(frozen=True)
class Command:
    """Says how an engine is started: `python` gets `args`; `environment` is added to this one's.

    without: names of variables that are taken out.
    """

    python: Path
    args: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def line(self) -> list[str]:
        return [str(self.python), *self.args]

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in self.without}
        return {**kept, **self.environment, "PYTHONPATH": str(ROOT)}


class EngineProcess:
    """Holds the running process. `versions` are what it said of itself."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.versions: dict[str, str] = self._read()["versions"]

    def run(self, job: Job) -> Done:
        """Let it do the job, and wait.

        Raises:
            RuntimeError: the process has ended, or gave another number of sequences, tokens or log-probabilities than
                asked for; with the end of its stderr.
        """
        done = Done(**self.ask(asdict(job)))
        self._check(job, done)
        return done

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and wait for its answer.

        Raises:
            RuntimeError: the process has ended; with the end of its stderr.
        """
        if self._process.stdin is None:
            raise RuntimeError("the engine was started without a pipe to it")
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._read()

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes of this engine that still run."""
        return sum(map(_cpu_seconds, _session(self._process.pid)))

    def _check(self, job: Job, done: Done) -> None:
        given = {"tokens": done.tokens, "log-probabilities": done.logprobs if job.logprobs else done.tokens}
        for what, rows in given.items():
            lengths = sorted({len(row) for row in rows or []})
            asked = len(job.prompts) * job.samples
            if len(rows or []) != asked or lengths != [job.new_tokens]:
                raise RuntimeError(
                    f"the engine gave {len(rows or [])} sequences of {lengths} {what}, "
                    f"asked for {asked} of {job.new_tokens}"
                )

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        return message

    def _ended(self) -> RuntimeError:
        code = self._process.wait()
        return RuntimeError(f"the engine ended with {code}; the end of its stderr:\n{self._log.read_text()[-_TAIL:]}")


@contextmanager
def started(command: Command) -> Iterator[EngineProcess]:
    """Start it and wait until it listens.

    Raises:
        FileNotFoundError: there is no such Python.
        RuntimeError: the process ended before it listened.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command.line(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=folder,
                env=command.variables(),
                start_new_session=True,
            )
        try:
            yield EngineProcess(process, log)
        finally:
            end_session(process)


def end_session(process: subprocess.Popen[str]) -> None:
    """Kill whatever runs in the session of this process; engines keep nothing that needs a goodbye."""
    if _session(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _session(leader: int) -> list[list[str]]:
    """Return the fields of /proc/<pid>/stat, from the state on, of each process in the session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if int(fields[3]) == leader:
            found.append(fields)
    return found


def _cpu_seconds(fields: list[str]) -> float:
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")
