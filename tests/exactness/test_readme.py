"""The programs of README.md, docs/your-own-model.md and docs/structured-outputs.md run as they are there, and find
equal bits.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

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


def programs(page: str) -> list[str]:
    """Return the programs of a page, of which the first compares each sample."""
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert "assert torch.equal(recomputed.detach().cpu(), torch.tensor(sample.logprobs))" in found[0]
    return found


def run(source: str) -> str:
    command = [*python(), "-c", source]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=HANG).stdout


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_the_program_of_the_readme(device: str, tmp_path: Path) -> None:
    source = programs("README.md")[0]
    for name, value in (("NAME", str(build_folder(tmp_path / "model"))), ("DEVICE", device)):
        source, found = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", source, flags=re.MULTILINE)
        assert found == 1
    assert run(source)


def test_the_programs_over_your_own_model(tmp_path: Path) -> None:
    """The programs over your own model find equal bits: the loop over single samples, then all of them in one call,
    padded and packed.
    """
    folder = build_folder(tmp_path / "model")
    loop, batches = programs("docs/your-own-model.md")
    assert batches.count("token_logprobs(") == 2
    run(OWN.format(str(folder)) + loop + batches)


def test_the_program_of_structured_outputs(tmp_path: Path) -> None:
    """The program of structured outputs writes what its schema allows, and finds equal bits."""
    page = (ROOT / "docs/structured-outputs.md").read_text()
    [source] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source, found = re.subn(
        r"^NAME = .*$", f"NAME = {str(build_folder(tmp_path / 'model'))!r}", source, flags=re.MULTILINE
    )
    assert found == 1
    assert {int(line) for line in run(source).split()} <= {2, 3, 5, 7}
