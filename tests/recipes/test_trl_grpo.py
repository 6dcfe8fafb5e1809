"""The recipe for TRL makes a step of each trainer on a user's model, and refuses what it can not train."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("trl", reason="TRL is not installed: pip install 'samebit[trl]'")

from samebit.recipes import tiny_model
from samebit.recipes.trl_grpo import run
from samebit.recipes.trl_grpo.task import AnswerReward
from samebit.recipes.verl_grpo import task as verl_task
from samebit.recipes.verl_grpo.task import TEMPLATE

from .. import forks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_model.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model.save(tiny_model.build_model(tokenizer, 0, hidden_size=32, num_hidden_layers=1), tokenizer, folder)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold few problems out, and keep TRL from sending word of the run."""
    monkeypatch.setattr("samebit.recipes.trl_grpo.task.HELD_OUT", 4)
    monkeypatch.setenv("CI", "1")


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    data = out / "sums.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    sizes = {"steps": 1, "prompts": 2, "samples": 4, "micro-batch": 4, "max-tokens": 9, "eval-every": 1}
    given = {"model": model, "data": data, "out": out, **sizes}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + list(more)


@pytest.mark.parametrize("more", [["--beta", "0.1", "--lora", "2"], ["--trainer", "rloo"]], ids=" ".join)
def test_one_step(more: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.main(arguments(model, tmp_path, *more))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["samebit/tokens_differing"] == 0.0
    assert 0.0 <= rows[0]["accuracy"] <= 1.0
    assert "0 of" in capsys.readouterr().out
    assert (tmp_path / "policy").is_dir()


def test_a_tokenizer_whose_end_token_the_model_lacks(model: Path, tmp_path: Path) -> None:
    """A tokenizer may have an end token that a cut-down model lacks: samples end at the model's own."""
    policy, tokenizer = tiny_model.load(model)
    tokenizer.add_special_tokens({"eos_token": "<over>"})
    tiny_model.save(policy, tokenizer, tmp_path / "model")
    run.main(arguments(tmp_path / "model", tmp_path))
    assert '"accuracy"' in (tmp_path / "metrics.jsonl").read_text()


def always_says(policy: PreTrainedModel, token: int) -> None:
    """Give a model weights with which this token follows everything: it is the longest of vectors of one direction."""
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        table = policy.get_input_embeddings().weight
        table.zero_()[:, 0] = 1.0
        table[token, 0] = 50.0


def test_async_on_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The asynchronous trainer runs on the built-in model, here a small one that is not warmed up, without a
    difference.
    """
    build = verl_task.build
    small: dict[str, Any] = {"warm": False, "hidden_size": 32, "num_hidden_layers": 1}
    monkeypatch.setattr(verl_task, "build", lambda folder, **given: build(folder, **{**given, **small}))
    sizes = {"steps": 1, "prompts": 2, "samples": 4, "micro-batch": 4, "max-tokens": 9}
    given = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    run.main(["--trainer", "async", "--out", str(tmp_path), *given])
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["samebit/tokens_differing"], row["samebit/tokens_compared"] > 0) == (0.0, True)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_each_of_the_trainers_end_tokens_ends_an_answer(trainer: str, model: Path, tmp_path: Path) -> None:
    """An answer ends at each of several end tokens: turns may end at another one than texts, as in Gemma and Phi-3."""
    policy, tokenizer = tiny_model.load(model)
    two = tokenizer.get_vocab()["2"]
    always_says(policy, two)
    tiny_model.save(policy, tokenizer, tmp_path / "model")
    ends = {"eos_token_id": [tokenizer.eos_token_id, two]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(ends))
    given = arguments(tmp_path / "model", tmp_path, "--trainer", trainer)
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "answer": "2"}) + "\n" for i in range(10))
    )
    run.main(given)
    first, *_ = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (first["reward"], first["accuracy"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--micro-batch", "0"], "--micro-batch must be at least 1, got 0"),
        (["--eval-every", "0"], "--eval-every must be at least 1, got 0"),
        (["--micro-batch", "3"], "--micro-batch 3 does not divide 8"),
        (["--prompts", "9"], r"--prompts 9: 8 are left for training of .*sums\.jsonl"),
        (["--prompts", "9", "--trainer", "rloo"], "--prompts 9: 8 are left for training of"),
        (["--trainer", "async", "--beta", "0.1"], "no reference model"),
        (["--answer-after", ""], "--answer-after must not be empty"),
        (["--answer-after", "1"], "row 1: no completion could earn the answer '1', which ends with '1'"),
        (["--model", "nowhere/at all"], "error: "),
    ],
)
def test_what_is_wrong_is_said(more: list[str], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        run.main(arguments(model, tmp_path, *more))


def test_a_run_that_is_finished_says_that_nothing_was_compared(model: Path, tmp_path: Path) -> None:
    """A finished run that is resumed says that nothing was compared, behind a checkpoint at the end of an epoch:
    transformers takes a step more behind others.
    """
    given = arguments(model, tmp_path, "--prompts", "8", "--save-every", "1")
    run.main(given)
    with pytest.raises(SystemExit, match="nothing was compared: no step was trained"):
        run.main([*given, "--resume", str(tmp_path / "checkpoints" / "checkpoint-1")])


def test_without_trl_it_says_what_is_missing() -> None:
    script = Path(run.__file__)
    lines = [
        "import importlib.metadata, runpy, sys",
        "def none(name): raise importlib.metadata.PackageNotFoundError(name)",
        "importlib.metadata.version = none",
        "sys.modules['trl'] = None",
        f"runpy.run_path({str(script)!r}, run_name='__main__')",
    ]
    ended = subprocess.run([*forks.python(), "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "ImportError: samebit.rollout.integrations.trl needs TRL 1.16.x: " in ended.stderr


def test_data_needs_a_model_and_the_model_a_chat_template(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data needs --model"):
        run.main(["--data", "rows.jsonl", "--out", str(tmp_path)])
    plain, tokenizer = tiny_model.load(model)
    tokenizer.chat_template = None
    tiny_model.save(plain, tokenizer, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(SystemExit, match="no chat template"):
        run.main(arguments(tmp_path / "model", tmp_path))


def test_the_reward_wants_an_end_and_the_answer() -> None:
    completions = [[{"role": "assistant", "content": text}] for text in ("[1+1=2]2", "2", "3")]
    given = AnswerReward([7])(completions, [[1, 7], [1, 1], [1, 7]], ["2", "2", "2"])
    assert given == [1.0, 0.0, 0.0]
    given = AnswerReward([7], "=")(completions, [[1, 7], [1, 7], [1, 7]], ["2]2", "2", "2"])
    assert given == [1.0, 1.0, 0.0]
