"""Rounded samplers differ from the trainer as they should, and arms of the study end, go on and are shown."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from samebit.benchmarks.mismatch_study import figure, study
from samebit.benchmarks.mismatch_study.arms import ARMS
from samebit.benchmarks.mismatch_study.samplers import rounded
from samebit.recipes.settings import OnPolicy

from ..campaign import long


@pytest.mark.parametrize(("bits", "dtype"), [(7, torch.bfloat16), (10, torch.float16)])
def test_weights_are_rounded_as_torch_rounds_them(bits: int, dtype: torch.dtype) -> None:
    values = torch.cat([torch.randn(4096, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, -1.0, 0.0])])
    halfway = (
        values.to(dtype).float() + torch.nextafter(values.to(dtype), values.new_tensor(9.0).to(dtype)).float()
    ) / 2
    for given in (values, halfway):
        normal = given[given.abs() > 1e-3]
        assert torch.equal(rounded(normal, bits), normal.to(dtype).float())
    assert torch.equal(rounded(values, 23), values)


def test_an_arm_is_held_against_the_exact_runs_of_its_own_seeds(tmp_path: Path) -> None:
    """An arm is compared with the exact runs of its own seeds: a hard seed alone looks worse beside all seeds."""
    exact = {seed: {0: 0.2, 10: level, 20: level, 30: level} for seed, level in ((0, 0.5), (1, 0.9))}
    arm = {0: {0: 0.2, 10: 0.1, 20: 0.4, 30: 0.6}}
    for name, runs in (("exact", exact), ("4-bits-clipped", arm)):
        lines = [
            json.dumps({"seed": seed, "step": step, "val/accuracy": value})
            for seed, values in runs.items()
            for step, value in values.items()
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    found = figure.paired_table(tmp_path)
    cells = [[*column.cells] for column in found.columns]
    assert cells == [["4-bits-clipped"], ["1"], ["30"], ["+0.100"], ["+0.000"]]


@long
def test_the_arms_of_a_study(tmp_path: Path) -> None:
    settings = OnPolicy(
        out=tmp_path, steps=3, prompts=4, samples=4, held_out=20, eval_every=2, warmup_cap=20, warmup_mixed=4,
        save_every=2, max_num_seqs=16,
    )  # fmt: skip
    names = ("exact", "exact-other-draws", "7-bits-clipped", "2-bits-truncated")
    study.run(settings, [ARMS[name] for name in names])
    runs = figure.read(tmp_path)
    assert sorted(runs) == sorted(names)
    for name, rows in runs.items():
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
        differing = sum(row["training/tokens_differing"] for row in rows[1:])
        assert (differing == 0) == ARMS[name].exact
    assert runs["exact"][0]["val/accuracy"] == runs["2-bits-truncated"][0]["val/accuracy"], "one policy, one judge"
    assert runs["exact"][1]["reward/mean"] != runs["exact-other-draws"][1]["reward/mean"]
    sizes = [runs[name][1]["training/rollout_logprobs_diff_mean"] for name in names[2:]]
    assert 0 < 3 * sizes[0] < sizes[1]
    study.run(settings, [ARMS["exact"]])
    assert figure.read(tmp_path)["exact"] == runs["exact"], "what is finished is not run again"
    assert (tmp_path / "study.png").stat().st_size > 0
    with (tmp_path / "table").open("w") as out:
        Console(width=150, file=out).print(figure.table(tmp_path))
    assert "2-bits-truncated" in (tmp_path / "table").read_text()
