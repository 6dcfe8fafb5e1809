"""Log a run: its numbers in metrics.jsonl, one JSON object a step, some samples in samples.jsonl, both on a board.

Invariant: a run that is killed, or whose disk is full, loses at most the row that was being written.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

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
        metrics, samples = folder / "metrics.jsonl", folder / "samples.jsonl"
        for path in (metrics, samples):
            _begin(path, resumed=resumed)
        self.rows: list[Row] = _lines(metrics)
        self._kind = kind
        self._file, self._samples = _to_append(metrics), _to_append(samples)
        self._board: tuple[int, Board] | None = None

    def forget_after(self, seed: int, step: int) -> None:
        """Drop the rows and samples of a seed behind the step at which it goes on: they will be written again."""
        self._file = _forget(self._file, seed, step)
        self._samples = _forget(self._samples, seed, step)
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
        self._board_of(seed, step).show(step, values, "\n\n".join(_shown(sample) for sample in samples))

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        self._samples.close()
        self._close_board()

    def _board_of(self, seed: int, step: int) -> Board:
        """Return the seed's board, with the others closed: while a run of wandb is open `wandb.init` returns it.

        step: is shown next.
        """
        if self._board is None or self._board[0] != seed:
            self._close_board()
            self._board = seed, board(self._kind, self.folder, seed, step)
        return self._board[1]

    def _close_board(self) -> None:
        if self._board is not None:
            (_, open_board), self._board = self._board, None
            open_board.close()


def _begin(path: Path, *, resumed: bool) -> None:
    """Leave no rows of an earlier run; or all, but for the half one of a run that ended while it wrote."""
    known = path.read_bytes() if resumed and path.is_file() else b""
    path.touch()
    os.truncate(path, known.rfind(b"\n") + 1)


def _to_append(path: Path) -> TextIO:
    return path.open("a", encoding="utf-8")


def _forget(file: TextIO, seed: int, step: int) -> TextIO:
    """Replace a file by one without what is behind a seed's step; return it, opened to append to."""
    path = Path(file.name)
    rows = _lines(path)
    kept = [row for row in rows if row["seed"] != seed or row["step"] <= step]
    if len(kept) == len(rows):
        return file
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    new.replace(path)
    file.close()
    return _to_append(path)


def _lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as file:  # of bytes: `str.splitlines` would cut at separators that JSON leaves in texts
        for number, line in enumerate(file, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:  # also what is not UTF-8
                raise ValueError(f"{path}, row {number}: not JSON ({error})") from error
    return rows


def _shown(sample: dict[str, Any]) -> str:
    return "  \n".join(f"**{name}** {value}" for name, value in sample.items())
