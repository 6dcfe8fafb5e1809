"""Read the imports of the packages from their source: which module names which, at any depth of a file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("benchmarks", "kernels", "recipes", "rollout", "weight_sync")


@dataclass(frozen=True)
class Import:
    """Says that module `source` names module `target`, in line `line` of its file."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def module_files() -> dict[str, Path]:
    """Return the file of each module of the packages, by the module's full name."""
    return {_name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def read_imports() -> list[Import]:
    """Return every import of one of our modules by another, those in functions and under TYPE_CHECKING included."""
    files = module_files()
    return [
        Import(source, target, line)
        for source, path in files.items()
        for target, line in sorted(set(_targets(ast.parse(path.read_text()), files)))
        if target != source
    ]


def find_cycles(imports: Iterable[Import]) -> list[list[str]]:
    """Return the groups of modules that import each other, largest first (Tarjan's strongly connected components)."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        graph.setdefault(found.source, set()).add(found.target)
        graph.setdefault(found.target, set())
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for module in graph:
        if module not in index:
            visit(module)
    return sorted(cycles, key=len, reverse=True)


def imports_by_folder(imports: Iterable[Import]) -> dict[str, list[Import]]:
    """Return the imports between the rooms of each folder: its modules, and its folders with all that is in them."""
    folders: dict[str, list[Import]] = {}
    for found in imports:
        source, target = found.source.split("."), found.target.split(".")
        depth = next((at for at, (here, there) in enumerate(zip(source, target, strict=False)) if here != there), None)
        if depth is not None:  # otherwise one holds the other
            ends = (".".join(source[: depth + 1]), ".".join(target[: depth + 1]))
            folders.setdefault(".".join(source[:depth]), []).append(Import(*ends, found.line))
    return folders


def parameters_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function of a file, with the number of its parameters (without `self` or `cls`).

    Instructions of LLVM (`intrinsic`) are left out: one takes what the instruction takes.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_intrinsic(node):
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield node.name, len([name for name in names if name not in ("self", "cls")])


def attributes_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each class of a file, with the number of attributes that it declares or that its methods set."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            declared = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and _is_name(one.target)}
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield node.name, len(declared.union(*map(_attributes_set_in, methods)))


def _is_intrinsic(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "intrinsic" for one in node.decorator_list)


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def _attributes_set_in(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("samebit", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _targets(tree: ast.Module, files: dict[str, Path]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names if name.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("samebit"):
            for name in node.names:
                submodule = f"{node.module}.{name.name}"
                yield submodule if submodule in files else node.module, node.lineno
