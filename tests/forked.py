"""Run the ranks of a group as forks of one process, which loads for all of them what they need and computes nothing.

`run_ranks` is what tests call. The process is this file as a command: `forked.py SCRIPT COUNT ARGUMENTS`; it calls the
script's `main(rank, *arguments)` in each fork.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any


def run_ranks(script: Path, count: int, folder: Path, *arguments: str, patience: float) -> tuple[list[int], str]:
    """Return each rank's exit code (of one that a signal ended: its number, negative), and what all have said.

    The script's first argument is `folder`, where they run too. After `patience` seconds they hang.
    """
    from .forks import python  # here, as the command is in no package

    command = [*python(), __file__, str(script), str(count), str(folder), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    try:
        *said, codes = process.communicate(timeout=patience)[0].splitlines()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, "\n".join([*said, codes])
    return json.loads(codes), "\n".join(said)


def main(script: str, count: str, *arguments: str) -> None:
    work = runpy.run_path(script)["main"]
    ranks = [_forked(work, rank, arguments) for rank in range(int(count))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    sys.stdout.write(json.dumps(codes) + "\n")


def _forked(work: Any, rank: int, arguments: tuple[str, ...]) -> int:
    """Return the process id of a fork that does a rank's work."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(rank, *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
