"""Read problems from a user's file: parquet, or JSON Lines, with the text columns `prompt` and `answer`."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet

from samebit.recipes.problem import Problem, ProblemSets

COLUMNS = ("prompt", "answer")


def load(path: Path) -> list[Problem]:
    """Return all rows in the file's order. Raises `ValueError` with the file and the row that can not be used."""
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of file '{path.suffix}', expected .parquet or .jsonl")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    problems = [_problem(row, f"{path}, row {number}") for number, row in enumerate(readers[path.suffix](path), 1)]
    if not problems:
        raise ValueError(f"{path}: no rows")
    return problems


def problem_sets(path: Path, seed: int, held_out: int) -> ProblemSets:
    """Hold out at most `held_out` prompts, and at most a fifth of them; return the rest in the order of `seed`."""
    problems = load(path)
    prompts = sorted({problem.prompt for problem in problems})
    random.Random(0).shuffle(prompts)
    kept_back = set(prompts[: min(held_out, len(prompts) // 5)])
    if not kept_back:
        raise ValueError(f"{path}: {len(prompts)} different prompts are too few, at least 5 are needed")
    training = [problem for problem in problems if problem.prompt not in kept_back]
    random.Random(seed).shuffle(training)
    return ProblemSets(training, [problem for problem in problems if problem.prompt in kept_back])


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    names = pyarrow.parquet.read_schema(path).names
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ValueError(f"{path}: no column {_quoted(missing)} (there are {_quoted(names)})")
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path, columns=list(COLUMNS)).to_pylist()
    return rows


def _jsonl_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, row {number}: not JSON ({error})") from error
    return rows


def _problem(row: dict[str, Any], where: str) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object with {_quoted(COLUMNS)}")
    missing = [name for name in COLUMNS if name not in row]
    if missing:
        raise ValueError(f"{where}: no column {_quoted(missing)} (there are {_quoted(row)})")
    for name in COLUMNS:
        if not isinstance(row[name], str) or not row[name]:
            raise ValueError(f"{where}: '{name}' is {row[name]!r}, not a text")
    return Problem(row["prompt"], row["answer"])


def _quoted(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)
