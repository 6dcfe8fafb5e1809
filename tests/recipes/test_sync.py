"""A run has the same bits however `--sync` lets the weights get to the worker."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from samebit.recipes import grpo, sampling

pytest.importorskip("ray")

Tiny = Callable[..., Any]
STEPS = 4
DEPENDS_ON_THE_CLOCK = ("perf/", "sync/sent_bytes")


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith(DEPENDS_ON_THE_CLOCK)} for row in rows]


@pytest.fixture(scope="module", autouse=True)
def rewarded() -> Iterator[None]:
    """Reward something that samples of a model that can do nothing differ in; and draw no pictures,
    which take as long.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, path, **options: None)
        patch.setattr(sampling, "reward", lambda text, finished, problem, *_: len(set(text)) / 10)
        yield


@pytest.fixture(scope="module")
def shared(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, grpo.run(tiny(folder, steps=STEPS))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", ["copy", "shm"])
def test_a_run_is_the_same_bit_for_bit(
    tiny: Tiny, way: str, shared: tuple[Path, list[dict[str, float]]], tmp_path: Path
) -> None:
    folder, expected = shared
    rows = grpo.run(tiny(tmp_path, steps=STEPS, sync=way))
    assert without_times(rows) == without_times(expected)
    steps = [row for row in rows if row["step"]]
    assert [row["weight_version"] for row in steps] == list(range(STEPS))
    assert all(row["training/tokens_compared"] > 16 and row["training/tokens_differing"] == 0 for row in steps)
    assert {row["actor/ratio_max"] for row in steps} == {1.0}
    assert all(row["actor/grad_norm"] > 0 and row["sync/changed_tensors"] > 30 for row in steps)
    assert all((row["sync/sent_bytes"] > 0) == (way == "shm") for row in steps)
    ours, theirs = (load_file(path / "seed0" / "policy" / "model.safetensors") for path in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
