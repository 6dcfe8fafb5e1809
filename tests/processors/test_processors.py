"""Tests hold on other processors too: some again in a process in which the libraries take this one for another.

OpenBLAS multiplies for NumPy, and so for Triton's interpreter; Numba compiles the kernels of the CPU. Under `make soak`
all tests of the kernels, otherwise a few.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

from ..campaign import CAMPAIGN, first_of, long
from ..patience import HANG

ROOT = Path(__file__).parents[2]
FEATURES = get_host_cpu_features()
HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt"}
OWN = ("PYTEST_", "SAMEBIT_TESTS_")
"""Begins the names of what belongs to this run of the tests: another has a server of forks of its own."""

INTERPRETED = ["tests/kernels/triton/test_tiles.py"] if find_spec("triton") else []
COMPILED = ["tests/kernels/test_numeric.py", "tests/kernels/test_rowwise.py"]
FEW = "(another_order and bfloat16) or numeric or (same_bits_in_every_call and rms_norm and dtype1)"


def run_tests(arguments: list[str], environment: dict[str, str], minutes: float) -> None:
    """Run tests one after the other in a process of their own; a variable that is empty is not there."""
    variables = os.environ | environment
    kept = {name: value for name, value in variables.items() if value and not name.startswith(OWN)}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # most of them take longer to load than the tests to run
    found = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-q", "-x", "-p", "no:cacheprovider", *arguments],
        env=kept,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 * minutes,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert " passed" in found.stdout


@pytest.mark.skipif(not FEATURES.get("avx2"), reason="this processor has no avx2")
def test_as_both_compute_on_a_haswell(tmp_path: Path) -> None:
    """A few tests of each kind pass as on a Haswell. Nothing comes from the cache of this processor's kernels, and
    nothing gets there.
    """
    environment = HASWELL | {"OPENBLAS_CORETYPE": "Haswell", "NUMBA_CACHE_DIR": str(tmp_path)}
    run_tests([*INTERPRETED, *COMPILED, "-k", FEW], environment, HANG / 60)


@pytest.mark.soak
@pytest.mark.parametrize("core", [*first_of(["Haswell"], 0), "Zen", "SkylakeX"])
def test_as_openblas_multiplies_on_other_processors(core: str) -> None:
    """A few tests pass that `test_as_both_compute_on_a_haswell` has too; under `make soak` all of Triton's."""
    pytest.importorskip("triton", reason="Triton is not installed")
    needed = "avx512f" if core == "SkylakeX" else "avx2"
    if not FEATURES.get(needed):
        pytest.skip(f"this processor has no {needed}")
    whole = ["tests/kernels/triton", "--deselect", "tests/kernels/triton/test_compile.py"]  # which multiplies nothing
    arguments = whole if CAMPAIGN else [*INTERPRETED, "-k", FEW]
    run_tests(arguments, {"OPENBLAS_CORETYPE": core}, 60 if CAMPAIGN else HANG / 60)


@long
@pytest.mark.skipif(not FEATURES.get("avx2"), reason="this processor has no avx2")
def test_as_numba_compiles_for_a_haswell(tmp_path: Path) -> None:
    arguments = ["tests/kernels", "--ignore", "tests/kernels/triton"]
    run_tests(arguments, HASWELL | {"NUMBA_CACHE_DIR": str(tmp_path)}, 60)


PLUGINS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
EMULATED = [
    *(f"tests/kernels/test_{name}.py" for name in ("linear", "experts", "latent", "sparse", "scored_head")),
    *(f"tests/exactness/test_{name}_layer.py" for name in ("attention", "delta", "latent", "sparse")),
    *(f"tests/exactness/test_{name}.py" for name in ("experts", "expert_blocks", "expert_calls", "latent_families")),
    *(f"tests/exactness/test_{name}.py" for name in ("rollout", "gradients", "prefix_cache", "step_call")),
]
"""Lists what is run as on processors with other products of bfloat16."""


def test_files_that_are_run_elsewhere_are_there() -> None:
    """Files that are run as on other processors are there. `make soak` alone runs all of them, and would be the first
    to notice that one has another name.
    """
    assert not [file for file in (*EMULATED, *COMPILED, *INTERPRETED) if not (ROOT / file).is_file()]


@pytest.mark.skipif(not FEATURES.get("avx2"), reason="this processor has no avx2")
def test_as_pairs_multiply(tmp_path: Path) -> None:
    """A few tests pass as on a processor with AVX-512 and instructions for bfloat16 (AVX512-BF16)."""
    environment = {"PYTHONPATH": os.pathsep.join(PLUGINS), "NUMBA_CACHE_DIR": str(tmp_path)}
    run_tests(["-p", "emulated_pairs", EMULATED[0], "-k", "few_rows and pairs and 129"], environment, HANG / 60)


@long
@pytest.mark.parametrize("plugin", ["emulated_tiles", "emulated_pairs"])
def test_as_other_processors_multiply_bfloat16(tmp_path: Path, plugin: str) -> None:
    """Kernels that multiply bfloat16 as other processors do pass, with emulated instructions; where a processor has
    them, tests of the kernels use them as they are.
    """
    environment = {"PYTHONPATH": os.pathsep.join(PLUGINS), "NUMBA_CACHE_DIR": str(tmp_path), "SAMEBIT_SOAK_CASES": ""}
    run_tests(["-p", plugin, *EMULATED, "-k", "tiles or pairs or bfloat16 or dtype1"], environment, 60)
