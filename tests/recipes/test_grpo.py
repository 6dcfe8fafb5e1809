"""The recipe trains from end to end, two steps of it, on the real engine."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from samebit.recipes import experiment, grpo, report, tiny_model
from samebit.recipes.metrics import MetricsLog, Row
from samebit.recipes.problem import Problem
from samebit.recipes.saved_run import SavedRun

pytestmark = pytest.mark.usefixtures("pictures_not_rendered")
"""Leaves pictures out, but for the run of `out`, which is made before the first test."""

Tiny = Callable[..., Any]
STEPS = 2
EVERY_STEP = {
    "seed",
    "step",
    "weight_version",
    "reward/mean",
    "reward/share_with_working",
    "training/rollout_probs_diff_max",
    "training/rollout_logprobs_diff_max",
    "training/tokens_compared",
    "training/tokens_differing",
    "actor/loss",
    "actor/grad_norm",
    "actor/lr",
    "response_length/mean",
    "response_length/max",
    "response_length/clip_ratio",
    "perf/output_tokens_per_second",
    "perf/time_generate",
    "perf/time_train",
    "perf/time_logprobs",
}
EVALUATION = {"val/accuracy", "val/share_with_working", "val/problems"}


@pytest.fixture(scope="module")
def out(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    grpo.run(tiny(folder, seeds=2))
    return folder


def rows_of(folder: Path) -> list[dict[str, float]]:
    return lines_of(folder / "metrics.jsonl")


def lines_of(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_one_row_a_step_with_the_names_of_the_field(out: Path) -> None:
    rows = rows_of(out)
    assert [(row["seed"], row["step"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for row in rows:
        if row["step"] > 0:
            assert row.keys() >= EVERY_STEP
            assert row["weight_version"] == row["step"] - 1
        if row["step"] in (0, 2):
            assert row.keys() >= EVALUATION
            assert row["val/problems"] == 8


def test_every_sampled_token_has_the_trainers_bits(out: Path) -> None:
    steps = [row for row in rows_of(out) if row["step"] > 0]
    assert len(steps) == 2 * STEPS
    for row in steps:
        assert row["training/tokens_compared"] >= 16
        assert row["training/tokens_differing"] == 0
        assert row["training/rollout_logprobs_diff_max"] == 0.0
        assert row["training/rollout_probs_diff_max"] == 0.0


def test_pictures_events_and_models_are_written(out: Path) -> None:
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    for seed in (0, 1):
        assert list((out / "tensorboard" / f"seed{seed}").glob("events.*"))
        assert (out / f"seed{seed}" / "warm" / "model.safetensors").is_file()
        assert (out / f"seed{seed}" / "policy" / "model.safetensors").is_file()


def test_the_report_is_of_these_rows(out: Path) -> None:
    rows = rows_of(out)
    tokens = sum(row.get("training/tokens_compared", 0) for row in rows)
    assert report.table(rows).row_count == 4
    assert report.verdict(rows) == (f"max |rollout logprob - trainer logprob| = 0.0: 0 of {tokens:,} tokens differ")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("learned", [{0}, set()])
def test_a_run_off_policy_in_which_a_seed_learned_nothing_has_its_picture(
    learned: set[int], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run off policy has its picture even where no group of a seed has an advantage, and so no ratios."""
    drawn: list[list[int]] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append([len(one.lines) for one in self.axes]))
    rows = [{**row, "staleness/max": 1, "staleness/mean": 0.5} for row in rows_of(out)]
    for row in rows:
        for name in ("actor/pg_clipfrac", "actor/ppo_kl"):
            row.pop(name, None)
            if row["seed"] in learned:
                row[name] = 0.1
    report.figure(rows, tmp_path / "reward.png")
    assert drawn == [[4, 4, 2, 0, 2, 2 * len(learned)]]


@pytest.mark.parametrize(("steps", "width"), [(report.MOST_BARS, 1), (3 * report.MOST_BARS - 1, 3)])
def test_the_picture_of_a_long_run_reads_its_rows_a_few_times(
    steps: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows(list[Row]):
        passes = 0

        def __iter__(self) -> Iterator[Row]:
            self.passes += 1
            return super().__iter__()

    drawn: list[list[tuple[float, float, float]]] = []

    def looked_at(figure: Figure, *_: object, **__: object) -> None:
        bars = figure.axes[3].patches[: report.MOST_BARS]
        drawn.append([(bar.get_x() + bar.get_width() / 2, bar.get_width(), bar.get_height()) for bar in bars])
        assert len(figure.axes[3].patches) == 3 * len(bars)

    monkeypatch.setattr(Figure, "savefig", looked_at)
    times = {"perf/time_train": 1.0, "perf/time_logprobs": 1.0}
    rows = Rows(
        {"seed": seed, "step": step, report.DIFF: 0.0, "training/tokens_compared": 1, "training/tokens_differing": 0}
        | {"perf/time_generate": step + seed, **times}
        for seed in range(2)
        for step in range(1, steps + 1)
    )
    report.figure(rows, tmp_path / "reward.png")
    assert rows.passes < 40
    assert len(drawn[0]) == report.MOST_BARS
    middles = (1 + width) / 2, ((report.MOST_BARS - 1) * width + 1 + steps) / 2
    for bar, middle in zip((drawn[0][0], drawn[0][-1]), middles, strict=True):
        assert bar == pytest.approx((middle, 0.8 * width, middle + 0.5))


def test_own_model_and_own_prompts(tiny: Tiny, out: Path, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    rows = grpo.run(tiny(tmp_path / "run", model=out / "seed0" / "policy", data=data, temperature=0.7))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "warmup/steps" not in rows[0]
    assert rows[0]["val/problems"] == 2
    assert all(row["training/tokens_differing"] == 0 for row in rows[1:])
    assert not (tmp_path / "run" / "seed0" / "warm").exists()


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("hybrid", "nemotron_h"), ("gdn", "qwen3_5_text"), ("moe", "glm4_moe"), ("mla", "deepseek_v3")],
)
def test_another_policy(architecture: str, kind: str, tiny: Tiny, tmp_path: Path) -> None:
    """The recipe finds no difference at any step on Mamba2 and Gated DeltaNet layers, and on routed experts."""
    rows = grpo.run(tiny(tmp_path, architecture=architecture))
    steps = [row for row in rows if row["step"]]
    assert len(steps) == STEPS
    assert all(row["training/tokens_compared"] > 50 for row in steps)
    assert {row["training/rollout_logprobs_diff_max"] for row in steps} == {0.0}
    assert kind in (tmp_path / "seed0" / "policy" / "config.json").read_text()


def test_a_run_goes_on_from_its_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    first = grpo.run(tiny(tmp_path, save_every=1))
    again = grpo.run(tiny(tmp_path, save_every=1, steps=4, resume=True))
    assert [row["step"] for row in again] == [0, 1, 2, 3, 4]
    assert again[:3] == first == rows_of(tmp_path)[:3]
    assert all(row["training/tokens_differing"] == 0 for row in again[1:])
    assert again[3]["actor/lr"] > again[2]["actor/lr"], "the learning rate goes on rising"
    samples = lines_of(tmp_path / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert samples[0].keys() == {"seed", "step", "prompt", "text", "reward"}


def test_what_was_logged_behind_the_checkpoint_is_written_again_once(tiny: Tiny, tmp_path: Path) -> None:
    checkpoint = tmp_path / "seed0" / "checkpoint"
    grpo.run(tiny(tmp_path, steps=2, save_every=2))
    shutil.copytree(checkpoint, tmp_path / "second step")
    grpo.run(tiny(tmp_path, steps=3, save_every=2, resume=True))
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "second step", checkpoint)
    rows = grpo.run(tiny(tmp_path, steps=3, save_every=2, resume=True))
    assert [row["step"] for row in rows] == [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3]
    samples = lines_of(tmp_path / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [step for step in (1, 2, 3) for _ in range(4)]


def test_a_sample_with_separators_of_lines_is_one_sample(tmp_path: Path) -> None:
    """A sample with separators of lines that JSON leaves as they are stays one sample when samples are read again,
    where another seed begins or a run goes on.
    """
    sample = {"prompt": "1\u20282", "text": "3\u20294\u00855"}
    with MetricsLog(tmp_path) as log:
        for step in (1, 2):
            log.write(0, step, {}, [sample])
        log.forget_after(1, -1)
    with MetricsLog(tmp_path, resumed=True) as log:
        log.forget_after(0, 1)
    assert lines_of(tmp_path / "samples.jsonl") == [{"seed": 0, "step": 1, **sample}]


def test_a_row_that_was_being_written_when_a_run_ended_is_forgotten(tmp_path: Path) -> None:
    """Half a row at the end of a file (the run was killed, or the disk full), even half a letter, is forgotten, and the
    next row begins a line.
    """
    row, sample = {"reward/mean": 0.5}, {"text": "9 € 5"}
    with MetricsLog(tmp_path) as log:
        for step in (1, 2):
            log.write(0, step, row, [sample])
    for name, end in (("metrics.jsonl", b'{"seed": 0, "st'), ("samples.jsonl", '{"text": "€'.encode()[:-1])):
        with (tmp_path / name).open("ab") as file:
            file.write(end)
    with MetricsLog(tmp_path, resumed=True) as log:
        assert [row["step"] for row in log.rows] == [1, 2]
        log.forget_after(0, 2)
        log.write(0, 3, row, [sample])
    assert rows_of(tmp_path) == [{"seed": 0, "step": step, **row} for step in (1, 2, 3)]
    assert lines_of(tmp_path / "samples.jsonl") == [{"seed": 0, "step": step, **sample} for step in (1, 2, 3)]


def test_the_board_shows_the_rows_of_the_log(tmp_path: Path) -> None:
    """Rows of an earlier run in the folder, and those that a resumed run takes again, are gone from log and board."""
    folder = tmp_path / "tensorboard" / "seed0"

    def shown() -> list[tuple[int, float]]:
        board = EventAccumulator(str(folder)).Reload()
        return [(point.step, point.value) for point in board.Scalars("reward/mean")]

    for number, (steps, kept) in enumerate([(range(5), None), (range(3, 5), 2), (range(3), None)]):
        with MetricsLog(tmp_path, resumed=kept is not None) as log:
            log.forget_after(0, -1 if kept is None else kept)
            for step in steps:
                log.write(0, step, {"reward/mean": float(number)}, [{"text": "1"}])
        for path in folder.glob("events.out.tfevents.*"):  # whose names begin with the second: runs are in this order
            if ".run" not in path.name:
                path.rename(folder / f"events.out.tfevents.{number}.run")
        assert shown() == [(row["step"], row["reward/mean"]) for row in rows_of(tmp_path)]
    assert shown() == [(0, 2.0), (1, 2.0), (2, 2.0)]


def test_a_row_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"seed": 0, "step": 1}\n{"seed": 0,\n{"seed": 0, "step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, row 2: not JSON \("):
        MetricsLog(tmp_path, resumed=True)


def test_a_run_that_is_killed_while_rows_are_forgotten_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(row: dict[str, Any], **options: Any) -> str:
        if row["step"] == 2:
            raise KeyboardInterrupt
        return written(row, **options)

    written = json.dumps
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(0, step, {})
        with monkeypatch.context() as patched:
            patched.setattr(json, "dumps", kill)
            with pytest.raises(KeyboardInterrupt):
                log.forget_after(0, 2)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3]
    with MetricsLog(tmp_path, resumed=True) as log:
        log.forget_after(0, 2)
        log.write(0, 3, {"again": 1})
    assert [(row["step"], row.get("again")) for row in rows_of(tmp_path)] == [(1, None), (2, None), (3, 1)]


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while it writes a checkpoint, or between the old one's leave and the new one's coming, goes
    on from the one before.
    """
    saved = SavedRun(tmp_path / "checkpoint")
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rename = Path.rename

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    def kill_between(self: Path, target: Path) -> Path:
        if target == saved.folder:
            kill()
        return rename(self, target)

    def killed_while_it_saves(place: object, name: str, by: Callable[..., Any]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(place, name, by)
            with pytest.raises(KeyboardInterrupt):
                saved.save(2, model, tokenizer, optimizer)

    saved.save(1, model, tokenizer, optimizer)
    killed_while_it_saves(Path, "rename", kill_between)
    assert saved.steps_done() == 1
    killed_while_it_saves(Path, "rename", kill_between)
    killed_while_it_saves(torch, "save", kill)
    assert saved.steps_done() == 1
    assert (saved.policy / "model.safetensors").is_file()
    saved.save(3, model, tokenizer, optimizer)
    assert saved.steps_done() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that a run of two seeds has left, one of them killed between its old checkpoint
    and its new one.
    """
    folder = tmp_path_factory.mktemp("earlier")
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer, 0)
    for seed in (0, 1):
        checkpoint = folder / f"seed{seed}" / "checkpoint"
        SavedRun(checkpoint).save(1, model, tokenizer, torch.optim.SGD(model.parameters()))
    shutil.copytree(checkpoint, checkpoint.with_suffix(".new"))
    checkpoint.rename(checkpoint.with_suffix(".old"))
    return folder


class Killed(Exception):
    pass


def test_a_new_run_forgets_the_checkpoints_of_the_run_before(
    tiny: Tiny, out: Path, saved_folder: Path, tmp_path: Path
) -> None:
    """A new run forgets the checkpoints of all seeds at once: it may be killed before it saves one, and would then go
    on from an old one under its own log.
    """
    begun_at: list[int] = []

    def train(seed: experiment.Seed) -> None:
        begun_at.append(seed.steps_done)
        raise Killed

    folder = shutil.copytree(saved_folder, tmp_path / "run")
    for resume in (True, False, True):
        with pytest.raises(Killed):
            experiment.run(tiny(folder, warm_from=out, save_every=1, resume=resume), train)
    assert begun_at == [1, 0, 0]
    assert not list(folder.glob("seed*/checkpoint*"))


def test_a_new_run_from_a_checkpoint_that_it_would_replace_is_refused(
    tiny: Tiny, saved_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved_folder, tmp_path / "run")
    checkpoint = folder / "seed0" / "checkpoint"
    (folder / "metrics.jsonl").write_text("kept")
    with pytest.raises(ValueError, match=r"--model .*policy is in a checkpoint that a new run in .*run removes"):
        grpo.run(tiny(folder, model=checkpoint / "policy"))
    assert SavedRun(checkpoint).steps_done() == 1
    assert (folder / "metrics.jsonl").read_text() == "kept"


@pytest.mark.parametrize("correction", ["truncate", "none"])
def test_no_correction_changes_a_bit_of_an_exact_run(correction: str, tiny: Tiny, out: Path, tmp_path: Path) -> None:
    """An exact run has the same bits whatever the correction. Without a checkpoint it begins with the policy that the
    other run warmed up, and with an empty log.
    """
    (tmp_path / "metrics.jsonl").write_text('{"seed": 0, "step": 0}\n{"seed": 0, "step": 1}\n')
    rows = grpo.run(tiny(tmp_path, warm_from=out, correction=correction, resume=True))
    first = [row for row in rows_of(out) if row["seed"] == 0]
    assert [row["step"] for row in rows] == [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "val/accuracy"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in first]
    assert not (tmp_path / "seed0" / "warm").exists()


def test_a_chat_template_and_an_instruction(tiny: Tiny, out: Path, tmp_path: Path) -> None:
    """The model is asked in its chat template, and with `chat="never"` as the prompt is, with the instruction behind
    it.
    """
    model, tokenizer = tiny_model.load(out / "seed0" / "policy")
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}[{{ message['content'] }}]{% endfor %}="
    tiny_model.save(model, tokenizer, tmp_path / "model")
    problem = Problem("1+1", "2")
    for chat, text in (("auto", "[1+1;]="), ("never", "1+1;")):
        settings = tiny(tmp_path / chat, model=str(tmp_path / "model"), chat=chat, instruction=";", samples_shown=0)
        seen: list[str] = []

        def look(seed: Any, seen: list[str] = seen, settings: Any = settings) -> None:
            asked = seed.style.prompt_ids(seed.tokenizer, problem)
            seen.append(seed.tokenizer.decode(asked, skip_special_tokens=True))
            grpo.train(seed, settings)

        rows = experiment.run(settings, look)
        assert seen[0].replace(" ", "") == text
        assert rows[-1]["training/tokens_differing"] == 0


def test_weights_and_biases(tiny: Tiny, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda values, step: shown.append({"step": step, **values}), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    rows = grpo.run(tiny(tmp_path, model=out / "seed0" / "policy", log_to="wandb"))
    assert [row["step"] for row in shown] == [0, 1, 2]
    assert shown[1]["reward/mean"] == rows[1]["reward/mean"]
    assert "**prompt** " in shown[1]["samples"]
    assert not (tmp_path / "tensorboard").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        grpo.run(tiny(tmp_path, model=out / "seed0" / "policy", log_to="wandb"))


def test_each_seed_is_a_run_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed gets a run of wandb, by wandb itself, which gives who begins a run the one that is open."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    runs: list[Any] = []
    init = wandb.init

    def noted(**given: Any) -> Any:
        runs.append(init(**given))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", noted)
    with MetricsLog(tmp_path, "wandb") as log:
        for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1)):
            log.write(seed, step, {"reward/mean": seed + step * 0.8125})
    wandb.teardown()
    assert [run.name for run in runs] == [f"{tmp_path.name}-seed0", f"{tmp_path.name}-seed1"]
    files = [next(tmp_path.glob(f"wandb/*/run-{run.id}.wandb")).read_bytes() for run in runs]
    assert [[value in file for value in (b"0.8125", b"1.8125")] for file in files] == [[True, False], [False, True]]
