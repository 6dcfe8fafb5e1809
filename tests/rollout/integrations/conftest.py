"""Share what tests of TRL's trainers need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep TRL from sending word of the run."""
    monkeypatch.setenv("CI", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random model in the format of Qwen3."""
    from .trl_model import qwen3_folder  # brings TRL

    return qwen3_folder(tmp_path_factory.mktemp("qwen3"))
