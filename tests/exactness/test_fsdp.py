"""A bound model is exact under FSDP2, with gloo, in one process and in two."""

from pathlib import Path

import pytest

from ..campaign import CAMPAIGN, first_of
from ..forked import run_ranks
from ..patience import HANG

SCRIPT = Path(__file__).with_name("fsdp_rank.py")


@pytest.mark.soak
@pytest.mark.parametrize("world", first_of([2, 1]))
def test_a_sharded_model_gives_the_bits_of_the_whole_one(tmp_path: Path, world: int) -> None:
    codes, said = run_ranks(SCRIPT, world, tmp_path, str(world), str(CAMPAIGN), patience=HANG)
    assert codes == [0] * world, said
    assert said.count("all went well") == world
