"""The recipe for verl is started as it should, and its runs are read as they should, without verl."""

import json
import math
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pyarrow.parquet
import pytest
from rich.console import Console

from samebit.benchmarks.verl_matrix import cases, matrix
from samebit.recipes.chain_sum import problem_sets, working
from samebit.recipes.tiny_model import build_tokenizer
from samebit.recipes.verl_grpo import mismatch, progress, reward, run, shapes, task
from samebit.recipes.verl_grpo.launch import Run

from ..patience import HANG


def logged(folder: Path, steps: int, **metrics: float) -> None:
    """Write what a run leaves that ended well, whose first step had no gradient. metrics: of the last step."""
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
    """The matrix fails where a number is none, hidden behind one that is, where nothing was compared, or where a run
    has fewer steps than asked for.
    """
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


def test_the_table_of_a_run() -> None:
    rows = [dict.fromkeys(("step", *run.COLUMNS), value) for value in (9.0, 1.0, 2.0, 3.0)]
    assert run.table(rows).row_count == 4


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[shapes.Shape, str]]:
    """List what is built, which is as far as a run gets here."""
    built: list[tuple[shapes.Shape, str]] = []

    def build(self: shapes.Shape, folder: Path, architecture: str) -> None:
        built.append((self, folder.name))
        raise KeyboardInterrupt

    monkeypatch.setattr(shapes.Shape, "build", build)
    return built


def test_each_shape_and_architecture_has_data_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: list[tuple[shapes.Shape, str]]
) -> None:
    monkeypatch.setattr(run, "look_at_options", lambda *_: 4)
    for more in ([], ["--shape", "full"], ["--architecture", "moe"], ["--shape", "full", "--architecture", "mla"]):
        with pytest.raises(KeyboardInterrupt):
            run.main(["--out", str(tmp_path), *more])
    small, full = shapes.SHAPES.values()
    assert built == [(small, "data"), (full, "data-full"), (small, "data-moe"), (full, "data-full-mla")]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("trainer.test_frq=4", r"verl has no option trainer\.test_frq, but trainer\.test_freq \(write \+NAME=VALUE"),
        ("trainer.test_freq", r"'trainer\.test_freq' is no option: write NAME=VALUE"),
        ("=4", "'=4' is no option"),
        ("~trainer.test_frq", r"no option trainer\.test_frq"),
        ("model_engine=veomny", "veomny"),
        ("algorithm.adv_estimator=gae", r"adv_estimator=gae.*set algorithm\.adv_estimator=grpo"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null", "ppo_micro_batch_size_per_gpu"),
    ],
)
def test_a_wrong_option_is_named_in_one_line_before_anything_is_built(
    tmp_path: Path, built: list[tuple[shapes.Shape, str]], word: str, says: str
) -> None:
    pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
    with pytest.raises(SystemExit, match=f"^error: .*{says}") as stopped:
        run.main(["--out", str(tmp_path), "--", word])
    assert "\n" not in str(stopped.value)
    assert not built


def test_options_travel_as_they_are_written(tmp_path: Path, built: list[tuple[shapes.Shape, str]]) -> None:
    pytest.importorskip("verl", reason="verl is not installed: pip install 'samebit[verl]'")
    words = (
        "trainer.test_freq=7",
        "trainer.total_training_steps=2",
        "+trainer.note=mine",
        "++actor_rollout_ref.rollout.custom.block_size=32",
        "~critic",
        "actor_rollout_ref.rollout.temperature=0.7",
    )
    with pytest.raises(KeyboardInterrupt):
        run.main(["--out", str(tmp_path), "--", *words])
    from samebit.recipes.verl_grpo import options

    asked = run.prepared("small", tmp_path, 16, words)
    assert asked.command()[-6:] == list(words)
    config = options.checked(asked)
    assert (config.trainer.test_freq, config.trainer.note, config.trainer.total_training_steps) == (7, "mine", 2)
    assert config.actor_rollout_ref.rollout.custom.block_size == 32
    assert run.look_at_options(asked, Console()) == 2
    for logger, ends in (("[console,wandb]", True), ("[file,wandb]", False), ("file", False)):
        given = run.prepared("small", tmp_path, 16, (f"trainer.logger={logger}",))
        with pytest.raises(SystemExit, match="lacks 'file'") if ends else nullcontext():
            run.look_at_options(given, Console())


def test_what_verl_does_before_its_first_step_is_told(tmp_path: Path) -> None:
    """Each stage before verl's first step is told once, on a line of its own, when its words are in the log."""
    words = list(progress.STAGES)
    log = [b"x\n" + words[0].encode() + b": {}\n" + words[1].encode()[:9], words[1].encode()[9:] + b"\n", b"noise\n"]
    log += [f"{words[3]} 1\n(pid=4) {words[4]} \xff\n".encode("latin-1"), words[2].encode() + b"\n"]
    watched = progress.Progress(tmp_path / "log.txt")
    assert watched.reached() == []
    seen = []
    for part in log:
        with (tmp_path / "log.txt").open("ab") as file:
            file.write(part)
        seen.append(watched.reached())
    told = list(progress.STAGES.values())
    assert seen == [[told[0]], [told[1]], [], [told[3], told[4]], []]


def test_a_run_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Run(tmp_path, tmp_path / "out")
    words = "\n".join(progress.STAGES)
    monkeypatch.setattr(Run, "command", lambda _: [sys.executable, "-c", f"print({words!r})"])
    assert run.follow(made, Console()) == 0
    said = capsys.readouterr().out
    assert all(f"s: {stage}" in said for stage in progress.STAGES.values())


def test_verl_ends_with_the_program_that_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Run(tmp_path, tmp_path / "out")
    started: list[subprocess.Popen[bytes]] = []
    start = Run.start

    def interrupted(self: progress.Progress) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "command", lambda _: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(Run, "start", lambda self: started.append(start(self)) or started[0])
    monkeypatch.setattr(progress.Progress, "reached", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.follow(made, Console())
    assert started[0].wait(HANG) == -signal.SIGTERM


def test_a_run_without_a_comparison_is_no_traceback(tmp_path: Path) -> None:
    """A run that compared nothing has no greatest difference, as with
    `algorithm.rollout_correction.bypass_mode=True`.
    """
    logged(tmp_path / "run", 2)
    made = Run(tmp_path, tmp_path / "run")
    steps = [{name: value for name, value in step.items() if name not in mismatch.MISMATCH} for step in made.steps()]
    assert mismatch.worst(steps) is None
    assert mismatch.worst(made.steps()) == 0.0


def test_a_run_that_proves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes.Shape, "build", lambda *_: None)
    monkeypatch.setattr(run, "follow", lambda *_: 0)
    monkeypatch.setattr(run, "look_at_options", lambda given, _: given.options["trainer.total_training_steps"])
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
