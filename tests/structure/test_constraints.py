"""Every version that a file of constraints pins can be installed on each Python that the package allows."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PYTHONS = [f"3.{minor}" for minor in range(8, 20)]


def allowed_pythons() -> list[str]:
    (given,) = re.findall(r'^requires-python = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return [python for python in PYTHONS if python in SpecifierSet(given)]


def pins(name: str) -> list[Requirement]:
    lines = (line.partition(" #")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def needed_python(pin: Requirement) -> SpecifierSet | None:
    """Return the Pythons that take what is pinned; None where another version is installed, or none."""
    try:
        found = metadata.metadata(pin.name)
    except metadata.PackageNotFoundError:
        return None
    return SpecifierSet(found.get("Requires-Python", "")) if found["Version"] in pin.specifier else None


def is_asked_for(pin: Requirement, python: str) -> bool:
    return pin.marker is None or pin.marker.evaluate({"python_version": python, "python_full_version": f"{python}.99"})


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-next.txt"])
def test_a_pin_is_for_the_pythons_that_take_it(name: str) -> None:
    """Each pin is asked for only on Pythons that can install it; otherwise `make install PYTHON=python3.10` finds
    nothing.
    """
    needed = {pin: needed_python(pin) for pin in pins(name)}
    assert sum(found is not None for found in needed.values()) > 5, "the packages were not found"
    refused = [
        f"{pin} on Python {python}, it needs {found}"
        for pin, found in needed.items()
        for python in allowed_pythons()
        if found is not None and is_asked_for(pin, python) and f"{python}.99" not in found
    ]
    assert not refused


def brought_along(extra: str, python: str) -> set[str]:
    """Return the packages that an extra asks for itself on this Python, or by other extras."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [one for one in map(Requirement, given[extra]) if is_asked_for(one, python)]
    others = [brought_along(name, python) for one in asked if one.name == "samebit" for name in one.extras]
    return {one.name for one in asked if one.name != "samebit"}.union(*others)


@pytest.mark.parametrize("python", allowed_pythons())
def test_what_prompts_are_read_with_comes_with_the_recipes(python: str) -> None:
    """The recipes' extra brings what prompts are read with, also where there is no TRL, which brings some of it."""
    assert brought_along("recipes", python) >= {"datasets", "pyarrow", "reasoning-gym"}


def test_a_lock_says_for_which_python_it_is() -> None:
    """A lock names the Python that made it, whose wheels have the hashes."""
    archive = {"archive_info": {"hashes": {"sha256": "0f"}}}
    report = json.dumps({"install": [{"metadata": {"name": "A", "version": "1"}, "download_info": archive}]})
    command = [sys.executable, str(ROOT / ".ci/lock")]
    made = subprocess.run(command, input=report, check=True, text=True, stdout=subprocess.PIPE)
    head, *lines = made.stdout.splitlines()
    assert lines == ["a==1 --hash=sha256:0f"]
    major, minor, _ = platform.python_version_tuple()
    assert head.endswith(f", for {platform.python_implementation()} {major}.{minor} on Linux {platform.machine()}.")
    committed = (ROOT / "requirements.lock").read_text().splitlines()[0]
    assert re.sub(r"3\.\d+ on", "3 on", head) == re.sub(r"3\.\d+ on", "3 on", committed)
