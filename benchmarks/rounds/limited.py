"""Run a part of a benchmark in a process of its own, with a limit: what hangs, crashes or leaves a broken GPU context
behind costs that part alone, and what it had found by then is kept.

The process prints a line of `MARK` and JSON for each result; all other lines are shown as they come, its errors too.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

MARK = "RESULT "

_GRACE = 5.0
"""Seconds between an interrupt, at which Python says where it was, and the end."""


def emit(**result: Any) -> None:
    """Print a result, in the process of a part."""
    print(MARK + json.dumps(result), flush=True)


def run_limited(command: Sequence[str], seconds: float, take: Callable[[dict[str, Any]], None]) -> str | None:
    """Run it, with all that it starts, and hand each result to ``take``; return what went wrong, None if nothing."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    told = ((process.stdout, take), (process.stderr, None))
    readers = [threading.Thread(target=_read, args=one, daemon=True) for one in told]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped: {seconds:.0f} s were over"
    finally:
        _end(process)
        for reader in readers:
            reader.join(_GRACE)
    return None if code == 0 else f"failed: exit code {code}"


def _read(lines: IO[str] | None, take: Callable[[dict[str, Any]], None] | None) -> None:
    assert lines is not None
    with lines:
        for line in lines:
            if take is not None and line.startswith(MARK):
                take(json.loads(line.removeprefix(MARK)))
            else:
                print(line, end="", flush=True)


def _end(process: "subprocess.Popen[str]") -> None:
    """End what is left of the process and of those that it started."""
    for number in (signal.SIGINT, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
