"""Read problems from a user's file (parquet, or JSON Lines) or from a data set of the Hugging Face hub.

Two text columns are read, `prompt` and `answer` unless others are named.
"""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet

from samebit.recipes.problem import MARKER, Problem, ProblemSets

Columns = tuple[str, str]
COLUMNS: Columns = ("prompt", "answer")

_OF_FILES = (".csv", ".tsv", ".txt", ".json", ".arrow", ".gz", ".zip", ".zst")
"""Lists endings that say of a name that it is a file's; other dots are in names of the hub too."""


def load(
    source: str | Path, columns: Columns = COLUMNS, split: str = "train", answer_after: str = MARKER
) -> list[Problem]:
    """Return all rows in their order.

    Args:
        source: a file, or a data set of the hub, NAME or NAME:CONFIG.
        columns: of the prompt and of the answer.
        split: of a data set of the hub.
        answer_after: the part of an answer behind the last of these counts, where there is one. No answer may end with
            one: of completions, too, what is behind it counts.

    Raises:
        ValueError: the file or data set, and the row, that can not be used.
    """
    readers = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    path = Path(source)
    if path.suffix in readers:
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        rows = readers[path.suffix](path, columns)
    elif isinstance(source, Path) or path.exists() or path.suffix in _OF_FILES:
        raise ValueError(f"{path}: unknown kind of file '{path.suffix}', expected .parquet or .jsonl")
    else:
        rows = _hub_rows(source, columns, split)
    problems = [_problem(row, f"{source}, row {number}", columns, answer_after) for number, row in enumerate(rows, 1)]
    if not problems:
        raise ValueError(f"{source}: no rows")
    return problems


def problem_sets(
    path: str | Path,
    seed: int,
    held_out: int,
    columns: Columns = COLUMNS,
    split: str = "train",
    answer_after: str = MARKER,
) -> ProblemSets:
    """Hold out at most `held_out` prompts, and at most a fifth of them; return the rest in the order of `seed`."""
    problems = load(path, columns, split, answer_after)
    prompts = sorted({problem.prompt for problem in problems})
    random.Random(0).shuffle(prompts)
    kept_back = set(prompts[: min(held_out, len(prompts) // 5)])
    if not kept_back:
        raise ValueError(f"{path}: {len(prompts)} different prompts are too few, at least 5 are needed")
    training = [problem for problem in problems if problem.prompt not in kept_back]
    random.Random(seed).shuffle(training)
    return ProblemSets(training, [problem for problem in problems if problem.prompt in kept_back])


def _hub_rows(source: str, columns: Columns, split: str) -> list[dict[str, Any]]:
    import datasets

    name, _, config = source.partition(":")
    try:
        found = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: no such file, and as a data set of the hub: {error}") from error
    _check_columns(source, columns, found.column_names)
    rows: list[dict[str, Any]] = found.select_columns(list(columns)).to_list()
    return rows


def _parquet_rows(path: Path, columns: Columns) -> list[dict[str, Any]]:
    _check_columns(path, columns, pyarrow.parquet.read_schema(path).names)
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path, columns=list(columns)).to_pylist()
    return rows


def _check_columns(source: str | Path, columns: Columns, names: list[str]) -> None:
    missing = [name for name in columns if name not in names]
    if missing:
        raise ValueError(f"{source}: no column {_quoted(missing)} (there are {_quoted(names)})")


def _jsonl_rows(path: Path, _: Columns) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:  # `str.splitlines` would cut at separators that JSON leaves in texts
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, row {number}: not JSON ({error})") from error
    return rows


def _problem(row: dict[str, Any], where: str, columns: Columns, answer_after: str) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object with {_quoted(columns)}")
    missing = [name for name in columns if name not in row]
    if missing:
        raise ValueError(f"{where}: no column {_quoted(missing)} (there are {_quoted(row)})")
    for name in columns:
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{where}: '{name}' is {row[name]!r}, not a text")
    prompt, answer = row[columns[0]], row[columns[1]].strip()
    kept = answer.rpartition(answer_after)[2].strip() or answer
    if answer_after in kept:  # of a completion, no text behind the last of these has one
        raise ValueError(
            f"{where}: no completion could earn the answer {answer!r}, which ends with {answer_after!r}: only what "
            "stands behind the last of these counts. Name another mark by --answer-after, one that no answer ends with"
        )
    return Problem(prompt, kept)


def _quoted(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)
