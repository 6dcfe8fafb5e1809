"""Say how pytest-xdist gives files of tests to its processes: those that share a cluster of Ray together, and those
that mostly wait to the last of three processes, until there are no more of them.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

from .order import OF_ONE_CLUSTER, TESTS, WAITING

_ONE_CLUSTER = "of one cluster"


class Scheduling(LoadFileScheduling):
    """Takes files for one that belong to the same process, and keeps one process for those that wait."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].removeprefix(f"{TESTS.name}/")
        return _ONE_CLUSTER if file in OF_ONE_CLUSTER else file

    def _assign_work_unit(self, node: Any) -> None:
        if len(self.nodes) > 2:
            wanted = node is self.nodes[-1]
            fitting = [scope for scope in self.workqueue if _waits(scope) == wanted]
            if fitting:
                self.workqueue.move_to_end(fitting[0], last=False)
        super()._assign_work_unit(node)


def _waits(scope: str) -> bool:
    return scope == _ONE_CLUSTER or scope in WAITING
