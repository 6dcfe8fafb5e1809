"""Read, check and write the file of tile configurations.

    {"sm_90": {"tuned": null, "matmul": [ENTRY, ...], "attention": [ENTRY, ...]}, "default": ...}

A family is named by the compute capability of its GPUs; `DEFAULT` is for all that have no section. ``tuned`` says on
what the section was measured, null that its numbers are reasoned. Of a list the first entry that fits a layer counts;
every layer must fit one. A size that an entry is for is a number, a range ``[least, most]`` (``most`` null: no limit),
or left out: any.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from samebit.kernels.layout import device

DEFAULT = "default"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in sorted(device.DTYPES["cuda"], key=str)}
"""Lists the dtypes that entries name."""

LARGEST_HEAD = 256
"""The most elements of a head that attention on a GPU takes."""

_Entry = TypeVar("_Entry", "MatmulEntry", "AttentionEntry")


class TileFileError(ValueError):
    """Says what the file must not say."""


@dataclass(frozen=True)
class MatmulTile:
    """Makes a program compute ``rows x outputs`` and take ``depth`` of the inputs at once."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AttentionTile:
    """Makes a program compute ``rows`` (query tokens times the heads that share a KV head)."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Sizes:
    """Ranges from ``least`` to ``most``; None: no limit."""

    least: int = 1
    most: int | None = None

    def __contains__(self, size: int) -> bool:
        return self.least <= size and (self.most is None or size <= self.most)


@dataclass(frozen=True)
class Rung:
    """Gives calls of up to ``up_to_rows`` rows, and of more than the rung below has, a tile of their own."""

    up_to_rows: int
    tile: MatmulTile


@dataclass(frozen=True)
class MatmulEntry:
    """Gives layers of these sizes ``tile``, and calls of few rows the first rung of ``few`` that takes them."""

    dtypes: tuple[str, ...]
    tile: MatmulTile
    few: tuple[Rung, ...] = ()
    inputs: Sizes = Sizes()
    outputs: Sizes = Sizes()

    def for_rows(self, rows: int) -> MatmulTile:
        """Return the tile of a call of this many rows."""
        return next((rung.tile for rung in self.few if rows <= rung.up_to_rows), self.tile)

    def fits(self, inputs: int, outputs: int, dtype: str) -> bool:
        return dtype in self.dtypes and inputs in self.inputs and outputs in self.outputs


@dataclass(frozen=True)
class AttentionEntry:
    """Gives heads of these sizes ``tile`` in the forward, ``gradients`` in the backward: those of keys and values take
    ``keys`` where there is one."""

    dtypes: tuple[str, ...]
    tile: AttentionTile
    gradients: AttentionTile
    head_dim: Sizes = Sizes()
    keys: AttentionTile | None = None

    def fits(self, head_dim: int, dtype: str) -> bool:
        return dtype in self.dtypes and head_dim in self.head_dim


@dataclass(frozen=True)
class Family:
    """Holds the configurations for one kind of GPU."""

    tuned: str | None
    matmul: tuple[MatmulEntry, ...]
    attention: tuple[AttentionEntry, ...]

    def for_layer(self, inputs: int, outputs: int, dtype: str) -> MatmulEntry:
        return next(entry for entry in self.matmul if entry.fits(inputs, outputs, dtype))

    def for_heads(self, head_dim: int, dtype: str) -> AttentionEntry:
        return next(entry for entry in self.attention if entry.fits(head_dim, dtype))

    def with_entries(self, tuned: str, matmul: Iterable[MatmulEntry], attention: Iterable[AttentionEntry]) -> "Family":
        """Return a family with these first, and without those that were there for the same sizes and dtypes."""
        return Family(tuned, _before(tuple(matmul), self.matmul), _before(tuple(attention), self.attention))


Families = Mapping[str, Family]
"""Finds the family of a GPU by name; `DEFAULT` is one of them."""


def read_tiles(path: Path) -> Families:
    """Return what the file says.

    Raises:
        TileFileError: not what this module's docstring describes; names the entry, what it says, what is allowed.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise TileFileError(f"{path.name}: not JSON: {error}") from error
    if not isinstance(content, dict) or DEFAULT not in content:
        raise TileFileError(f"{path.name}: no family {DEFAULT!r}; allowed: an object of families, it among them")
    return {name: _family(f"{path.name}: {name}", part) for name, part in content.items()}


def write_tiles(path: Path, families: Families) -> None:
    """Write a file of which `read_tiles` gives the same."""
    sections = []
    for name, family in families.items():
        parts = [f'"tuned": {json.dumps(family.tuned)}']
        for kind, entries in (("matmul", family.matmul), ("attention", family.attention)):
            parts.append(f'"{kind}": [' + ",".join(f"\n      {_written(one)}" for one in entries) + "\n    ]")
        sections.append(f"  {json.dumps(name)}: {{\n    " + ",\n    ".join(parts) + "\n  }")
    path.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def _before(new: tuple[_Entry, ...], old: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    return new + tuple(one for one in old if not any(_same_layers(one, other) for other in new))


def _same_layers(one: _Entry, other: _Entry) -> bool:
    return replace(one, **_nothing_but_layers(other)) == one


def _nothing_but_layers(entry: MatmulEntry | AttentionEntry) -> dict[str, Any]:
    if isinstance(entry, MatmulEntry):
        return {"dtypes": entry.dtypes, "inputs": entry.inputs, "outputs": entry.outputs}
    return {"dtypes": entry.dtypes, "head_dim": entry.head_dim}


def _written(entry: MatmulEntry | AttentionEntry) -> str:
    """Write the layers on one line, each tile on another."""
    layers: dict[str, Any] = {}
    for name, value in _nothing_but_layers(entry).items():
        if not isinstance(value, Sizes):
            layers[name] = value
        elif value != Sizes():
            layers[name] = value.least if value.least == value.most else [value.least, value.most]
    lines: list[dict[str, Any]] = [layers, {"tile": asdict(entry.tile)}]
    if isinstance(entry, AttentionEntry):
        lines.append({"gradients": asdict(entry.gradients)})
        if entry.keys is not None:
            lines.append({"keys": asdict(entry.keys)})
    text = ",\n       ".join(json.dumps(line)[1:-1] for line in lines)
    if isinstance(entry, MatmulEntry) and entry.few:
        text += ',\n       "few": [' + ",\n               ".join(json.dumps(asdict(rung)) for rung in entry.few) + "]"
    return "{" + text + "}"


def _family(where: str, given: Any) -> Family:
    parts = _object(where, given, ("tuned", "matmul", "attention"))
    if parts["tuned"] is not None and not isinstance(parts["tuned"], str):
        raise TileFileError(f"{where}: tuned is {parts['tuned']!r}; allowed: on what it was measured, or null")
    family = Family(
        parts["tuned"],
        _entries(f"{where}: matmul", parts["matmul"], _matmul_entry),
        _entries(f"{where}: attention", parts["attention"], _attention_entry),
    )
    for dtype in DTYPES:
        if not any(dtype in one.dtypes and one.inputs == one.outputs == Sizes() for one in family.matmul):
            raise TileFileError(f"{where}: matmul: no entry for {dtype} of any inputs and outputs")
        for head_dim in range(1, LARGEST_HEAD + 1):
            if not any(one.fits(head_dim, dtype) for one in family.attention):
                raise TileFileError(f"{where}: attention: no entry for {dtype}, head_dim {head_dim}")
    return family


def _entries(where: str, given: Any, entry: Callable[[str, Any], _Entry]) -> tuple[_Entry, ...]:
    if not isinstance(given, list):
        raise TileFileError(f"{where}: {given!r}; allowed: a list of entries")
    found: list[_Entry] = []
    for number, part in enumerate(given, 1):
        found.append(entry(f"{where}: entry {number}", part))
        twin = next((at for at, other in enumerate(found[:-1], 1) if _same_layers(found[-1], other)), None)
        if twin is not None:
            raise TileFileError(f"{where}: entry {number} is for the same layers as entry {twin}; allowed: one")
    return tuple(found)


def _matmul_entry(where: str, given: Any) -> MatmulEntry:
    parts = _object(where, given, ("dtypes", "tile"), ("few", "inputs", "outputs"))
    return MatmulEntry(
        _dtypes(where, parts["dtypes"]),
        _matmul_tile(f"{where}: tile", parts["tile"]),
        _rungs(f"{where}: few", parts.get("few", [])),
        _sizes(f"{where}: inputs", parts.get("inputs", [1, None])),
        _sizes(f"{where}: outputs", parts.get("outputs", [1, None])),
    )


def _rungs(where: str, given: Any) -> tuple[Rung, ...]:
    if not isinstance(given, list):
        raise TileFileError(f"{where}: {given!r}; allowed: a list of objects of up_to_rows, tile")
    rungs = []
    for number, part in enumerate(given, 1):
        parts = _object(f"{where}: rung {number}", part, ("up_to_rows", "tile"))
        most = _count(f"{where}: rung {number}: up_to_rows", parts["up_to_rows"])
        rungs.append(Rung(most, _matmul_tile(f"{where}: rung {number}: tile", parts["tile"])))
    counts = [rung.up_to_rows for rung in rungs]
    if counts != sorted(set(counts)):
        raise TileFileError(f"{where}: up_to_rows {counts}; allowed: each more than the one before")
    return tuple(rungs)


def _attention_entry(where: str, given: Any) -> AttentionEntry:
    parts = _object(where, given, ("dtypes", "tile", "gradients"), ("head_dim", "keys"))
    return AttentionEntry(
        _dtypes(where, parts["dtypes"]),
        _attention_tile(f"{where}: tile", parts["tile"]),
        _attention_tile(f"{where}: gradients", parts["gradients"]),
        _sizes(f"{where}: head_dim", parts.get("head_dim", [1, None])),
        _attention_tile(f"{where}: keys", parts["keys"]) if "keys" in parts else None,
    )


def _matmul_tile(where: str, given: Any) -> MatmulTile:
    parts = _object(where, given, ("rows", "outputs", "depth", "warps", "stages"))
    sides = {name: _power_of_two(f"{where}: {name}", parts[name], 16) for name in ("rows", "outputs", "depth")}
    return MatmulTile(**sides, **_launch(where, parts))


def _attention_tile(where: str, given: Any) -> AttentionTile:
    parts = _object(where, given, ("rows", "warps", "stages"))
    return AttentionTile(_power_of_two(f"{where}: rows", parts["rows"], 16), **_launch(where, parts))


def _launch(where: str, parts: dict[str, Any]) -> dict[str, int]:
    return {
        "warps": _power_of_two(f"{where}: warps", parts["warps"], 1),
        "stages": _count(f"{where}: stages", parts["stages"]),
    }


def _object(where: str, given: Any, needed: tuple[str, ...], more: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(given, dict) or not set(needed) <= set(given) <= {*needed, *more}:
        said = list(given) if isinstance(given, dict) else repr(given)
        may = f", and may have {', '.join(more)}" if more else ""
        raise TileFileError(f"{where}: {said}; allowed: an object of {', '.join(needed)}{may}")
    return given


def _dtypes(where: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(one in DTYPES for one in given):
        raise TileFileError(f"{where}: dtypes {given!r}; allowed: a list of some of {', '.join(DTYPES)}")
    return tuple(given)


def _sizes(where: str, given: Any) -> Sizes:
    if isinstance(given, list) and len(given) == 2:
        least = _count(where, given[0])
        if given[1] is None or _count(where, given[1]) >= least:
            return Sizes(least, given[1])
    elif not isinstance(given, list):
        return Sizes(_count(where, given), given)
    raise TileFileError(f"{where}: {given!r}; allowed: a number, or [least, most] with most null for no limit")


def _count(where: str, given: Any) -> int:
    if type(given) is not int or given < 1:
        raise TileFileError(f"{where}: {given!r}; allowed: a whole number from 1 on")
    return given


def _power_of_two(where: str, given: Any, least: int) -> int:
    if _count(where, given) < least or given & (given - 1):
        raise TileFileError(f"{where}: {given}; allowed: a power of two from {least} on")
    return int(given)
