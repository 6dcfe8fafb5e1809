"""In which order the files of tests run, and which of them run in the same process.

`make test` gives whole files to some processes as these become free. The files that take longest come first, as the
last one to run should be short. The very first compiles nearly all kernels of the CPU; those beside it need none, the
next ones many. Files that need a cluster of Ray share one: they run one after the other in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OF_ONE_CLUSTER = ("rollout/integrations/test_ray.py", "rollout/fleet/test_ray_fleet.py", "recipes/test_sync.py")
LONGEST = (
    "exactness/test_check.py",
    "kernels/triton/test_ssm.py",
    "kernels/triton/test_ssm_backward.py",
    "kernels/triton/test_attention.py",
    "rollout/integrations/test_verl_turns.py",
    "benchmarks/test_benchmarks.py",
    *OF_ONE_CLUSTER,
    "exactness/test_hybrids.py",
    "exactness/test_expert_routes.py",
    "exactness/test_latent_families.py",
    "exactness/test_hybrid_rollout.py",
    "exactness/test_fsdp.py",
    "kernels/test_attention.py",
    "structure/test_structure.py",
    "rollout/worker/test_worker_killed.py",
    "rollout/worker/test_worker_process.py",
    "weight_sync/test_distributed.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Bring tests into their order."""
    places = {TESTS / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


def share_a_cluster(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Say whether the cluster of one test is the next one's: of the same file, or of another that shares it."""
    if following is None:
        return False
    files = {item.path, following.path}
    return len(files) == 1 or files <= {TESTS / file for file in OF_ONE_CLUSTER}
