"""Say in which order the files of tests run, and which of them run in the same process.

`make test` gives whole files to some processes as these become free. The files that take longest come first, as the
last one to run should be short. The very first compiles nearly all kernels of the CPU; those beside it need none, the
next ones many. Files that need a cluster of Ray share one: they run one after the other in one process. Files that
mostly wait for other processes have a process of their own, so that the others never wait.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OF_ONE_CLUSTER = (
    "rollout/integrations/test_ray.py",
    "rollout/fleet/test_ray_fleet.py",
    "recipes/test_sync.py",
    "recipes/test_grpo_async.py",
)
LONGEST = (
    "exactness/test_check.py",
    "kernels/triton/test_attention.py",
    "kernels/triton/test_splits.py",
    "benchmarks/test_benchmarks.py",
    "exactness/test_hybrids.py",
    "exactness/test_expert_routes.py",
    "exactness/test_latent_families.py",
    "exactness/test_hybrid_rollout.py",
    "kernels/test_attention.py",
    "structure/test_structure.py",
)
WAITING = (
    "rollout/integrations/test_verl_turns.py",
    *OF_ONE_CLUSTER,
    "exactness/test_fsdp.py",
    "benchmarks/test_gpu_day.py",
    "rollout/fleet/test_fleet.py",
    "rollout/fleet/test_fleet_restarts.py",
    "rollout/fleet/test_fleet_updates.py",
    "rollout/integrations/test_trl_async.py",
    "rollout/worker/test_worker_killed.py",
    "rollout/worker/test_worker_transports.py",
    "rollout/worker/test_worker_fairness.py",
    "weight_sync/test_distributed.py",
    "rollout/worker/test_worker_process.py",
    "rollout/integrations/test_verl_plugin.py",
)
"""Lists files that wait for processes half of their time or longer."""


def longest_first(items: list[pytest.Item]) -> None:
    """Bring tests into their order."""
    order = (*LONGEST, *WAITING)
    places = {TESTS / file: place for place, file in enumerate(order)}
    items.sort(key=lambda item: places.get(item.path, len(order)))


def share_a_cluster(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Say whether the cluster of one test is the next one's: of the same file, or of another that shares it."""
    if following is None:
        return False
    files = {item.path, following.path}
    return len(files) == 1 or files <= {TESTS / file for file in OF_ONE_CLUSTER}
