"""Give the settings under which a recipe runs in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from samebit.recipes.settings import OnPolicy

TINY: dict[str, Any] = {
    "steps": 2,
    "prompts": 4,
    "samples": 4,
    "max_tokens": 12,
    "held_out": 8,
    "eval_every": 2,
    "warmup_cap": 2,
    "warmup_mixed": 1,
    "max_num_seqs": 32,
    "kv_cache_gb": 0.05,
    "lr": 1e-3,
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Give the maker of such settings: `tiny(out, kind=OnPolicy, **changes)`."""

    def make(out: Path, kind: type[Any] = OnPolicy, **changes: Any) -> Any:
        return kind(out=out, **{**TINY, **changes})

    return make


@pytest.fixture
def pictures_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run draw its picture but not render it, which takes longer than two steps of training."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: None)
