"""How pytest-xdist gives files of tests to its processes: those that share a cluster of Ray together."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

from .order import OF_ONE_CLUSTER, TESTS


class Scheduling(LoadFileScheduling):
    """Takes files for one that belong to the same process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "of one cluster" if file.removeprefix(f"{TESTS.name}/") in OF_ONE_CLUSTER else file
