"""The program of docs/images.md runs as it stands, on a small model and a processor in the real format."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("trl")

from .trl_vision_model import picture, vision_folder

PAGE = Path(__file__).parents[3] / "docs/images.md"


def test_the_program_of_the_page(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert program is not None
    text, count = re.subn(r'^NAME = ".*"$', f"NAME = {str(vision_folder(tmp_path, 'Qwen2'))!r}", program[1], flags=re.M)
    assert count == 1
    known: dict[str, object] = {"picture": picture(40, 24, seed=1)}
    exec(compile(text, str(PAGE), "exec"), known)
    assert known["sample"].logprobs  # type: ignore[attr-defined]
