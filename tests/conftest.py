"""Ray as all tests of a process use it: on the loopback interface, without a token in the home folder. And Triton's
interpreter where there is no GPU, and TRL without its warning of what is experimental.

They read this when they are imported (torch does not import Triton); Ray remembers the token from then on.

Kernels of the CPU take one thread of Numba's, as processes of tests share the cores; what other counts must not
change is tested with them (`THREADS`). So do torch's operations: Numba's pool, as it starts, tells OpenMP of as many
as there are cores, whatever OMP_NUM_THREADS says. Where processes share these, two threads take ten times as long.

Python's garbage collector waits until all is imported, and passes over that from then on. It collects seldom, as in
processes that tests start (started/sitecustomize.py).

The files that take longest come first: `make test` gives whole files to some processes, and the last one to run should
be short. The very first compiles nearly all kernels of the CPU; those beside it need none, the next ones many.
"""

import gc
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch

from . import forks

os.environ.setdefault("RAY_AUTH_TOKEN", "of-the-tests")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes before somebody has work for them
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
numba.set_num_threads(1)
torch.set_num_threads(1)
gc.disable()

TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS / "started")])
forks.share()
LONGEST = (
    "exactness/test_check.py",
    "kernels/triton/test_ssm.py",
    "kernels/triton/test_ssm_backward.py",
    "kernels/triton/test_attention.py",
    "rollout/integrations/test_verl_turns.py",
    "benchmarks/test_benchmarks.py",
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


@pytest.fixture
def ray_python() -> str:
    """What starts the workers of Ray, as forks."""
    return shlex.join(forks.python())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with nothing that outlives the tests of a module."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"py_executable": shlex.join(forks.python())},
            _temp_dir=temporary,
        )
        yield
        ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {TESTS / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()
