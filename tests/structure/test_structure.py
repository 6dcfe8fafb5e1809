"""The house keeps its shape: imports go one way, no circles, and no folder or file is too large to take in."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import settings

from .imports import (
    PACKAGES,
    ROOT,
    Import,
    attributes_of,
    find_cycles,
    imports_by_folder,
    module_files,
    parameters_of,
    read_imports,
)

# Per package: its rooms, from the ground up. A module imports from its own floor and from those below it.
FLOORS = {
    "samebit": ["kernels weight_sync", "rollout", "recipes", "benchmarks"],
    "samebit.kernels": ["openmp_runtimes", "openmp team", "layout", "cpu triton", "ops", "binding"],
    "samebit.rollout": [
        "errors checks guard keys publishing",
        "structured_outputs",
        "config sampling_params",
        "requests outputs",
        "cache drafts",
        "engine memory",
        "runner stats",
        "models adapters self_test",
        "control",
        "worker_interface build",
        "worker",
        "async_worker",
        "audit fleet",
        "integrations",
        "cli",
    ],
    "samebit.weight_sync": [
        "arithmetic closing manifest report folder_names digest",
        "source apply quantized adapter_names sleeping",
        "in_place",
        "wire",
        "transports",
        "opened_update",
    ],
}
CIRCLES = {
    "samebit.kernels.binding: *": "the plan names the layers of all kinds, and these name what it gives",
    "samebit.kernels.triton: activation layers matmul tiles": "tiles are chosen by proofs, which run the kernels",
    "samebit.rollout.integrations: http ray": "a server's replicas are actors; Ray Serve runs the app of the server",
    "samebit.rollout.integrations.http: metrics openai service": "the service holds what these count and remember",
    "samebit.rollout.integrations.verl: patches server": "patches reach the replicas; a replica asks for the patches",
}
"""Names rooms of a folder that import each other, though none of their modules do, each with the reason."""
DISPATCH = "samebit.kernels.ops.dispatch"  # the one place where a device's implementations are chosen
PRODUCT = ("samebit.kernels*", "samebit.rollout*", "samebit.weight_sync*")
SCRIPTS = ("benchmarks", "recipes")  # each of their modules is a command of its own: they may be many
MOST_MODULES = 12
MOST_LINES = 400
MOST_PARAMETERS = 12
MOST_ATTRIBUTES = 12
LONG_FUNCTIONS = {
    "samebit.kernels.triton.*": "a kernel of Triton takes each pointer, stride and constant by itself",
}
"""Names functions that may have more parameters, each with the reason."""
LARGE_CLASSES = {
    "samebit.rollout.config.RolloutConfig": "flat options, with the names that the field has for them",
    "samebit.rollout.sampling_params.SamplingParams": "flat options, with the names that the field has for them",
    "samebit.rollout.integrations.http.settings.ServeSettings": "options of a command line",
    "samebit.rollout.integrations.http.openai.requests.*": "bodies of requests, which pydantic reads",
    "samebit.rollout.integrations.verl.options.ServerOptions": "options that verl has flat too",
    "samebit.rollout.outputs.SampleOutput": "what a user reads of a sample",
    "samebit.kernels.layout.device_layout.DeviceLayout": "arrays of one call on a device, which Triton's kernels take",
}
"""Names classes that may have more attributes, each with the reason."""


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    found = read_imports()
    assert len(found) > 500, "the imports were not found"
    return found


def test_no_modules_import_each_other(imports: list[Import]) -> None:
    assert not find_cycles(imports)


def test_no_rooms_import_each_other(imports: list[Import]) -> None:
    """Rooms are the modules of a folder and its folders. What is a circle no more leaves the list too."""
    circles = {
        f"{folder}: {' '.join(room.rpartition('.')[2] for room in circle)}"
        for folder, inside in imports_by_folder(imports).items()
        for circle in find_cycles(inside)
    }
    assert not {circle for circle in circles if not any(fnmatch(circle, known) for known in CIRCLES)}
    assert not {known for known in CIRCLES if not any(fnmatch(circle, known) for circle in circles)}


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_down(imports: list[Import], package: str) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms.split()}
    rooms = [(found, _room(found.source, package), _room(found.target, package)) for found in imports]
    known = [(found, source, target) for found, source, target in rooms if source and target]
    assert not {room for _, *both in known for room in both} - set(floor), "a room without a floor"
    assert not [str(found) for found, source, target in known if floor[source] < floor[target]]


def test_only_the_dispatch_knows_the_devices(imports: list[Import]) -> None:
    devices = ("samebit.kernels.cpu*", "samebit.kernels.triton*")
    product = [found for found in imports if any(fnmatch(found.source, package) for package in PRODUCT)]
    neutral = [found for found in product if not any(fnmatch(found.source, device) for device in devices)]
    named = [found for found in neutral if any(fnmatch(found.target, device) for device in devices)]
    assert not [str(found) for found in named if found.source != DISPATCH]


def test_the_devices_do_not_know_each_other(imports: list[Import]) -> None:
    devices = ("samebit.kernels.cpu", "samebit.kernels.triton")
    for one, other in (devices, devices[::-1]):
        assert not [str(x) for x in imports if _within(x.source, one) and _within(x.target, other)]


def test_layers_share_a_call_only_where_adapters_are_known() -> None:
    """`linears` and `gated_linears` know nothing of adapters beside a model: `projections` does."""
    users = {name for name, path in module_files().items() if re.search(r"\b(gated_)?linears\(", path.read_text())}
    contracts = {"samebit.kernels.ops.linear", "samebit.kernels.ops.layers.gated"}
    assert users == contracts | {"samebit.kernels.binding.lora.forwards"}


def test_no_folder_is_too_large_to_take_in() -> None:
    modules = Counter(path.parent for path in module_files().values() if path.stem != "__init__")
    ours = {folder: count for folder, count in modules.items() if folder.relative_to(ROOT).parts[0] not in SCRIPTS}
    assert not {str(folder): count for folder, count in ours.items() if count > MOST_MODULES}


def test_no_module_is_too_long() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in module_files().items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


@pytest.mark.parametrize(
    ("count_in", "most", "exempt"),
    [(parameters_of, MOST_PARAMETERS, LONG_FUNCTIONS), (attributes_of, MOST_ATTRIBUTES, LARGE_CLASSES)],
    ids=["parameters", "attributes"],
)
def test_nothing_has_more_parts_than_a_reader_holds(
    count_in: Callable[[Path], Iterator[tuple[str, int]]], most: int, exempt: dict[str, str]
) -> None:
    product = {name: path for name, path in module_files().items() if any(fnmatch(name, one) for one in PRODUCT)}
    counts = [(f"{name}.{part}", count) for name, path in product.items() for part, count in count_in(path)]
    assert len(counts) > 500, "the parts were not found"
    large = {name: count for name, count in counts if count > most}
    assert not {name: count for name, count in large.items() if not any(fnmatch(name, one) for one in exempt)}


def test_no_example_of_hypothesis_has_a_deadline() -> None:
    """Hypothesis sets no deadline, as another process may have the cores for longer than any."""
    assert settings().deadline is None


def test_every_folder_says_what_lives_there() -> None:
    folders = {path.parent for path in module_files().values()}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").read_text().startswith('"""')]


def test_every_room_says_what_it_imports_and_names_what_is_in_it(imports: list[Import]) -> None:
    """Each room, a folder of more than two, names what is in it and the folders outside of it that it imports from, and
    nothing that neither its modules import nor those of the rooms inside.
    """
    files = module_files()
    names = {part for name in files for part in name.split(".")}
    pairs = {(_folder(found.source, files), _folder(found.target, files)) for found in imports}
    unsaid = {}
    for room, parts in _rooms(files).items():
        docstring = ast.get_docstring(ast.parse(files[room].read_text())) or ""
        words = _quoted(docstring)
        ways = {_way(room, target) for source, target in pairs if source == room}
        missing = parts - words
        missing |= {".".join(way) for way in ways if way and not words.intersection(way)}
        missing |= set() if re.search(r"\bimport", docstring, re.IGNORECASE) else {"imports"}
        reached = {x.target for x in imports if _within(x.source, room) and not _within(x.target, room)}
        known = {part for module in (room, *reached) for part in module.split(".")}
        vain = _said_to_be_imported(docstring) & names - known
        if missing or vain:
            unsaid[room] = [*sorted(missing), *(f"{word} (said in vain)" for word in sorted(vain))]
    assert not unsaid


@dataclass(frozen=True)
class Loaded:
    """Holds what a process in the root found that has loaded the kernels, and then the worker, without an install.

    Attributes:
        transformers: whether the kernels loaded transformers.
        file: where `samebit.rollout` lies.
        kernels_package: whether transformers takes our `kernels` for another package.
        twice: what was loaded under its bare name.
    """

    transformers: bool
    file: str
    kernels_package: bool
    twice: list[str]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    script = (
        "import json, sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'ditable' not in repr(finder)]\n"
        "sys.path_hooks[:] = [hook for hook in sys.path_hooks if 'ditable' not in repr(hook)]\n"
        "import samebit.kernels.ops.linear\n"
        "transformers = 'transformers' in sys.modules\n"
        "from samebit.rollout import RolloutWorker\n"
        "from transformers.utils import is_kernels_available\n"
        "twice = [name for name in sys.modules if name.split('.')[0] in sys.argv[1:] and '.' in name]\n"
        "print(json.dumps([transformers, sys.modules['samebit.rollout'].__file__, is_kernels_available(), twice]))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE, timeout=600)
    return Loaded(*json.loads(done.stdout.splitlines()[-1]))


def test_a_checkout_works_in_its_root_without_an_install(loaded: Loaded) -> None:
    """`samebit.*` is found through the links in `samebit/`; transformers does not take our `kernels` for another."""
    assert loaded.file.startswith(str(ROOT))
    assert not loaded.kernels_package
    assert not loaded.twice


def test_kernels_load_without_transformers(loaded: Loaded) -> None:
    """Kernels load without transformers, which takes longer to load than torch."""
    assert not loaded.transformers


def _room(module: str, package: str) -> str | None:
    """Return the part of `package` that holds `module`; None outside it, and for the package's own `__init__`."""
    return module[len(package) + 1 :].split(".")[0] if module.startswith(f"{package}.") else None


def _rooms(files: dict[str, Path]) -> dict[str, set[str]]:
    """Return the folders that hold more than two modules or folders, with their names; commands are no room's parts."""
    parts: dict[str, set[str]] = {}
    for name in files:
        room, _, part = name.rpartition(".")
        parts.setdefault(room, set()).add(part)
    scripts = {f"samebit.{package}" for package in SCRIPTS}
    return {room: held for room, held in parts.items() if len(held) > 2 and room not in {"samebit", *scripts}}


def _quoted(text: str) -> set[str]:
    """Return the words between backticks."""
    return {word for quoted in re.findall("`([^`]+)`", text) for word in re.split(r"\W+", quoted)}


def _said_to_be_imported(docstring: str) -> set[str]:
    """Return the words between backticks that follow "imports" in a sentence, up to what it says of no import."""
    behind = r"\bimports?\b(.+?)(?:\.\s|$|\b(?:nothing|none|no|knows?|but)\b)"
    said = re.findall(behind, docstring, flags=re.IGNORECASE | re.DOTALL)
    return set[str]().union(*map(_quoted, said))


def _folder(module: str, files: dict[str, Path]) -> str:
    return module if files[module].stem == "__init__" else module.rpartition(".")[0]


def _way(room: str, folder: str) -> tuple[str, ...]:
    """Return the steps to `folder` from where it parts from `room`; none to `room`, into it, or to what holds it."""
    if _within(folder, room) or _within(room, folder):
        return ()
    steps = tuple(zip_longest(room.split("."), folder.split(".")))
    parting = next(number for number, (here, there) in enumerate(steps) if here != there)
    return tuple(there for _, there in steps[parting:] if there is not None)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
