"""A bound model under FSDP2, with gloo, in one process and in two."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..campaign import first_of
from ..patience import HANG

SCRIPT = Path(__file__).with_name("fsdp_rank.py")


@pytest.mark.parametrize("world", first_of([2, 1]))
def test_a_sharded_model_gives_the_bits_of_the_whole_one(tmp_path: Path, world: int) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(rank), str(world)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=HANG)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    assert all("all went well" in text for text in said)
