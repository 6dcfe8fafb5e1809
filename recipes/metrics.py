"""Log a run's numbers: one JSON object a step in metrics.jsonl, and TensorBoard."""

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from samebit.weight_sync.closing import Closing

Row = dict[str, float]


class MetricsLog(Closing):
    """Owns `folder`/metrics.jsonl, which it starts anew, and `folder`/tensorboard; `rows` is what was written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self.folder = folder
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._boards: dict[int, SummaryWriter] = {}

    def write(self, seed: int, step: int, values: Row) -> None:
        """Append one row; readers see it at once."""
        row: Row = {"seed": seed, "step": step, **values}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        board = self._board(seed)
        for name, value in values.items():
            board.add_scalar(name, value, step)
        board.flush()

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        for board in self._boards.values():
            board.close()

    def _board(self, seed: int) -> SummaryWriter:
        if seed not in self._boards:
            self._boards[seed] = SummaryWriter(str(self.folder / "tensorboard" / f"seed{seed}"))
        return self._boards[seed]
