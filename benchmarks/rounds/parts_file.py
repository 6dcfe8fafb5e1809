"""Keep the figures of a long measurement part by part, so that one that was cut off goes on where it was."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebit.benchmarks.rounds.turns import Spread


class PartsFile:
    """Holds the JSON of a benchmark whose `meta.parts` describes each part that is done; without a path nothing.

    `{"meta": {"parts": {"name": {...}}}, "metrics": {"name": {"value", "min", "max"}}}`
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.content: dict[str, Any] = {"meta": {"parts": {}}, "metrics": {}}
        if path is not None and path.exists():
            self.content = json.loads(path.read_text())

    @property
    def metrics(self) -> dict[str, Spread]:
        return {name: Spread(**value) for name, value in self.content["metrics"].items()}

    def missing(self, names: list[str]) -> list[str]:
        """Return those of these parts that are not done."""
        return [name for name in names if name not in self.content["meta"]["parts"]]

    def add(self, name: str, about: dict[str, Any], metrics: dict[str, Spread]) -> None:
        """Add a part that is done, and write: a reader sees the file before or after, never in between."""
        self.content["meta"]["parts"][name] = about
        self.content["metrics"] |= {metric: asdict(value) for metric, value in metrics.items()}
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self.content, indent=2) + "\n")
            os.replace(unfinished, self._path)
