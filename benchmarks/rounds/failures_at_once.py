"""Let pytest say why a test failed as soon as it has, and at the end which had not ended: a run that a limit ends says
nothing of either otherwise.

pytest -p samebit.benchmarks.rounds.failures_at_once
"""

from typing import Any

import pytest

_LONGEST = 6000
"""The most characters of one failure, its end."""


class _Failures:
    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        self._running: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.discard(nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call", "teardown"):  # its process crashed, and says no more of it
            self._running.discard(report.nodeid)
        if report.outcome == "failed":
            printed = "".join(f"\n-- {title}\n{text}" for title, text in report.sections)
            self._terminal.write_line(f"\n==== {report.nodeid} ({report.when})")
            self._terminal.write_line((report.longreprtext + printed)[-_LONGEST:])

    def pytest_keyboard_interrupt(self) -> None:
        for nodeid in sorted(self._running):
            self._terminal.write_line(f"==== {nodeid} had not ended")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print a failure, with what the test printed, in the process that was called."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # a process of pytest-xdist has none
        config.pluginmanager.register(_Failures(terminal))
