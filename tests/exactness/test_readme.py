"""The programs that README.md and docs/your-own-model.md begin with run as they are there, and find equal bits."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ..forks import python
from ..patience import HANG
from ..rollout.http.served import build_folder

ROOT = Path(__file__).parents[2]
OWN = """
from torch import optim
from transformers import AutoModelForCausalLM
policy = AutoModelForCausalLM.from_pretrained({!r})
prompts = [[1, 2, 3], [4, 5]]
steps = 2
optimizer = optim.SGD(policy.parameters(), 0.1)
def reward(sample):
    return len(set(sample.token_ids))
"""
"""Defines what the loop takes as given."""


def program(page: str) -> str:
    """The first of a page."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    assert "assert torch.equal(recomputed.detach(), torch.tensor(sample.logprobs))" in found[1]
    return found[1]


def run(source: str) -> str:
    command = [*python(), "-c", source]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG).stdout


def test_the_program_of_the_readme(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model")
    source, names = re.subn(r"^NAME = .*$", f"NAME = {str(folder)!r}", program("README.md"), flags=re.MULTILINE)
    assert names == 1
    assert run(source)


def test_the_loop_over_your_own_model(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model")
    run(OWN.format(str(folder)) + program("docs/your-own-model.md"))
