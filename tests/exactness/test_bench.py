"""`samebit bench` tells bytes that are those allocated and those of the documented formula, and measures its speed."""

import json
from pathlib import Path

import pytest
import torch

from samebit.kernels.binding.binding import binding_of
from samebit.rollout import RolloutConfig, RolloutWorker, cli
from samebit.rollout.memory.pool_sizes import count_held_states

from .families import bound_model, make_model


def figures(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert cli.main(["bench", "--json", *arguments]) == 0
    return {name: one["value"] for name, one in json.loads(capsys.readouterr().out)["metrics"].items()}


def formula(name: str, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a checkpoint and of a running sequence, as docs/prefix-cache.md has them."""
    layout = binding_of(bound_model(name, dtype)).state_layout
    shape, layers, w = layout.shape, layout.num_layers, dtype.itemsize
    heads, p, n, groups, taps = shape.heads, shape.head_dim, shape.state_size, shape.groups, shape.taps
    wide, deep = -(-p // 16) * 16, -(-n // 16) * 16
    convolved = heads * p + 2 * groups * n
    tiles = groups * -(-heads // groups // 8)
    checkpoint = layers * (4 * heads * n * wide + w * (taps - 1) * convolved)
    return checkpoint, 2 * checkpoint + layers * (16 * w * heads * wide + 64 * deep * tiles + 192 * heads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["NemotronH", "FalconH1", "Mamba2", "Qwen3", "DeepseekV3"])
def test_memory_is_that_of_the_formula_and_of_a_worker(
    name: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(name, getattr(torch, dtype)).save_pretrained(tmp_path)
    shown = figures(["--memory", str(tmp_path)], capsys)
    config = RolloutConfig(num_blocks=7, max_num_seqs=3, max_model_len=100)
    with RolloutWorker(str(tmp_path), config=config) as worker:
        runner = worker._engine.runner
        assert (
            sum(page.nbytes for page in runner.memory.pages)
            == 8 * shown[f"kv_block_of_{runner.shape.block_size}_tokens"]
        )
        if runner.memory.states is None:
            assert shown["state_of_a_sequence"] == shown["state_of_a_checkpoint"] == 0
            assert len(shown) == 3
            return
        slots, checkpoints = (
            sum(tensor.nbytes for layer in part for tensor in vars(layer).values() if isinstance(tensor, torch.Tensor))
            for part in (runner.memory.states.layers, runner.memory.states.checkpoints)
        )
    assert slots == (3 + count_held_states(config)) * shown["state_of_a_sequence"]
    assert checkpoints == worker.stats()["states_total"] * shown["state_of_a_checkpoint"]
    assert (shown["state_of_a_checkpoint"], shown["state_of_a_sequence"]) == formula(name, getattr(torch, dtype))
    assert shown["sequences_running_or_held"] == 64 + 16
    assert shown["checkpoints"] == (1 << 28) // shown["state_of_a_checkpoint"]
    assert (
        shown["all_states"] == 80 * shown["state_of_a_sequence"] + shown["checkpoints"] * shown["state_of_a_checkpoint"]
    )


def test_speed_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("NemotronH").save_pretrained(tmp_path)
    load = ["--requests", "3", "--prompt", "5", "--tokens", "4"]
    shown = figures([str(tmp_path), *load], capsys)
    assert shown.keys() == {"output_tokens_per_second", "time_to_first_token"}
    assert all(value > 0 for value in shown.values())
    assert cli.main(["bench", str(tmp_path), *load]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_memory_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("Mamba2").save_pretrained(tmp_path)
    assert cli.main(["bench", "--memory", str(tmp_path)]) == 0
    names = [line.rsplit(maxsplit=2)[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert names == [
        *("kv block of 64 tokens", "state of a sequence", "state of a checkpoint"),
        *("sequences running or held", "checkpoints", "all states"),
    ]


@pytest.mark.parametrize("arguments", [["--prompt", "400"], ["--memory", "--dtype", "bfloat16"]])
def test_what_can_not_be_measured_is_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--prompt" in arguments:
        make_model("NemotronH").save_pretrained(tmp_path)
    assert cli.main(["bench", str(tmp_path), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line for line in printed.err.splitlines() if line.startswith("samebit bench: ")]
    if "--prompt" in arguments:
        assert (
            "400 tokens a prompt (--prompt) and 64 new ones (--tokens) are 464 in all; allowed: up to this model's 320 "
            "positions" in printed.err
        )


@pytest.mark.parametrize("command", ["check", "bench"])
def test_the_help_says_that_a_seed_chooses_the_prompts_alone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A seed chooses the prompts alone, as the help says: samples have seeds of their own, one a request."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--seed N of the random prompts (0) --json" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "least"), [("--prompt x", 1), ("--tokens 0", 1), ("--seed -1", 0), ("--seed 1.5", 0)]
)
def test_a_number_that_is_none_says_which_are_allowed(
    given: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    option, number = given.split()
    with pytest.raises(SystemExit):
        cli.main(["bench", "folder", option, number])
    said = f"argument {option}: must be a whole number of at least {least}, got '{number}'"
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("memory", [[], ["--memory"]])
def test_a_device_that_is_not_there_is_named(
    memory: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("Qwen3").save_pretrained(tmp_path)
    assert cli.main(["bench", str(tmp_path), "--device", "cuda", *memory]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
