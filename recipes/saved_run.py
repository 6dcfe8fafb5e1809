"""Save a run between two steps, and go on with it: the policy's folder, the optimizer, and the number of steps done.

Invariant: a checkpoint is there as a whole or not at all; the one before stays until then, and is put back where a run
was killed while it made way.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from samebit.recipes import tiny_model

_POLICY, _STATE = "policy", "state.pt"


@dataclass(frozen=True)
class SavedRun:
    """Names the checkpoint of a seed."""

    folder: Path

    @property
    def policy(self) -> Path:
        return self.folder / _POLICY

    def steps_done(self) -> int:
        """Return 0 where there is no checkpoint."""
        self._put_back()
        done: int = self._state()["step"] if self.folder.is_dir() else 0
        return done

    def save(
        self, step: int, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, optimizer: torch.optim.Optimizer
    ) -> None:
        """Replace the checkpoint by that of this step."""
        self._put_back()
        new, old = self._new, self._old
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        tiny_model.save(policy, tokenizer, new / _POLICY)
        torch.save({"step": step, "optimizer": optimizer.state_dict()}, new / _STATE)
        if self.folder.is_dir():
            self.folder.rename(old)
        new.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def forget(self) -> None:
        """Remove the checkpoint, and what an interrupted `save` has left."""
        self._put_back()
        for leftover in (self._old, self._new):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        if self.folder.is_dir():
            self.folder.rename(self._new)  # at once: half of it would be taken for a checkpoint
            shutil.rmtree(self._new)

    def holds(self, path: Path) -> bool:
        """Return whether a path is in the checkpoint."""
        return any(path.resolve().is_relative_to(one.resolve()) for one in (self.folder, self._old, self._new))

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of the same parameters the state that was saved."""
        optimizer.load_state_dict(self._state()["optimizer"])

    @property
    def _old(self) -> Path:
        return self.folder.with_suffix(".old")

    @property
    def _new(self) -> Path:
        return self.folder.with_suffix(".new")

    def _put_back(self) -> None:
        """Put the checkpoint before back, if no newer one took its place: it is known to be whole and on the disk."""
        if self._old.is_dir() and not self.folder.is_dir():
            self._old.rename(self.folder)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.folder / _STATE, map_location="cpu", weights_only=True)
        return state
