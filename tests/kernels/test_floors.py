"""The floors of `samebit.kernels` hold: imports go down only, in one place to a device, and in no circle. And new
tensors name their device.

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
MAKERS = {
    f"torch.{name}"
    for name in (
        *("empty", "empty_strided", "full", "ones", "zeros", "tensor", "as_tensor", "asarray", "scalar_tensor"),
        *("arange", "eye", "linspace", "rand", "randint", "randn", "randperm", "tril_indices", "triu_indices"),
    )
}
"""Names functions that make a tensor on the device that a caller may have chosen for all of them."""


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


def test_a_new_tensor_names_its_device() -> None:
    """Otherwise it lies where the caller has new tensors made, and a kernel writes to an address of a GPU, or to 0."""
    calls = [(path, call) for path in ROOT.rglob("*.py") for call in calls_of_makers(ast.parse(path.read_text()))]
    assert len(calls) > 100
    assert [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path, call in calls
        if "device" not in [given.arg for given in call.keywords]
    ] == []


def calls_of_makers(tree: ast.AST) -> list[ast.Call]:
    names = MAKERS | renamed(tree)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]


def renamed(tree: ast.AST) -> set[str]:
    """Return other names of makers, as of ``empty = torch.empty if whole else torch.zeros``."""
    return {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)
        for name in node.targets
        if isinstance(name, ast.Name) and {ast.unparse(part) for part in ast.walk(node.value)} & MAKERS
    }


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
