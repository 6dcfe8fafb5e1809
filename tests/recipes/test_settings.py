"""The command line uses what is given, and refuses what is unknown or impossible."""

from pathlib import Path

import pytest
import torch

from samebit.recipes.settings import OffPolicy, OnPolicy, parse


def test_no_arguments_are_the_defaults() -> None:
    assert parse(OnPolicy, "grpo.py", []) == OnPolicy()
    assert parse(OffPolicy, "grpo_async.py", []) == OffPolicy()


def test_given_options_arrive_with_their_types() -> None:
    given = ["--model", "m", "--data", "d.jsonl", "--steps", "3", "--lr", "1e-3", "--out", "runs/x"]
    common = {"model": "m", "data": "d.jsonl", "steps": 3, "lr": 1e-3, "out": Path("runs/x")}
    assert parse(OnPolicy, "grpo.py", [*given, "--sync", "shm"]) == OnPolicy(**common, sync="shm")
    assert parse(OffPolicy, "grpo_async.py", [*given, "--in-flight", "wait"]) == OffPolicy(**common, in_flight="wait")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3"], "unrecognized arguments"),
        (["--device", "meta"], "invalid choice"),
        pytest.param(
            ["--device", "cuda"],
            "sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["--steps", "three"], "invalid int value"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--samples", "1"], "--samples must be at least 2"),
        (["--truncation", "0.5"], "--truncation must be at least 1"),
        (["--model", "m", "--warm-from", "runs/grpo"], "--warm-from is for the built-in model"),
        (["--temperature", "0"], "--temperature must be positive"),
        (["--data", "d.jsonl"], "--data needs --model"),
        (["--prompt-style", "question"], "needs --model"),
        (["--prompt-style", "poem"], "invalid choice"),
        (["--sync", "post"], "invalid choice"),
        (["--log-to", "paper"], "invalid choice"),
        (["--columns", "prompt"], "--columns must be two names"),
        (["--answer-after", ""], "--answer-after must not be empty"),
        (["--save-every", "-1"], "--save-every must be at least 0"),
        (["--max-num-seqs", "5000"], "max_num_batched_tokens"),
        (["--kv-cache-gb", "0"], "kv_cache_gb must be"),
        (["--temperature", "1e-5"], "temperature must be"),
        (["--in-flight", "wait"], "unrecognized arguments"),
    ],
)
def test_bad_options_end_with_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(OnPolicy, "grpo.py", arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_process_of_its_own_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert OnPolicy(device="cuda", sync="copy").device == "cuda"
    with pytest.raises(ValueError, match="--sync shm: the other process computes on the CPU"):
        OnPolicy(device="cuda", sync="shm")
    with pytest.raises(ValueError, match="--device cuda: the worker's process computes on the CPU"):
        OffPolicy(device="cuda")
