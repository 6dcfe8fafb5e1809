"""The recipe for verl, without verl: how it is started, and what is read of a run."""

import json
import math
from pathlib import Path

import pyarrow.parquet
import pytest

from samebit.recipes.chain_sum import problem_sets, working
from samebit.recipes.tiny_model import build_tokenizer
from samebit.recipes.verl_grpo import cases, matrix, mismatch, reward, run, shapes, task
from samebit.recipes.verl_grpo.launch import Run


def logged(folder: Path, steps: int, **metrics: float) -> None:
    """A run that ended well, whose first step had no gradient. metrics: of the last step."""
    folder.mkdir(parents=True)
    usual = dict.fromkeys(mismatch.MISMATCH, 0.0) | {
        matrix.TRAJECTORIES: 16,
        "samebit/on_policy/tokens": 10,
        "samebit/on_policy/tokens_differing": 0,
    }
    rows = [{"step": 0, "data": {"val-core/x": 1.0}}]
    for step in range(1, steps + 1):
        learned = {"training/global_step": step, "actor/grad_norm": step - 1.0}
        rows.append({"step": step, "data": {**learned, **usual, **(metrics if step == steps else {})}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "commit").write_text("abc")
    (folder / "exit").write_text("0")


def test_the_matrix_reads_what_runs_left(tmp_path: Path) -> None:
    def line(name: str, steps: int, **metrics: float) -> str:
        logged(tmp_path / name, steps, **metrics)
        return matrix.line(matrix.read(tmp_path / name, name, steps))

    assert line("a", 3) == "| a | 3 | 2 | 0 | 0.0 | 30 | 0 | abc |"
    assert not matrix.read(tmp_path / "a", "a", 3).is_bad
    differing = {mismatch.MISMATCH[2]: -0.5, "samebit/on_policy/tokens_differing": 2}
    assert line("b", 2, **differing) == "| b | 2 | 1 | 0 | 0.5 | 20 | 2 | abc |"
    older = {mismatch.MISMATCH[0]: 0.5, matrix.TRAJECTORIES: 12}
    assert line("c", 2, **older) == "| c | 2 | 1 | 1 | 0.0 | 20 | 0 | abc |"
    assert line("d", 1, **older) == "| d | 1 | 0 | 1 | - | 10 | 0 | abc |"
    (tmp_path / "c" / "exit").write_text("1")
    assert matrix.read(tmp_path / "c", "c", 2).state == matrix.FAILED
    assert matrix.read(tmp_path / "e", "e", 2).state == matrix.NOT_RUN
    table = matrix.table(tmp_path, 20)
    assert len([line for line in table.splitlines() if "not run" in line]) == len(matrix.cases())
    assert matrix._commit() != ""


def test_what_proves_nothing_fails_the_matrix(tmp_path: Path) -> None:
    """A number that is none, hidden behind one that is; nothing to compare; fewer steps than asked for."""
    logged(tmp_path / "nan", 2, **{mismatch.MISMATCH[1]: math.nan})
    assert matrix.read(tmp_path / "nan", "nan", 2).is_bad
    assert "nan" in matrix.line(matrix.read(tmp_path / "nan", "nan", 2)).split("|")[5]
    logged(tmp_path / "none", 1, **{"samebit/on_policy/tokens": 0, matrix.TRAJECTORIES: 0})
    assert matrix.read(tmp_path / "none", "none", 1).state == matrix.NOTHING_COMPARED
    logged(tmp_path / "short", 3)
    short = matrix.read(tmp_path / "short", "short", 20)
    assert (short.state, short.is_bad) == (matrix.ENDED_EARLY, True)
    every = cases.cases()
    assert every["sync-packed-fp32"].logged(20) == 20
    assert every["fully_async-packed-fp32"].logged(20) == 19
    assert every["fully_async-packed-fp32"].settings(5)["rollout.total_rollout_steps"] == 24
    assert every["sync-packed-fp32-resumed"].logged(20) == 10


def test_a_run_goes_on_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "build", lambda *_, **__: None)
    every = cases.cases()
    (name,) = [name for name, case in every.items() if case.resumes]
    made = matrix.prepared(name, every[name], tmp_path, 20)
    saved = tmp_path / "sync-packed-fp32-save" / "checkpoint" / "global_step_10"
    assert made.options["trainer.resume_from_path"] == saved
    assert every["sync-packed-fp32-save"].options["trainer.save_freq"] == 10
    hybrid = matrix.prepared("h", every["sync-packed-fp32-hybrid"], tmp_path, 20)
    assert (hybrid.data, made.data) == (tmp_path / "data-hybrid", tmp_path / "data")
    assert "one_step_off" in matrix.prepared("o", every["one_step_off-packed-fp32"], tmp_path, 20).command()[2]
    threads = matrix.prepared("t", every["sync-packed-fp32-two-threads"], tmp_path, 20)
    assert threads.options["actor_rollout_ref.rollout.custom.num_threads"] == 2
    assert (threads.environment()["OMP_NUM_THREADS"], made.environment()["OMP_NUM_THREADS"]) == ("2", "1")


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


def test_prompts_can_be_filled_up_with_examples() -> None:
    problems = problem_sets(0, 20, 2).training
    tokenizer = build_tokenizer()
    longer = task.with_examples(problems, 256)
    for index, (short, long) in enumerate(zip(problems, longer, strict=True)):
        following = problems[(index + 1) % len(problems)]
        assert long.prompt.endswith(working(following.prompt) + following.answer + "<eos>" + short.prompt)
        assert 200 < len(tokenizer(long.prompt).input_ids) <= 256
        assert long.answer == short.answer
    assert task.with_examples(problems, 0) == problems
    full = shapes.SHAPES["full"]
    assert full.prompt_tokens == full.options["data.max_prompt_length"]


def test_tables_of_a_run() -> None:
    rows = [dict.fromkeys(("step", *run.COLUMNS), value) for value in (9.0, 1.0, 2.0, 3.0)]
    assert run.table(rows).row_count == 4
    compared = run.comparison(rows, [{name: 10 * value for name, value in row.items()} for row in rows])
    assert list(compared.columns[3].cells) == ["10.00"] * 5


def test_a_comparison_is_of_the_full_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[shapes.Shape, str]] = []

    def build(self: shapes.Shape, folder: Path, architecture: str) -> None:
        built.append((self, folder.name))
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes.Shape, "build", build)
    for more in ([], ["--compare"], ["--compare", "--shape", "small"]):
        with pytest.raises(KeyboardInterrupt):
            run.main(["--out", str(tmp_path), *more])
    small, full = shapes.SHAPES.values()
    assert built == [(small, "data"), (full, "data-full"), (small, "data")]


def test_a_run_that_proves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes.Shape, "build", lambda *_: None)
    monkeypatch.setattr(run, "follow", lambda *_: 0)
    monkeypatch.setattr(run, "figure", lambda *_: None)
    for name, steps, metrics, says in (
        ("nothing", 0, {}, "nothing was compared"),
        ("nan", 3, {mismatch.MISMATCH[2]: math.nan}, "differ"),
        ("short", 3, {}, "after 3 of 4 steps"),
    ):
        logged(tmp_path / name, steps, **metrics)
        with pytest.raises(SystemExit, match=says):
            run.main(["--out", str(tmp_path / name), "--steps", "4"])
    run.main(["--out", str(tmp_path / "short"), "--steps", "3"])
