"""Spend the first hours on a GPU well: calls of at most 9.5 minutes, what decides about the rest first.

    python -P benchmarks/gpu_day.py kernels --out DIR      bits, rows, kernels beside the oracle
    python -P benchmarks/gpu_day.py engine --out DIR       samebit check, graphs, training, gradients, requests
    python -P benchmarks/gpu_day.py speed --out DIR        an 8B model: exactness, decode, training; a hybrid
    python -P benchmarks/gpu_day.py tiles --out DIR        tiles of the 8B model's layers
    python -P benchmarks/gpu_day.py rest --out DIR         small models, tax, control, Hugging Face

Runs from a checkout, offline, with torch, triton, transformers, numba and pytest; with pytest-xdist tests run in nearly
as many processes as there are cores. Each item is a process of its own with a limit (`rounds/limited.py`): one that
hangs, crashes or leaves a broken CUDA context behind costs itself alone. DIR/results.jsonl has a line for each result
and for the end of each item, on the disk before the next one begins; DIR/log.txt all that the items print. Later calls
add to both.

No item starts with less than its shortest useful time left. Triton's interpreter is off: an item fails without a GPU.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]

BARE = find_spec("samebit") is None
if BARE:  # the checkout itself is enough
    sys.path.insert(0, str(ROOT))

from samebit.benchmarks.rounds.limited import run_limited  # noqa: E402

MINUTES = 9.5
RESERVE = 16.0
"""Seconds of a call that are left for the end of its last item."""

LOGGED = 400_000
"""Characters that an item may add to the log."""

AT_ONCE = "samebit.benchmarks.rounds.failures_at_once"

ENVIRONMENT = {
    "TRITON_INTERPRET": "0", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """Describes one process; it may take ``limit`` seconds, and is not begun with fewer than ``least``."""

    name: str
    command: tuple[str, ...]
    limit: float
    least: float = 20.0


def script(name: str, limit: float, *args: str, least: float = 20.0) -> Item:
    """Make an item of one of these benchmarks."""
    command = sys.executable, "-P", str(ROOT / "benchmarks" / name), *args
    return Item(" ".join((name, *args)), command, limit, least)


def suite(name: str, limit: float, *paths: str, spread: bool = True) -> Item:
    """Make an item of tests; ``spread``: over processes, where pytest-xdist is installed."""
    count = str(max(1, (os.cpu_count() or 1) - 2))
    processes = ("-n", count, "--dist", "worksteal") if spread and find_spec("xdist") else ()
    command = (
        sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", AT_ONCE, "--tb=short",
        "--maxfail=50", "--durations=8", "--continue-on-collection-errors", "--rootdir", str(ROOT),
        "-c", str(ROOT / "pyproject.toml"), *processes, *(str(ROOT / "tests" / path) for path in paths),
    )  # fmt: skip
    return Item(name, command, limit)


def part(model: str, name: str, limit: float) -> Item:
    """Make an item of a part of gpu.py."""
    return script("gpu.py", limit, "--item", model, name)


def sanitized(limit: float) -> list[Item]:
    """Make an item that looks for bad addresses and races in short tests; none where the machine has no sanitizer."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None:
        return []
    files = "gpu/test_heads.py", "gpu/test_norm_sums.py"
    plain = suite("memcheck of norms and heads", limit, *files, spread=False)
    return [Item(plain.name, (found, "--tool", "memcheck", "--error-exitcode", "9", *plain.command), limit)]


def calls(out: Path) -> dict[str, list[Item]]:
    """Return the items of each call, in the order of their turns."""
    near = [path for path in sorted((ROOT / "tests/kernels/triton").glob("test_*.py")) if path.stem != "test_compile"]
    return {
        "kernels": [
            script("gpu_bits.py", 170),
            suite("rows", 150, *(f"gpu/test_{name}.py" for name in ("rows", "tiles", "heads", "norm_sums"))),
            suite("kernels near the oracle", 240, *(f"kernels/triton/{path.name}" for path in near)),
        ],
        "engine": [
            suite("check", 180, "gpu/test_check.py"),
            suite("graphs", 80, "gpu/test_graphs.py"),
            suite("training, updates, CUDA IPC", 100,
                  *(f"gpu/test_{name}.py" for name in ("grpo", "trainers", "streams", "updates", "cuda_ipc"))),
            suite("gradients", 100, "gpu/test_gradients.py"),
            suite("requests, adapters, shared prefixes, experts", 110,
                  *(f"gpu/test_{name}.py" for name in ("requests", "adapters", "shared_prefixes", "experts"))),
        ],
        "speed": [
            part("qwen3-8b", "exactness", 120),
            part("qwen3-8b", "decode", 170),
            part("qwen3-8b", "profile", 50),
            part("qwen3-8b", "training", 80),
            part("nemotron-h-8b", "exactness", 90),
            part("nemotron-h-8b", "recurrent", 50),
        ],
        "tiles": [
            script("tune_tiles.py", 560, "--models", "qwen3-8b", "--minutes", "8.5", "--out", str(out / "tiles.json"))
        ],
        "rest": [
            part("qwen3-8b", "tax", 100),
            part("qwen3-8b", "prefill", 40),
            part("qwen3-0.6b", "exactness", 80),
            part("qwen3-0.6b", "decode", 80),
            part("experts of qwen3-30b-a3b", "layer", 60),
            part("qwen3-0.6b", "cache", 60),
            part("qwen3-0.6b", "control", 60),
            part("qwen3-0.6b", "hugging_face", 70),
            *sanitized(50),
        ],
    }  # fmt: skip


class Record:
    """Writes what is found to the end of two files, each line to the disk at once."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._results, self._log, self._show = out / "results.jsonl", out / "log.txt", sys.stdout

    def result(self, **what: Any) -> None:
        """Add a line to the results, and show it."""
        line = json.dumps(what)
        with self._results.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line, file=self._show, flush=True)

    @contextlib.contextmanager
    def console(self, item: Item) -> Iterator[None]:
        """Take what is printed meanwhile into the log."""
        with self._log.open("a", errors="replace", buffering=1) as log:
            log.write(f"\n==== {item.name}, at most {item.limit:.0f} s\n")
            with contextlib.redirect_stdout(_Limited(log, LOGGED)):
                yield


class _Limited(io.TextIOBase):
    """Passes on the first characters; the rest goes nowhere."""

    def __init__(self, target: TextIO, most: int) -> None:
        self._target, self._left = target, most

    def write(self, text: str) -> int:
        self._target.write(text[: self._left])
        self._left = max(self._left - len(text), 0)
        return len(text)

    def flush(self) -> None:
        self._target.flush()


def run(items: Sequence[Item], record: Record, seconds: float) -> int:
    """Run each in its process until the time is up; return how many did not end well."""
    ends, failed = time.monotonic() + seconds, 0
    for item in items:
        left, began = ends - time.monotonic() - RESERVE, time.monotonic()
        status: str | None = "not begun: the time was up"
        if left >= item.least:

            def take(found: dict[str, Any], name: str = item.name) -> None:
                record.result(item=name, **found)

            with record.console(item):
                status = run_limited(item.command, min(item.limit, left), take)
        failed += status is not None
        record.result(item=item.name, status=status or "ok", seconds=round(time.monotonic() - began, 1))
    return failed


def without_a_libgomp() -> dict[str, str]:
    """Return what lets torch's libgomp stand in where the system has none: samebit does not load without one."""
    test = [sys.executable, "-c", "import numba.np.ufunc.omppool"]
    found = find_spec("torch")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    places = [place for folder in folders for place in (folder / "lib", folder.with_name("torch.libs"))]
    copies = [path for place in places for path in sorted(place.glob("libgomp*.so*"))]
    if not copies or subprocess.run(test, capture_output=True, check=False).returncode == 0:
        return {}
    folder = Path(tempfile.mkdtemp(prefix="gomp-"))
    for name in ("libgomp.so.1", "libgomp.so.1.0.0"):
        (folder / name).symlink_to(copies[0])
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))}


def with_samebit(folder: Path) -> dict[str, str]:
    """Return what lets Python find samebit where it is not installed, and not the checkout's folders beside it."""
    if not BARE:
        return {}
    (folder / "samebit").symlink_to(ROOT / "samebit")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def main() -> int:
    """Return how many items did not end well."""
    names = list(calls(Path()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=names)
    parser.add_argument("--out", type=Path, required=True, help="where results.jsonl and log.txt are")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"all items end by then (default {MINUTES})")
    args = parser.parse_args()
    out = args.out.resolve()
    with tempfile.TemporaryDirectory(prefix="samebit-") as folder:
        os.environ.update({**ENVIRONMENT, **without_a_libgomp(), **with_samebit(Path(folder))})
        return run(calls(out)[args.call], Record(out), 60 * args.minutes)


if __name__ == "__main__":
    sys.exit(main())
