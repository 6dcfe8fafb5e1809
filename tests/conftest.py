"""Ray as all tests of a process use it: on the loopback interface, without a token in the home folder. And Triton's
interpreter where there is no GPU.

Ray and Triton read this when they are imported; Ray remembers the token from then on.

`make test` runs two processes (pytest-xdist): the tests of a file stay in one, and so do all that start Ray.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("RAY_AUTH_TOKEN", "of-the-tests")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
