"""The recipe for verl, without verl: how it is started, and what is read of a run."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from samebit.recipes.chain_sum import problem_sets
from samebit.recipes.verl_grpo import matrix, reward, run, task
from samebit.recipes.verl_grpo.launch import Run


def logged(folder: Path, steps: int, **metrics: float) -> None:
    """A run that ended well."""
    folder.mkdir(parents=True)
    usual = dict.fromkeys(matrix.MISMATCH, 0.0) | {
        "samebit/on_policy/tokens": 10,
        "samebit/on_policy/tokens_differing": 0,
        "training/off_policy/trajectory_staleness_worst/max": 0,
    }
    rows = [{"step": 0, "data": {"val-core/x": 1.0}}]
    rows += [{"step": i + 1, "data": {"training/global_step": i + 1, **usual, **metrics}} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "exit").write_text("0")


def test_the_matrix_reads_what_runs_left(tmp_path: Path) -> None:
    logged(tmp_path / "a", 3)
    assert matrix.read(tmp_path / "a", "a") == matrix.Result("a", steps=3, tokens=30)
    assert matrix.line(matrix.read(tmp_path / "a", "a")) == "| a | 3 | 0 | 0.0 | 30 | 0 |"
    logged(tmp_path / "b", 2, **{matrix.MISMATCH[2]: -0.5, "samebit/on_policy/tokens_differing": 2})
    assert matrix.line(matrix.read(tmp_path / "b", "b")) == "| b | 2 | 0 | 0.5 | 20 | 4 |"
    logged(tmp_path / "c", 2, **{matrix.MISMATCH[0]: 0.5, "training/off_policy/trajectory_staleness_worst/max": 1})
    assert matrix.line(matrix.read(tmp_path / "c", "c")) == "| c | 2 | 2 | 0.0 | 20 | 0 |"
    (tmp_path / "c" / "exit").write_text("1")
    assert matrix.read(tmp_path / "c", "c").state == matrix.FAILED
    assert matrix.read(tmp_path / "d", "d").state == matrix.NOT_RUN
    assert len([line for line in matrix.table(tmp_path, 20).splitlines() if "not run" in line]) == len(matrix.cases())


def test_the_matrix_covers_its_grid() -> None:
    names = list(matrix.cases())
    for mode in ("sync", "colocate_async"):
        for packing in ("padded", "packed", "dynamic", "micro4"):
            assert {f"{mode}-{packing}-{dtype}" for dtype in ("fp32", "bf16")} <= set(names)


def test_how_verl_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    made = Run(tmp_path, tmp_path / "out", {"a.b": True, "a.c": None, "a.d": "text", "a.e": 0.7, "a.f": ["x"]})
    assert made.command()[-5:] == ["++a.b=true", "++a.c=null", "++a.d=text", "++a.e=0.7", '++a.f=["x"]']
    environment = made.environment()
    assert "CUDA_VISIBLE_DEVICES" not in environment, "empty, it would tell Ray that there are no slots"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert made.steps() == []


def test_problems_in_verls_columns(tmp_path: Path) -> None:
    task.save_problems(problem_sets(0, 3, 2), tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 3
    assert rows[0]["prompt"][0]["content"].endswith("=")
    assert reward.compute_score("chain_sum", "[1+2=3]3", "3") == 1.0
    assert reward.compute_score("chain_sum", "3<eos>", "3") == 1.0
    assert reward.compute_score("chain_sum", "[1+2=3", "3") == 0.0


def test_tables_of_a_run() -> None:
    rows = [dict.fromkeys(("step", *run.COLUMNS), value) for value in (9.0, 1.0, 2.0, 3.0)]
    assert run.table(rows).row_count == 4
    compared = run.comparison(rows, [{name: 10 * value for name, value in row.items()} for row in rows])
    assert list(compared.columns[3].cells) == ["10.00"] * 5
