"""The floors of `samebit.kernels` hold: imports go down only, in one place to a device, and in no circle.

Every import counts: inside of functions and under TYPE_CHECKING too.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import samebit.kernels
from samebit.kernels.cpu import operations as cpu
from samebit.kernels.ops.dispatch import Operations

ROOT = Path(samebit.kernels.__file__).parent
PACKAGE = "samebit.kernels"
DISPATCH = f"{PACKAGE}.ops.dispatch"
BELOW = {
    "binding": {"binding", "ops", "layout"},
    "ops": {"ops", "layout"},
    "cpu": {"cpu", "layout", "openmp", "team"},
    "triton": {"triton", "layout"},
    "layout": {"layout"},
    "team": {"team"},
}
"""Names what each floor may import, itself included; `ops.dispatch` may import the devices too."""


@cache
def imports_of(path: Path) -> list[str]:
    return list(read_imports(path))


def read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> dict[str, set[str]]:
    """Return for each module of the package the modules that it imports."""
    paths = {".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = {one if one in names else one.rpartition(".")[0] for one in imports_of(path)}
        found[name] = {one for one in wanted if one in names} - {PACKAGE}
    return found


def floor_of(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.").split(".")[0]


def test_every_floor_imports_only_those_below_it() -> None:
    wrong = [
        f"{module} imports {one}"
        for module, wanted in modules().items()
        for one in wanted
        if (floor := floor_of(module)) in BELOW
        and floor_of(one) not in BELOW[floor] | ({"cpu", "triton"} if module == DISPATCH else set())
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = modules()
    assert len(graph) > 60
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_a_rollout_knows_no_device() -> None:
    rollout = ROOT.parent / "rollout"
    devices = tuple(f"{PACKAGE}.{name}" for name in ("cpu", "triton"))
    assert [path for path in rollout.rglob("*.py") if any(one.startswith(devices) for one in imports_of(path))] == []


@pytest.mark.parametrize("device", ["cpu", "triton"])
def test_a_device_has_all_operations_with_one_signature(device: str) -> None:
    if device == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
        from samebit.kernels.triton import operations as table
    else:
        table = cpu
    for name, wanted in inspect.getmembers(Operations, inspect.isfunction):
        if not name.startswith("_"):
            expected = list(inspect.signature(wanted).parameters)[1:]
            assert list(inspect.signature(vars(table)[name]).parameters) == expected, name
