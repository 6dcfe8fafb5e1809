"""A wheel has every module of the packages, and every file that they read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .imports import PACKAGES, ROOT

NOT_READ = ("README.md", "benchmarks/notes/", "benchmarks/results/")
"""Lists ends, and beginnings, of the names of files that are for people alone."""


def tracked(*given: str) -> list[str]:
    command = ["git", "ls-files", "-z", *given]
    listed = subprocess.run(command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE)
    if listed.returncode:
        pytest.skip("no checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def test_a_wheel_has_all_that_is_needed(tmp_path: Path) -> None:
    """A wheel has exactly the files that are not for people alone. It is built in a copy, as a build leaves files
    behind.
    """
    pytest.importorskip("setuptools", "77")
    files = tracked(*PACKAGES)
    assert len(files) > 500, "the files were not found"
    for name in (*files, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "wheel"]
    subprocess.run(command, cwd=tmp_path, check=True)
    built = {str(path.relative_to(tmp_path / "wheel")) for path in (tmp_path / "wheel").rglob("*") if path.is_file()}
    needed = {name for name in files if not name.endswith(NOT_READ) and not name.startswith(NOT_READ)}
    assert {name for name in built if not name.endswith(".pyc")} == {f"samebit/{name}" for name in needed}
