"""Run Python's commands as forks of a process that has loaded torch, transformers and the worker, and computed nothing.

`python()` stands where `sys.executable` would: `[*python(), script, *arguments]`, also with `-c` and `-m`. The command
is this file, which loads nothing: it hands its arguments, folder, environment and streams to the server, and ends as
the fork ends. The server starts when it is first needed, and ends with the tests. pytest-xdist's processes
are such forks too, so that files of tests import what most of them need in half the time.

What is read when libraries load is the server's: where a test is of such a variable it starts `sys.executable`.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

CLIENT = "SAMEBIT_TESTS_CLIENT"
"""Names the process of a fork's command, whose environment is what the fork was started with, in the fork's own."""
_environment: dict[str, str] = {}
_SERVER = "SAMEBIT_TESTS_SERVER"
_SERVE = "serve"
_MOST_FILES = 64
"""Limits the files that a command is started with."""
_LOADED = ("samebit.kernels", "samebit.rollout.worker", "samebit.weight_sync")
_LOADED_FOR_VERL = (
    *("tensordict", "pandas", "datasets", "peft", "hydra", "fastapi", "aiohttp"),
    *("requests", "jsonschema", "msgspec", "zmq"),
)
"""Lists what verl and Ray import, where it is installed. Not Ray, which keeps what a process is."""
_LOADED_FOR_TESTS = (
    "wandb",
    "reasoning_gym",
    "hypothesis",
    "openai",
    "schemathesis",
    "matplotlib.pyplot",
    "uvicorn",
    "trl",
)
"""Lists what else takes files of tests long to import: processes of pytest-xdist are forks too."""


def share() -> None:
    """Let this process and those that it starts have one server, of this environment, which ends with this process."""
    os.environ.setdefault(_SERVER, f"samebit-tests-{os.getpid()}")
    _environment.update(os.environ)


def python() -> list[str]:
    """Return what stands for Python in a command. Where no server listens yet, this starts one."""
    with socket.socket(socket.AF_UNIX) as listener, suppress(OSError):
        listener.bind(_address())
        listener.listen(64)
        command = [sys.executable, __file__, _SERVE]
        subprocess.Popen(command, stdin=listener, cwd="/", env=_environment, start_new_session=True)
    return [sys.executable, "-I", "-S", __file__]


def _address() -> str:
    """Return the server's address, in no folder. It ends in the number of the process that the server ends with."""
    return "\0" + os.environ[_SERVER]


def ask(command: list[str]) -> None:
    """Have a command run by the server, and end as it ends."""
    environment = {**os.environ, CLIENT: str(os.getpid())}
    streams = _streams(command)
    request = json.dumps([streams, command, os.getcwd(), environment]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(_address())
        socket.send_fds(server, [len(request).to_bytes(8, "big")], streams)
        server.sendall(request)
        code = int(server.makefile().readline())
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _streams(command: list[str]) -> list[int]:
    """Return the files that a command is started with: what multiprocessing starts has some beside the usual three."""
    own = [int(name) for name in os.listdir("/proc/self/fd")] if "--multiprocessing-fork" in command else []
    return [0, 1, 2, *(file for file in own if file > 2 and os.path.exists(f"/proc/self/fd/{file}"))]


def serve() -> None:
    """Load what commands need, and fork for each until the tests end. It returns in the forks, to run theirs."""
    for module in _LOADED:
        import_module(module)
    for module in filter(_is_installed, (*_LOADED_FOR_VERL, *_LOADED_FOR_TESTS)):
        import_module(module)
    gc.freeze()  # what is loaded is no garbage when a fork ends
    listener = socket.socket(fileno=os.dup(0))
    tests = os.pidfd_open(int(listener.getsockname().decode().rpartition("-")[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while tests not in select.select([listener, tests], [], [])[0]:
        client, _ = listener.accept()
        if _is_ours(client) and os.fork() == 0:
            listener.close()
            os.close(tests)
            return _keep(client)
        client.close()
    sys.exit()


def _is_installed(module: str) -> bool:
    return find_spec(module.partition(".")[0]) is not None


def _is_ours(client: socket.socket) -> bool:
    """Say whether the client's user is this process's: others can reach the address too."""
    peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", peer)[1] == os.getuid())


def _keep(client: socket.socket) -> None:
    """Fork for a client's command, in which this returns; wait until it ends, or end it where the client has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 8, _MOST_FILES)
    request = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    child = os.fork()
    if child == 0:
        client.close()
        os.setsid()
        return _become(streams, *json.loads(request))
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ended = os.pidfd_open(child)
    if ended not in select.select([client, ended], [], [])[0]:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        client.sendall(f"{code}\n".encode())
    os._exit(0)


def _become(given: list[int], streams: list[int], command: list[str], folder: str, environment: dict[str, str]) -> None:
    """Take what a process has that starts with this command; the files that are given get these numbers."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(streams) + 1) for file in given]
    for number, file in zip(streams, aside, strict=True):
        os.dup2(file, number)
    for file in {*given, *aside} - {*streams}:
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    import_module("numba").config.reload_config()  # before its threads start, after which it takes no other number
    sys.argv[:] = command
    sys.path[:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


def run(first: str, *arguments: str) -> None:
    """Run a command in this process, as Python does."""
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        run(*arguments)
    elif first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:1] = []
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-B":
        run(*arguments)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(arguments[0], vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def end(code: int) -> NoReturn:
    """End this process once its threads have, and what waits for its end was called.

    Nothing that it holds is taken apart, which Python would do for seconds.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # it is closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == [_SERVE]:
        serve()
        try:
            run(*sys.argv)
        except SystemExit as asked:
            if not isinstance(asked.code, int | None):
                raise
            end(asked.code or 0)
        end(0)
    else:
        ask(sys.argv[1:])
