"""Set up for all tests Ray, on the loopback interface, without a token in the home folder; Triton's interpreter where
there is no GPU; and TRL without its warning of what is experimental.

They read this when they are imported (torch does not import Triton); Ray remembers the token from then on.

Kernels of the CPU take one thread of Numba's, as processes of tests share the cores; what other counts must not
change is tested with them (`THREADS`). So do torch's operations: Numba's pool, as it starts, tells OpenMP of as many
as there are cores, whatever OMP_NUM_THREADS says. Where processes share these, two threads take ten times as long.

Python's garbage collector waits until all is imported, and passes over that from then on, as over what files of tests
have left: TRL and benchmarks collect on their own, and would go through all of it each time. It collects seldom, as in
processes that tests start (started/sitecustomize.py).

What is installed is looked up once: transformers and TRL would both go through all of it.

No example of Hypothesis has a deadline: 200 milliseconds, by default, in which another process may have the cores.
"""

from . import ending  # noqa: F401  (before all others)

# isort: split
import gc
import importlib.metadata
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from . import forks
from .order import longest_first, share_a_cluster
from .rewriting import rewrite_asserts

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
if find_spec("hypothesis") is not None:  # tests of a GPU run without it
    from hypothesis import settings

    settings.register_profile("without a deadline", settings(), deadline=None)
    settings.load_profile("without a deadline")
importlib.metadata.packages_distributions = cache(importlib.metadata.packages_distributions)

TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS / "started")])
forks.share()
_cluster = ExitStack()
MANY_OBJECTS = 50_000
"""Is the number of objects that take long enough to go through to be seen: 0.02 seconds."""


@pytest.fixture
def ray_python() -> str:
    """Return the command that starts the workers of Ray, which are forks."""
    return shlex.join(forks.python())


@pytest.fixture(scope="module")
def cluster() -> None:
    """Share a Ray in which nothing outlives the tests of a module, nor of those after it on this cluster."""
    import ray

    if ray.is_initialized():
        return
    temporary = _cluster.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"py_executable": shlex.join(forks.python())},
        _temp_dir=temporary,
    )
    _cluster.callback(ray.shutdown)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if not share_a_cluster(item, nextitem):
        _cluster.close()
    if (nextitem is None or nextitem.path != item.path) and len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from .scheduling import Scheduling

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start pytest-xdist's processes as forks. While the server of these loads, this process has nothing to do."""
    for spec in specs:
        spec.python = shlex.join(forks.python())
    if not sys.dont_write_bytecode:
        rewrite_asserts(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()
