"""Write the JSON of a benchmark: `{"meta": {...}, "metrics": {"name": {"value", "min", "max"}}}`."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from samebit.benchmarks.rounds.turns import Spread

_PACKAGES = ("samebit", "torch", "transformers", "numba", "numpy")
_ROOT = Path(__file__).resolve().parents[2]


def describe(**more: Any) -> dict[str, Any]:
    """Return what is needed to repeat the run; `more` is added."""
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": _device(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT", "unset"),
        "load_average": load_average(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        **more,
    }


def load_average() -> float:
    return os.getloadavg()[0]


def write(path: Path, meta: dict[str, Any], metrics: dict[str, Spread]) -> None:
    content = {"meta": meta, "metrics": {name: asdict(value) for name, value in metrics.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _commit() -> str:
    """Return the commit, with a mark when tracked files differ from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=_ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _device() -> str:
    """Return the processor's name with its family and model, where it says: AMD calls Zen 4 and Zen 5 alike."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = dict(reversed([tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))
    name = found.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in found and "model" in found:
        return f"{name} (family {found['cpu family']}, model {found['model']})"
    return name


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
