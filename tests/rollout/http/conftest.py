"""Give all tests of a process one server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...patience import wait_until
from .served import Served, build_folder, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = build_folder(tmp_path_factory.mktemp("served"))
    flags = ("--control", "loopback", "--max-num-seqs", "16", "--max-waiting", "48", "--tool-call-parser", "hermes")
    roots = ("--weight-root", str(folder.parent), "--max-n", "16", "--max-body-bytes", "200000", "--max-sessions", "2")
    with serving(folder, *flags, *roots) as one:
        yield one


@pytest.fixture(autouse=True)
def _idle_behind_each_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the server awake and going on, with nothing that runs, whatever a test ends with."""
    if "served" not in request.fixturenames:
        yield
        return
    service = request.getfixturevalue("served").service
    yield
    service.worker.wake_up()
    service.worker.resume()
    wait_until(lambda: not service.running and all(service.worker.stats()[one] == 0 for one in ("running", "waiting")))
