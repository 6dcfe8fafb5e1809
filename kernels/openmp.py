"""Set up the OpenMP threads of torch and Numba: one pool where possible, and no idle one beside a busy one.

Torch brings its own copy of libgomp and Numba takes the system's. With both in a process, the idle workers
of one pool hold the cores that the other wants: 17.4 ms against 14.6 ms for the GEMMs and the attention of
a decode step on two cores. The loader gives torch the copy that is already there when the soname is the
same, so it is enough to load Numba's first: samebit does, where it is imported before torch.

Where the system has no libgomp, torch's own copy is loaded first: it serves a Numba that asks for it by its soname.
Numba's own wheels ask for the file, so there the error says how to let it stand in.

Within a pool, libgomp counts the workers of every Python thread, idle ones too, and lets them all sleep at
once when they are more than the cores: 8.4 ms against 5.1 ms for the GEMMs of a decode step in a second
thread. So a thread that is about to wait gives its workers up (`release_idle_threads`).

Numba allows the thread in which its pool starts parallel operations inside of parallel ones. Those of torch in that
thread, mostly the trainer's, then start and end threads all the time: Hugging Face's `generate` took 1.45 times as
long. It also gives their operations as many threads as there are in the pool, whatever OMP_NUM_THREADS or torch said:
where processes share the cores, ten times the time. So the pool is started by `start_pool`, which undoes both.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from samebit.kernels.openmp_runtimes import VARIABLES, on_all_places, runtimes

with on_all_places():  # Numba counts the processors of the thread that imports it
    import numba

ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "4000", "NUMBA_THREADING_LAYER": "omp"}
"""Read when OpenMP and Numba are loaded: idle threads soon sleep, after a spin that is long enough for the gaps between
the operations of a step; Numba's thread pool is of the kind that several Python threads may call."""

_PAUSE_SOFT = 1


def process_environment(num_threads: int) -> dict[str, str]:
    """Return what a process that computes with this count of threads needs in its environment before it loads torch."""
    return {**ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads), "NUMBA_NUM_THREADS": str(num_threads)}


def require_linux() -> None:
    """Refuse other systems: threads, their places and the memory that is left are looked after as on Linux alone.

    Raises:
        ImportError: this is another one.
    """
    if not sys.platform.startswith("linux"):
        raise ImportError(
            f"samebit runs on Linux, on x86-64; this system is {sys.platform!r}: use a Linux machine, a virtual one or "
            "a container of Linux"
        )


def load_openmp(load: Callable[[], object], copies: Callable[[], list[Path]]) -> None:
    """Load Numba's OpenMP layer; where it finds no libgomp, with one of the copies that torch brings along.

    Args:
        load: imports the layer; may be called again.
        copies: lists libraries that may stand in.

    Raises:
        ImportError: none of them is what the layer asks for.
    """
    try:
        load()
        return
    except ImportError as error:
        missing = error
    given = copies()
    for copy in given:
        ctypes.CDLL(str(copy), mode=ctypes.RTLD_GLOBAL)
        try:
            load()
            return
        except ImportError as error:
            missing = error
    remedy = "install your system's libgomp package (Debian: libgomp1)"
    if given:
        remedy += (
            f", or let torch's copy stand in, before Python starts: mkdir -p ~/.local/lib/gomp && ln -sf {given[0]} "
            "~/.local/lib/gomp/libgomp.so.1 && ln -sf libgomp.so.1 ~/.local/lib/gomp/libgomp.so.1.0.0 && "
            "export LD_LIBRARY_PATH=~/.local/lib/gomp"
        )
    raise ImportError(f"samebit needs an OpenMP runtime for Numba ({missing}): {remedy}") from missing


def _copies_of_torch() -> list[Path]:
    """List the libgomp files that torch was installed with, without importing it."""
    found = find_spec("torch")
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    places = [place for folder in folders for place in (folder / "lib", folder.with_name("torch.libs"))]
    return [path for place in places for path in sorted(place.glob("libgomp*.so*"))]


def require_openmp() -> None:
    """Make OpenMP Numba's threading layer: the others abort when two Python threads call kernels at once.

    Raises:
        ImportError: Numba already runs another layer in this process.
    """
    numba.config.THREADING_LAYER = "omp"
    try:
        running = numba.threading_layer()
    except ValueError:  # no parallel kernel has run yet: the setting above decides
        return
    if running != "omp":
        raise ImportError(
            f"samebit needs Numba's 'omp' threading layer, but this process already runs {running!r}: "
            "import samebit before other parallel Numba code, or set NUMBA_THREADING_LAYER=omp"
        )


@cache
def start_pool() -> None:
    """Start Numba's pool unless it runs. Parallel operations of the calling thread keep their number of threads, and
    none holds another one."""
    counts = [runtime.omp_get_max_threads() for runtime in runtimes()]
    numba.get_num_threads()
    for runtime, count in zip(runtimes(), counts, strict=True):
        runtime.omp_set_num_threads(count)
        runtime.omp_set_max_active_levels(1)


def release_idle_threads() -> None:
    """End the OpenMP workers of the calling thread; its next parallel operation starts new ones (0.1 to 1 ms)."""
    for runtime in runtimes():
        runtime.omp_pause_resource_all(_PAUSE_SOFT)


def num_threads() -> int:
    """Return how many threads a kernel that the calling thread runs may use.

    The number of `numba.get_num_threads`, which looks under two locks first whether the pool has started.
    """
    start_pool()
    found: int = _threads_of_pool()
    return found


def _warn_of_few_threads(wanted: int) -> None:
    """Say which variables had bound this thread to a place before Numba, imported by others, counted its processors."""
    counted = numba.config.NUMBA_NUM_THREADS
    if counted >= wanted or "NUMBA_NUM_THREADS" in os.environ:
        return
    named = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    warnings.warn(
        f"kernels have {counted} of the {wanted} processors that OpenMP computes on: {named} had bound the thread that "
        "imported numba. Import samebit before numba, or set NUMBA_NUM_THREADS",
        RuntimeWarning,
        stacklevel=2,
    )


require_linux()
with on_all_places() as _places:  # for a copy of libgomp that is loaded here
    load_openmp(lambda: import_module("numba.np.ufunc.omppool"), _copies_of_torch)
require_openmp()
_warn_of_few_threads(len(_places))
_threads_of_pool = ctypes.CFUNCTYPE(ctypes.c_int)(import_module("numba.np.ufunc.omppool").get_num_threads)
