"""Log a run: its numbers in metrics.jsonl, one JSON object a step, some samples in samples.jsonl, both on a board."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebit.recipes.boards import Board, board
from samebit.weight_sync.closing import Closing

Row = dict[str, float]


class MetricsLog(Closing):
    """Owns `folder`/metrics.jsonl and samples.jsonl, and what shows them; `rows` is what was written.

    resumed: go on with the files of an earlier run instead of starting anew.
    """

    def __init__(self, folder: Path, kind: str = "tensorboard", *, resumed: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rows: list[Row] = _lines(folder / "metrics.jsonl") if resumed else []
        self._kind = kind
        mode = "a" if resumed else "w"
        self._file = (folder / "metrics.jsonl").open(mode, encoding="utf-8")
        self._samples = (folder / "samples.jsonl").open(mode, encoding="utf-8")
        self._boards: dict[int, Board] = {}

    def forget_after(self, seed: int, step: int) -> None:
        """Drop the rows and samples of a seed behind the step at which it goes on: they will be written again."""
        for file in (self._file, self._samples):
            rows = _lines(Path(file.name))
            kept = [row for row in rows if row["seed"] != seed or row["step"] <= step]
            if len(kept) < len(rows):
                file.truncate(0)
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
                file.flush()
        self.rows = _lines(Path(self._file.name))

    def write(self, seed: int, step: int, values: Row, samples: Sequence[dict[str, Any]] = ()) -> None:
        """Append one row, and samples; readers see them at once."""
        row: Row = {"seed": seed, "step": step, **values}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for sample in samples:
            self._samples.write(json.dumps({"seed": seed, "step": step, **sample}, ensure_ascii=False) + "\n")
        self._samples.flush()
        self._board(seed).show(step, values, "\n\n".join(_shown(sample) for sample in samples))

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        self._samples.close()
        for one in self._boards.values():
            one.close()

    def _board(self, seed: int) -> Board:
        if seed not in self._boards:
            self._boards[seed] = board(self._kind, self.folder, seed)
        return self._boards[seed]


def _lines(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:  # `str.splitlines` would cut at separators that JSON leaves in texts
        return [json.loads(line) for line in file]


def _shown(sample: dict[str, Any]) -> str:
    return "  \n".join(f"**{name}** {value}" for name, value in sample.items())
