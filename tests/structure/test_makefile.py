"""`make install` sets up an environment of the Python that it is told, and deletes none that was finished or found."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@dataclass(frozen=True)
class Environment:
    """Is made by `make` in a folder, with stand-ins for Python, which note that pip was called."""

    folder: Path
    variable: str

    @property
    def stamp(self) -> Path:
        return self.folder / ".samebit-installed"

    @property
    def installed_with(self) -> list[str]:
        return (self.folder / "called").read_text().split()

    def make(self, name: str, code: int = 0) -> int:
        """Install with a Python of this name, whose pip exits with `code`; return what `make` exits with."""
        python = self.folder.with_name(name)
        made = f"#!/bin/sh\\necho {name} >> {self.folder}/called\\nexit {code}\\n"
        keeps = '[ -e "$3/bin/python" ] || '  # as venv does
        python.write_text(
            f'#!/bin/sh\nmkdir -p "$3/bin"\n{keeps}printf \'{made}\' > "$3/bin/python"\nchmod +x "$3/bin/python"\n'
        )
        python.chmod(0o700)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        arguments = [f"{self.variable}={self.folder}", f"PYTHON={python}", str(self.stamp)]
        return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, check=False).returncode


@pytest.fixture(params=["VENV", "NEXT", "VLLM"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment", request.param)


def test_another_python_after_an_attempt_that_failed(environment: Environment) -> None:
    assert environment.make("python3.13", code=1) != 0
    assert environment.installed_with == ["python3.13"]
    assert environment.make("python3.12") == 0
    assert set(environment.installed_with) == {"python3.12"}
    assert environment.stamp.exists()


def test_what_was_installed_to_the_end_stays(environment: Environment) -> None:
    assert environment.make("python3.12") == 0
    (environment.folder / "mine").touch()
    os.utime(environment.stamp, (0, 0))  # older than what it is made of
    assert environment.make("python3.11", code=1) == 0
    assert environment.stamp.stat().st_mtime > 0
    assert (environment.folder / "mine").exists()


def test_what_was_there_before_stays(environment: Environment) -> None:
    environment.folder.mkdir()
    (environment.folder / "mine").touch()
    assert environment.make("python3.13", code=1) != 0
    environment.make("python3.12")
    assert (environment.folder / "mine").exists()
