"""Send a seed's numbers and texts to where a user watches them: TensorBoard, or Weights & Biases."""

from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

BOARDS = ("tensorboard", "wandb")


class Board(Protocol):
    """Shows the metrics of one seed."""

    def show(self, step: int, values: dict[str, float], text: str) -> None:
        """Show a step; `text` is empty for steps without samples to show."""

    def close(self) -> None:
        """Finish the files."""


def board(kind: str, folder: Path, seed: int, step: int) -> Board:
    """Return the board of a seed. Raises ValueError where what it needs is not installed.

    step: the first that it will show. What an earlier run in this folder has shown of it and of later ones goes.
    """
    return _TensorBoard(folder, seed, step) if kind == "tensorboard" else _Wandb(folder, seed)


class _TensorBoard:
    def __init__(self, folder: Path, seed: int, step: int) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard" / f"seed{seed}"), purge_step=step)

    def show(self, step: int, values: dict[str, float], text: str) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if text:
            self._writer.add_text("samples", text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, seed: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--log-to wandb needs wandb: pip install wandb") from error
        self._run: Any = wandb.init(project="samebit", name=f"{folder.name}-seed{seed}", dir=str(folder))

    def show(self, step: int, values: dict[str, float], text: str) -> None:
        self._run.log({**values, "samples": text} if text else dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
