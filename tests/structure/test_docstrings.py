"""A docstring is a sentence, which can be read without the name of what it describes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .imports import PACKAGES, ROOT

NO_BEGINNING = re.compile(
    "(after|also|among|and|as|at|before|behind|beside|between|but|by|else|for|from|in|nor|of|on|or|than|under|until"
    r"|where|which|whose|with|within|without)\b",
    re.IGNORECASE,
)
"""Matches words with which the end of a sentence begins whose subject and verb would be the name."""


def test_a_docstring_is_a_sentence() -> None:
    """No docstring begins as the end of a sentence does: "Of a scan." says nothing without a name before it."""
    files = [path for folder in (*PACKAGES, "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [(path, *docstring) for path in files for docstring in _docstrings(path)]
    assert len(found) > 5000, "the docstrings were not found"
    broken = [(path, line, text) for path, line, text in found if NO_BEGINNING.match(text)]
    assert not [f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}" for path, line, text in broken]


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a file: its own, those of classes and of functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
